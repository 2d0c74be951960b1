"""What is wrong with a rule is said in one line."""

from __future__ import annotations

import pytest

from unity_ir.errors import UnityError
from unity_ir.rules.check import check, free, samples
from unity_ir.rules.parse import parse_poly, parse_rules, parse_tensor
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.poly import Poly, number, symbol
from unity_ir.rules.text import rule_text, tensor_text

ROUND = (
    'subst.rule "r" (%x: int [a.., 2*d*k - 1:d] sum = d copy = e, %w: [d*n:d, #a + 2]) where n >= 2*m, k = e '
    'attributes {exact, proof = {verdict = "proved", seconds = 0.25, assumed = ["n >= 1", "k >= 2"]}} {\n'
    '  %a, %b = reduce %x {by = d, s = "relu", q = [], f = -n + 2, p = -1.5, g = 1e-05, t = $t}\n'
    "  yield %a, %b } to { yield %x, %w }"
)


def test_what_is_written_is_read_back():
    (rule,) = parse_rules(ROUND)
    (again,) = parse_rules(rule_text(rule))
    assert rule_text(again) == rule_text(rule)
    assert (again.exact, again.proof, again.conditions) == (True, rule.proof, rule.conditions)
    assert [tensor_text(i) for i in again.inputs] == ["int [a.., 2*d*k - 1:d] sum = d copy = e", "[d*n:d, #a + 2]"]
    (a,), (b,) = ([o for o in r.operations(r.source)] for r in (rule, again))
    assert (a.op, a.attributes) == (b.op, b.attributes)
    assert [t.index for t in again.source if not hasattr(t, "name")] == [0, 1]


N = symbol("n")


@pytest.mark.parametrize(
    ("text", "poly"),
    [
        ("2*d*m + n - 1", number(2) * symbol("d") * symbol("m") + N - number(1)),
        ("-n + 2", number(2) - N),
        ("0", number(0)),
        ("#a + 1", symbol("#a") + number(1)),
        ("n*n", N * N),
        ("- 3", number(-3)),
    ],
)
def test_polynomials_are_read_as_sums_of_products(text: str, poly: Poly):
    assert parse_poly(text) == poly


def rule(source: str, target: str, inputs: str = "%x: [n, m]", rest: str = "") -> Substitution:
    return parse_rules(f'subst.rule "r" ({inputs}) {rest} {{ {source} }} to {{ {target} }}')[0]


RELU = "%y = relu %x yield %y"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: rule("%y = rellu %x yield %y", RELU), "pcg.rellu: unknown operator; did you mean relu"),
        (lambda: rule("%y = relu %x, %x yield %y", RELU), "relu takes 1 operands, not 2"),
        (lambda: rule("%y = add %x yield %y", RELU), "add takes 2 operands, not 1"),
        (lambda: rule("%y = partition %x, %x {dim = 0, by = d} yield %y", RELU), "partition takes 1 operands, not 2"),
        (lambda: rule("%y = relu %x {by = 1} yield %y", RELU), "relu has no attribute by; it has none"),
        (
            lambda: rule("%y = concat %x, %x {dims = 0} yield %y", RELU),
            "concat has no attribute dims; did you mean dim",
        ),
        (lambda: rule("%y = concat %x, %x yield %y", RELU), "concat needs the attribute dim; add it"),
        (lambda: rule("%y = reduce %x yield %y", RELU), "reduce needs the attribute by; add it"),
        (
            lambda: rule("%y = concat %x, %x {dim = $d} yield %y", RELU),
            "concat: attribute dim is of kind int; write it so",
        ),
        (lambda: rule("%y = transpose %x {perm = 1} yield %y", RELU), "transpose: attribute perm is of kind ints;"),
        (lambda: rule("%y = scale %x {by = n} yield %y", RELU), "scale: attribute by is of kind float; write it so"),
        (lambda: rule(RELU, "%y = relu %x yield %y, %y"), "the source yields 1 values, the target 2; yield as many"),
        (lambda: rule("yield %x", "yield %x"), "the source yields an input, which nothing can match; yield results"),
        (lambda: rule(RELU, "yield %z", "%x: [n], %z: [n]"), "input %z is not in the source, so a match does not give"),
        (
            lambda: rule(RELU, "%y = scale %x {by = $s} yield %y"),
            "$s is not in the source, so a match does not give it",
        ),
        (
            lambda: rule(RELU, "%y = reduce_sum %x {dim = #a} yield %y"),
            "#a is the number of dims in a.., which no input",
        ),
        (lambda: rule(RELU, RELU, "%x: [a, a..]"), "a is a size and the dims a..; rename one"),
        (lambda: rule(RELU, "%p, %q = relu %x yield %q"), "the target names more results than an operator has; remove"),
        (lambda: rule(RELU, "%y = transpose %x {perm = [1, 0]} yield %y"), "result 0 is !pcg.tensor<["),
        (lambda: rule(RELU, "%y = transpose %x {perm = [1, 1]} yield %y"), "the target is ill typed at m = "),
        (
            lambda: rule(RELU, "%y = partition %x {dim = 0, by = 1} yield %y", rest="where n <= 0"),
            "no small sizes make",
        ),
        (
            lambda: rule("%y = add %x, %z yield %y", "yield %x", "%x: [3], %z: [4]"),
            "no small sizes make the source well",
        ),
    ],
)
def test_rules_that_do_not_hold_together(bad, message: str):
    with pytest.raises(UnityError) as error:
        check(bad())
    text = str(error.value)
    assert text.startswith(f"subst.rule: r: {message}")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'subst.rule "r" (%x: [n], %x: [m]) { yield %x } to { yield %x }',
            "f:1:26: input %x is declared twice; rename",
        ),
        ('subst.rule "r" (%x: [n]) {\n%x = relu %x yield %x }', "f:2:24: the text ends too soon"),
        ('subst.rule "r" (%x: [n]) {\n%x = relu %x yield %x } to { yield %x }', "f:2:1: %x is defined twice; rename"),
        (
            'subst.rule "r" (%x: [n]) { yield %y } to { yield %x }',
            "f:1:34: %y is not defined; it must be an input or a",
        ),
        (
            'subst.rule "r" (%x: [n]) { %y = f %x {a = 1, a = 2} yield %y } to { yield %x }',
            "f:1:46: attribute a is given",
        ),
        ('subst.rule "r" (%x: [n**2]) { yield %x } to { yield %x }', "f:1:24: `*2]) { yield %x } to` is not expected"),
        ("subst.rule r", "f:1:12: `r` is not expected here"),
        ("func.func @f() {}", "f:1:1: `func.func @f() {}` is not expected here"),
    ],
)
def test_text_that_is_no_rule(text: str, message: str):
    with pytest.raises(UnityError) as error:
        parse_rules(text, "f")
    assert str(error.value).startswith(message)


def test_samples_are_unequal_for_unequal_symbols():
    merge = rule(
        "%p = matmul %x, %v yield %p", "%p = matmul %x, %v yield %p", "%x: [a.., d*k:d], %v: [d*k:d, n]", "where n >= k"
    )
    found = list(samples(merge))
    assert all(b["k"] != b["n"] and b["d"] == 2 and b["n"] >= b["k"] for b in found)
    assert {len(b["a"]) for b in found} == {0, 1, 2}
    assert free(merge) == ()


def test_inputs():
    assert tensor_text(parse_tensor("int [b.., 2 * n]")) == "int [b.., 2*n]"
    with pytest.raises(UnityError, match="the text ends too soon"):
        parse_tensor("[n")
