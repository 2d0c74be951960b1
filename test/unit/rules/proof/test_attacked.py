"""False rules that an attack on the prover once got through, by what it took for true."""

from __future__ import annotations

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Input, Operation, ResultOf, Substitution
from unity_ir.rules.poly import symbol
from unity_ir.rules.proof.prove import Proof, prove


def proof(text: str) -> Proof:
    (rule,) = parse_rules(f'subst.rule "rule" {text}', "here")
    return prove(rule)


SUMS = "%f = sin %s %ws = shift %y {by = -1.0e17} %wr = relu %ws %m = mul %wr, %f %q = reduce_sum %m {dim = 0} yield %q"


def test_inner_sums_keep_their_own_indices():
    # x[i, i] against x[i, j]: in both an index of the outer sum had the name of one of the inner.
    diagonal = (
        '%y6 = cast %y {to = "f64"} %one0 = scale %y6 {by = 0.0} %ones = shift %one0 {by = 1.0} '
        "%c = cumsum_grad %ones {dim = 0, size = s+m+p, degrees = [1]} %t = reduce_sum %ones {dim = 0} "
        '%io = sub %t, %c %id = cast %io {to = "i64"} %id2 = reshape %id {shape = [1, s+m+p]} '
        "%g = gather %x, %id2 {dim = 0} %d = reshape %g {shape = [s+m+p]} %k = tanh %d "
        "%sl = slice %k {dim = 0, start = s, size = m} %s = reduce_sum %sl {dim = 0} "
    )
    whole = (
        "%ra = relu %u %ru, %rv = split %ra {dim = 0, sizes = [e, f]} %a = reduce_sum %ra {dim = 0} "
        "%b = reduce_sum %ru {dim = 0} %ee = reduce_sum %rv {dim = 0} %ab = sub %a, %b %z = sub %ab, %ee "
        "%xz = add %x, %z %k = tanh %xz %sl = slice %k {dim = 1, start = s, size = m} %s = reduce_sum %sl {dim = 1} "
    )
    head = "(%x: [s+m+p, s+m+p], %u: [e+f], %y: [s+m+p])"
    assert not proof(f"{head} {{ {diagonal} {SUMS} }} to {{ {whole} {SUMS} }}").forward


def picked(narrow: str) -> str:
    """The rows picked by ids through a type that holds few of them, of which only the gradient is left."""
    return (
        f'%d = detach %t %a = cast %i {{to = "{narrow}"}} %b = cast %a {{to = "i64"}} %p = embedding %b, %t '
        "%r = embedding %b, %d %s = sub %p, %r %k = embedding %i, %d %q = add %s, %k yield %q"
    )


def masked(narrow: str) -> str:
    casts = f'%a = cast %i {{to = "{narrow}"}} %b = cast %j {{to = "{narrow}"}} '
    return casts + "%c = eq %a, %b %d = detach %x %q = select %c, %x, %d yield %q"


def turned(direction: str) -> str:
    differ = f"%a = rotary %x {{direction = {direction}}} %b = rotary %e {{direction = {direction}}} %c = sub %a, %b "
    return f"%e = detach %x {differ} %r = rotary %e {{direction = $d}} %q = add %c, %r yield %q"


@pytest.mark.parametrize(
    ("head", "source", "target"),
    [
        ("%i: int [n], %t: [v, e]", picked("bf16"), picked("f16")),
        ("%i: int [n], %j: int [n], %x: [n]", masked("bf16"), masked("f64")),
        ("%x: [n, s, 2*m]", turned("$d"), turned("0.5")),
    ],
    ids=["ids of gradients are cast", "conditions of gradients are cast", "numbers of attributes as text"],
)
def test_what_only_gradients_show(head: str, source: str, target: str):
    assert not proof(f"({head}) {{ {source} }} to {{ {target} }}").trainable


def test_sums_are_not_held_by_integers():
    head = (
        '%f = cast %x {to = "f64"} %z = scale %f {by = 0.0} %o = shift %z {by = 9007199254740992.0} '
        "%s = reduce_sum %o {dim = 0} %zz = scale %s {by = 0.0} "
    )
    narrow = '%i = cast %s {to = "i64"} %j = cast %i {to = "f64"} %q = gt %j, %zz yield %q'
    assert not proof(f"(%x: [n]) {{ {head} {narrow} }} to {{ {head} %q = gt %s, %zz yield %q }}").forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "(%x: [n]) { %s = shift %x {by = -20.0} %u = relu %s %d = detach %u %a = maximum %u, %d %q = maximum %a, %u "
        "yield %q } to { %s = shift %x {by = -20.0} %u = relu %s %d = detach %u %a = maximum %u, %u "
        "%q = maximum %a, %d yield %q }",
        "(%x: [n], %y: [n], %z: [n]) "
        '{ %a = cast %x {to = "bf16"} %b = cast %y {to = "bf16"} %c = cast %z {to = "bf16"} '
        "%d = maximum %a, %b %q = maximum %d, %c yield %q } to "
        '{ %a = cast %x {to = "bf16"} %b = cast %y {to = "bf16"} %c = cast %z {to = "bf16"} '
        "%d = maximum %b, %c %q = maximum %a, %d yield %q }",
        "(%z: [n], %y: [n]) { %x = sigmoid %z %q = bce %x, %y yield %q } to { %x = sigmoid %z %l = log %x "
        "%n = neg %x %o = shift %n {by = 1.0} %k = log %o %m = scale %x {by = 0.0} %b = shift %m {by = -100.0} "
        "%c = maximum %l, %b %d = maximum %k, %b %e = mul %y, %c %f = neg %y %g = shift %f {by = 1.0} %h = mul %g, %d "
        "%i = add %e, %h %j = neg %i %q = reduce_mean %j {dim = 0} yield %q }",
    ],
    ids=["a value and itself detached", "values that are cast", "a bounded gradient"],
)
def test_ties_that_are_no_single_points(text: str):
    assert not proof(text).trainable


@pytest.mark.parametrize("op", ["reduce_sum", "reduce_mean", "reduce_prod"])
def test_columns_first_rounds_otherwise(op: str):
    text = f"{{ %t = transpose %x {{perm = [1, 0]}} %q = {op} %t {{dim = 0, count = 2}} yield %q }} to "
    text += f"{{ %q = {op} %x {{dim = 0, count = 2}} yield %q }}"
    assert not proof(f"(%x: [n, m]) attributes {{exact}} {text}").forward
    assert proof(f"(%x: [n, m]) {text}").forward


def test_inputs_have_names_of_their_own():
    one, other = (Input("x", (symbol("n"),)) for _ in range(2))
    add = [ResultOf(Operation("add", operands)) for operands in ((one, other), (one, one))]
    assert not prove(Substitution("rule", (one, other), (add[0],), (add[1],))).forward
