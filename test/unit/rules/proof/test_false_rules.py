"""Classes of false rules that were once proved: none of many of each is, and their true neighbours still are."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.proof.prove import Proof, prove


def proof(text: str) -> Proof:
    (rule,) = parse_rules(f'subst.rule "rule" {text}', "here")
    return prove(rule)


# --- which dim an expression is, at every number of dims -------------------------------------------------------------


def reduced(op: str, named: int, dim: str, last: str = "k") -> str:
    """op(x * y, dim) -> op(x, dim) * y, which holds unless `dim` is the last one, which y has."""
    shape = ", ".join(["a..", *["k"] * named])
    return (
        f"(%x: [{shape}], %y: [{last}]) {{ %p = mul %x, %y %q = {op} %p {{dim = {dim}}} yield %q }} to "
        f"{{ %p = {op} %x {{dim = {dim}}} %q = mul %p, %y yield %q }}"
    )


def picked(op: str, named: int, dim: str) -> str:
    """Rows are picked from a sum, or from both addends."""
    shape = ", ".join(["a..", *["k"] * named])
    ids = "int [m]" if op == "index_select" else f"int [{shape}]"
    return (
        f"(%x: [{shape}], %y: [k], %i: {ids}) {{ %p = mul %x, %y %q = {op} %p, %i {{dim = {dim}}} yield %q }} to "
        f"{{ %p = {op} %x, %i {{dim = {dim}}} %q = mul %p, %y yield %q }}"
    )


def moving_dims() -> Iterator[str]:
    random = Random(0)
    while True:
        named = random.randint(2, 5)
        times, plus = random.randint(0, 3), random.randint(-1, 4)
        if times == 1 and 0 <= plus < named:
            continue  # That is the same dim everywhere.
        dim = " + ".join(t for t in (f"{times}*#a" if times else "", str(plus) if plus >= 0 else "") if t)
        dim += f" - {-plus}" if plus < 0 else ""
        yield random.choice(
            [
                reduced(random.choice(["reduce_sum", "reduce_mean"]), named, dim or "0"),
                picked(random.choice(["gather", "index_select"]), named, dim or "0"),
            ]
        )


@pytest.mark.slow
def test_no_dim_that_moves_is_proved():
    texts = moving_dims()
    for _ in range(110):
        text = next(texts)
        assert not proof(text).forward, text


def test_a_dim_that_is_refused_is_told():
    found = proof(reduced("reduce_sum", 4, "2*#a"))
    assert found.verdict == "undecided"
    assert "depends on the number of dims" in found.detail


@pytest.mark.parametrize("dim", ["#a", "#a + 1"])
def test_a_dim_that_stays_is_proved(dim: str):
    assert proof(reduced("reduce_sum", 3, dim)).proved
    assert proof(picked("index_select", 3, dim)).proved


def test_dims_of_broadcasting_that_meet_a_pack_are_refused():
    text = "(%x: [a..], %y: [1, 1, 1]) { %p = add %x, %y %q = reduce_sum %p {dim = 0} yield %q } to "
    assert not proof(text + "{ %p = add %y, %x %q = reduce_sum %p {dim = 0} yield %q }").forward


# --- casts -----------------------------------------------------------------------------------------------------------

CONSUMERS = {
    "embedding": ("%t: [v, e]", "%q = embedding {}, %t"),
    "one_hot": ("", "%q = one_hot {} {{classes = n}}"),
    "float": ("", '%q = cast {} {{to = "f64"}}'),
    "gather": ("%t: [v, n]", "%q = gather %t, {} {{dim = 0}}"),
}


def rule_of(head: str, source: str, target: str) -> str:
    return f"({head}) {{ {source} yield %q }} to {{ {target} yield %q }}"


def cast(name: str, of: str, to: str) -> str:
    return f'%{name} = cast %{of} {{to = "{to}"}} '


def narrowed_ids() -> Iterator[str]:
    """Ids through a type that does not hold them all, perhaps through a wider one, too."""
    for name, (operand, line) in CONSUMERS.items():
        for steps in (["bf16"], ["f16"], ["f32"], ["i32"], ["bool"], ["f64"], ["f32", "bf16"], ["f64", "f16"]):
            head = ", ".join(filter(None, [f"%ids: int {'[n, m]' if name == 'gather' else '[n]'}", operand]))
            names = ["ids", *(f"c{i}" for i in range(len(steps) + 1))]
            chain = "".join(cast(names[i + 1], names[i], to) for i, to in enumerate([*steps, "i64"]))
            yield rule_of(head, chain + line.format(f"%{names[-1]}"), line.format("%ids"))


def narrowed_numbers() -> Iterator[str]:
    """A number cast before or after what does not leave it as it is."""
    before = {"relu": "", "shift": " {by = -9.0}", "scale": " {by = 3.0}", "neg": "", "exp": "", "floor": ""}
    for op, attributes in before.items():
        made = f"%y = {op} %x{attributes} "
        for narrow in ("bf16", "f16", "f32", "i64", "i32", "bool"):
            yield rule_of(
                "%x: [a..]", made + cast("c", "y", narrow) + cast("q", "c", "f64"), made + cast("q", "y", "f64")
            )
    for op in ("exp", "sin", "square", "tanh", "cos"):
        for narrow in ("bf16", "f16", "i64"):
            source = f"%y = {op} %x " + cast("q", "y", narrow)
            yield rule_of("%x: [a..]", source, cast("c", "x", "f64") + f"%y = {op} %c " + cast("q", "y", narrow))
    for narrow in ("bf16", "f16", "f32"):
        for op in ("reduce_sum", "reduce_mean"):
            source = f"%y = {op} %x {{dim = #a}} " + cast("q", "y", narrow)
            yield rule_of("%x: [a.., n]", source, cast("c", "x", narrow) + f"%q = {op} %c {{dim = #a}}")
        for op in ("add", "sub", "mul", "div"):
            target = cast("c", "x", narrow) + cast("d", "y", narrow) + f"%q = {op} %c, %d"
            yield rule_of("%x: [n], %y: [n]", f"%z = {op} %x, %y " + cast("q", "z", narrow), target)


@pytest.mark.slow
def test_no_cast_that_changes_numbers_is_the_identity():
    texts = [*narrowed_ids(), *narrowed_numbers()]
    assert len(texts) >= 100
    for text in texts:
        assert not proof(text).forward, text


def test_ids_beyond_bfloat16_refute():
    line = "%q = embedding {}, %t"
    chain = cast("c", "ids", "bf16") + cast("i", "c", "i64")
    found = proof(rule_of("%ids: int [n], %t: [v, e]", chain + line.format("%i"), line.format("%ids")))
    assert found.verdict == "refuted"


@pytest.mark.parametrize(
    "text",
    [
        '(%x: [a..]) { %s = cast %x {to = "bf16"} %t = cast %s {to = "f32"} %q = cast %t {to = "f64"} yield %q } to '
        '{ %s = cast %x {to = "bf16"} %q = cast %s {to = "f64"} yield %q }',
        "(%x: [n, m]) { %s = cast %x {to = $t} %q = transpose %s {perm = [1, 0]} yield %q } to "
        "{ %s = transpose %x {perm = [1, 0]} %q = cast %s {to = $t} yield %q }",
        '(%x: [a..]) { %s = cast %x {to = "bf16"} %t = cast %s {to = "f32"} %r = relu %t yield %r } to '
        '{ %s = cast %x {to = "bf16"} %r = relu %s %t = cast %r {to = "f32"} yield %t }',
        '(%i: int [n], %t: [v, e]) { %c = cast %t {to = "f64"} %q = embedding %i, %c yield %q } to '
        '{ %e = embedding %i, %t %q = cast %e {to = "f64"} yield %q }',
    ],
    ids=["widened twice", "moved", "relu", "picked"],
)
def test_casts_that_change_nothing_are_proved(text: str):
    found = proof(text)
    assert found.proved, found.detail


# --- gradients -------------------------------------------------------------------------------------------------------


def detached_expressions(count: int) -> Iterator[str]:
    """A term of smooth functions of %x, with `detach` at one value it depends on, against the same without."""
    random = Random(3)
    for _ in range(count):
        lines, values = list[str](), ["%x", "%y"]
        for i in range(random.randint(1, 4)):
            name = f"%v{i}"
            if random.random() < 0.5:
                lines.append(f"{name} = {random.choice(['sin', 'tanh', 'exp', 'sigmoid', 'square'])} {values[-1]}")
            else:
                op = random.choice(["add", "mul", "sub"])
                lines.append(f"{name} = {op} {values[-1]}, {random.choice(values[:-1])}")
            values.append(name)
        at = random.randrange(len(lines))
        op, operands = lines[at].split(" = ")[1].split(" ", 1)
        first, *others = operands.split(", ")
        cut = [*lines[:at], f"%d = detach {first}", f"%v{at} = {op} {', '.join(['%d', *others])}", *lines[at + 1 :]]
        # Both inputs are used, so that a match gives them.
        end = f"%u = add %x, %y %q = mul %u, {values[-1]} yield %q"
        yield f"(%x: [n], %y: [n]) {{ {' '.join(cut)} {end} }} to {{ {' '.join(lines)} {end} }}"


@pytest.mark.slow
def test_no_rule_that_lets_a_gradient_through_is_proved():
    for text in detached_expressions(100):
        found = proof(text)
        assert not found.trainable, text
        assert found.verdict in ("forward only", "undecided"), (found.verdict, text)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("(%x: [a..]) { %d = detach %x %q = relu %d yield %q } to { %q = relu %x yield %q }", "forward only"),
        (
            "(%x: [a..]) { %f = floor %x %s = sub %f, %x %d = detach %s %q = add %d, %x yield %q } to "
            "{ %q = floor %x yield %q }",
            "forward only",
        ),
        (
            "(%x: [a..], %y: [a..]) { %f = add %x, %y %d = detach %f yield %d } to "
            "{ %f = detach %x %s = detach %y %d = add %f, %s yield %d }",
            "proved",
        ),
        (
            "(%x: [n, m, k]) { %p = reduce_max %x {dim = 2} %q = reduce_max %p {dim = 1} yield %q } to "
            "{ %q = reduce_max %x {dim = 1, count = 2} yield %q }",
            "almost everywhere",
        ),
        ("(%x: [n]) { %q = maximum %x, %x yield %q } to { %q = scale %x {by = 1.0} yield %q }", "proved"),
    ],
    ids=["relu", "straight through", "both are zero", "ties of maxima", "a maximum of equals"],
)
def test_verdicts_on_gradients(text: str, verdict: str):
    found = proof(text)
    assert found.verdict == verdict, found.detail


# --- what is only seen at samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "(%x: [a..]) { %s = shift %x {by = 20.0} %q = relu %s yield %q } to { %q = shift %x {by = 20.0} yield %q }",
        "(%x: [a..]) { %s = scale %x {by = $s} %q = relu %s yield %q } to "
        "{ %s = relu %x %q = scale %s {by = $s} yield %q }",
        "(%x: [a..]) { %q = clamp %x {low = -50.0, high = 50.0} yield %q } to { %q = scale %x {by = 1.0} yield %q }",
        "(%x: [a..]) { %s = scale %x {by = $s} %t = abs %s yield %t } to "
        "{ %s = abs %x %t = scale %s {by = $s} yield %t }",
    ],
    ids=["large", "parameters below 0", "bounds", "signs"],
)
def test_directed_samples_refute(text: str):
    assert proof(text).verdict == "refuted"


@pytest.mark.parametrize(
    "text",
    [
        "(%x: [m, k], %u: [k, n], %w: [k, n]) attributes {exact} { %a = add %u, %w %q = matmul %x, %a yield %q } to "
        "{ %a = matmul %x, %u %b = matmul %x, %w %q = add %a, %b yield %q }",
        "(%x: [a..], %y: [a..], %z: [a..]) attributes {exact} { %a = add %x, %y %q = add %a, %z yield %q } to "
        "{ %a = add %y, %z %q = add %x, %a yield %q }",
        "(%x: [n, m]) attributes {exact} { %a = reduce_sum %x {dim = 1} %q = reduce_sum %a {dim = 0} yield %q } to "
        "{ %q = reduce_sum %x {dim = 0, count = 2} yield %q }",
    ],
    ids=["distributive", "associative", "sums of sums"],
)
def test_what_rounds_otherwise_is_not_exact(text: str):
    found = proof(text)
    assert found.verdict == "undecided"
    assert "round alike" in found.detail
    assert proof(text.replace("attributes {exact} ", "")).proved


# --- products in 8 bits ----------------------------------------------------------------------------------------------


def test_products_in_8_bits_are_not_those_in_16():
    """They are the same to layouts and partial sums; a rule that exchanges them would change numbers."""
    one, other = "%z = float8_matmul %x, %w yield %z", "%z = matmul %x, %w yield %z"
    for source, target in ((one, other), (other, one)):
        assert proof(f"(%x: [m, k], %w: [k, n]) {{ {source} }} to {{ {target} }}").verdict != "proved"
    assert proof(f"(%x: [m, k], %w: [k, n]) {{ {one} }} to {{ {one} }}").verdict == "proved"
