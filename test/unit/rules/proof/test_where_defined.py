"""False rules in which a side is no number somewhere, or wraps around, are not proved, with samples or without them."""

from __future__ import annotations

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.proof import prove as module

X, XY, B = "(%x: [s..])", "(%x: [s..], %y: [s..])", "(%c: bool [s..], %x: [s..], %y: [s..])"
ZERO = "%z = scale %x {by = 0.0}"

VALUES = {
    "y -> y + 0/x": f"{XY} {{ %o = scale %y {{by = 0.0}} %a = add %y, %o yield %a }} to {{ %r = reciprocal %x "
    "%o = scale %r {by = 0.0} %a = add %y, %o yield %a }",
    "a branch as a product": f"{B} {{ %r = reciprocal %x %a = select %c, %r, %y yield %a }} to {{ %r = reciprocal %x "
    '%n = logical_not %c %p = cast %c {to = "f64"} %q = cast %n {to = "f64"} %u = mul %p, %r %v = mul %q, %y '
    "%a = add %u, %v yield %a }",
    "a safe quotient": f"{X} {{ {ZERO} %n = ne %x, %z %q = div %x, %x %a = select %n, %q, %z yield %a }} to {{ "
    "%a = div %x, %x yield %a }",
    "a quotient of a branch": f"{B} {{ {ZERO} %q = div %y, %x %a = select %c, %q, %z yield %a }} to {{ {ZERO} "
    "%u = select %c, %y, %z %a = div %u, %x yield %a }",
    "y -> y + log - log": f"{XY} {{ %o = scale %y {{by = 0.0}} %a = add %y, %o yield %a }} to {{ "
    "%t = shift %x {by = 10.0} %l = log %t %d = sub %l, %l %a = add %y, %d yield %a }",
    "a table of quotients": "(%i: int [b..], %t: [v, e]) { %r = reciprocal %t %a = embedding %i, %r yield %a } to { "
    '%r = reciprocal %t %h = one_hot %i {classes = v} %f = cast %h {to = "f64"} %a = matmul %f, %r yield %a }',
    "sums wrap": "(%i: int [s..], %j: int [s..], %k: int [s..]) { %a = int_add %i, %k %b = int_add %j, %k "
    "%g = gt %a, %b yield %g } to { %g = gt %i, %j yield %g }",
    "a successor": '(%i: int [s..], %j: int [s..]) { %e = eq %j, %j %o = cast %e {to = "i64"} %a = int_add %i, %o '
    "%g = gt %a, %i yield %g } to { %g = eq %i, %i yield %g }",
    "squares wrap": '(%i: int [s..], %j: int [s..]) { %n = ne %j, %j %o = cast %n {to = "i64"} %a = int_mul %i, %i '
    "%g = ge %a, %o yield %g } to { %g = eq %i, %i yield %g }",
    "products wrap": '(%i: int [s..], %j: int [s..]) { %n = ne %j, %j %o = cast %n {to = "i64"} %a = int_mul %i, %j '
    "%g = eq %a, %o yield %g } to { %p = eq %i, %o2 %q = eq %j, %o2 %g = logical_or %p, %q yield %g }".replace(
        "to { ", 'to { %n2 = ne %j, %j %o2 = cast %n2 {to = "i64"} '
    ),
    "sums in parts": "(%x: [n, m]) attributes {exact} { %a = broadcast_grad %x {shape = []} yield %a } to { "
    "%b = broadcast_grad %x {shape = [m]} %a = broadcast_grad %b {shape = []} yield %a }",
    "a sum of a transpose": "(%x: [n, m]) attributes {exact} { %a = broadcast_grad %x {shape = []} yield %a } to { "
    "%t = transpose %x {perm = [1, 0]} %a = broadcast_grad %t {shape = []} yield %a }",
}

GRADIENTS = {
    "a root of a masked square": f"{X} {{ %r = relu %x %q = square %r %a = sqrt %q yield %a }} to {{ {ZERO} "
    "%n = minimum %x, %z %d = detach %n %a = sub %x, %d yield %a }",
    "a square of a masked root": f"{X} {{ %r = relu %x %q = sqrt %r %a = mul %q, %q yield %a }} to {{ {ZERO} "
    "%a = maximum %x, %z yield %a }",
    "a square of a root of abs": f"{X} {{ %r = abs %x %q = sqrt %r %a = mul %q, %q yield %a }} to {{ %r = relu %x "
    "%q = scale %r {by = 2.0} %a = sub %q, %x yield %a }",
    "a root of a square": f"{X} {{ %q = square %x %r = relu %q %a = sqrt %r yield %a }} to {{ "
    "%a = leaky_relu %x {slope = -1.0} yield %a }",
    "a norm": "(%x: [n]) { %q = square %x %s = reduce_sum %q {dim = 0} %r = relu %s %a = sqrt %r yield %a } to { "
    "%q = square %x %s = reduce_sum %q {dim = 0} %a = sqrt %s yield %a }",
    "a norm of abs": "(%x: [n]) { %q = square %x %s = reduce_sum %q {dim = 0} %r = abs %s %a = sqrt %r yield %a } to { "
    "%q = square %x %s = reduce_sum %q {dim = 0} %a = sqrt %s yield %a }",
    "a root by abs": f"{X} {{ %q = square %x %r = abs %q %a = sqrt %r yield %a }} to {{ %q = square %x "
    "%a = sqrt %q yield %a }",
    "y + 0 sqrt(x)": f"{XY} {{ %o = scale %y {{by = 0.0}} %a = add %y, %o yield %a }} to {{ %b = abs %x %r = sqrt %b "
    "%o = scale %r {by = 0.0} %a = add %y, %o yield %a }",
}


@pytest.mark.parametrize("samples", [True, False], ids=["samples", "proof"])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_not_proved_equal(name: str, samples: bool, monkeypatch: pytest.MonkeyPatch):
    if not samples:
        monkeypatch.setattr(module, "refute", lambda rule, seed: None)
    (rule,) = parse_rules(f'subst.rule "false" {VALUES[name]}', "here")
    assert module.prove(rule).verdict in ("refuted", "undecided")


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_not_proved_equal(name: str):
    (rule,) = parse_rules(f'subst.rule "false" {GRADIENTS[name]}', "here")
    assert module.prove(rule).verdict in ("almost everywhere", "forward only")


def test_gradients_that_differ_on_more_than_ties_are_refuted():
    (rule,) = parse_rules(f'subst.rule "false" {GRADIENTS["a root of a masked square"]}', "here")
    assert module.prove(rule).verdict == "forward only"
