"""A rule whose sides are the same terms is proved without a proof, gradients included; no other rule is."""

from __future__ import annotations

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove

LAYER = "(%x: [n, c, h, w], %u: [o, c, 3, 3], %v: [p, o, 3, 3])"
WINDOW = "{stride = [1, 1], padding = [1, 1], dilation = [1, 1]}"
TWO_LAYERS = f"%a = conv2d %x, %u {WINDOW} %b = relu %a %c = conv2d %b, %v {WINDOW} %d = relu %c yield %d"


def rule(head: str, source: str, target: str) -> Substitution:
    (found,) = parse_rules(f'subst.rule "rule" {head} {{ {source} }} to {{ {target} }}', "here")
    return found


def test_same_sides_are_proved_whatever_their_gradients():
    same = rule(LAYER, TWO_LAYERS, TWO_LAYERS)
    assert not same.rewrites
    assert prove(same).verdict == "proved"


def test_a_term_that_is_shared_is_the_same_as_two():
    head, source = "(%x: [n])", "%a = relu %x %b = add %a, %a yield %b"
    assert not rule(head, source, "%a = relu %x %b = relu %x %c = add %a, %b yield %c").rewrites


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("%a = add %x, %y yield %a", "%a = add %y, %x yield %a"),
        ("%a = relu %x yield %a", "%a = tanh %x yield %a"),
        ("%a = scale %x {by = 2.0} yield %a", "%a = scale %x {by = 3.0} yield %a"),
        ("%a = concat %x, %y {dim = 0} yield %a", "%a = concat %x, %y, %x {dim = 0} yield %a"),
        (
            "%a, %b = split %x {dim = 0, sizes = [n, n]} yield %a",
            "%a, %b = split %x {dim = 0, sizes = [n, n]} yield %b",
        ),
        ("%a = relu %x %b = relu %y yield %a, %b", "%a = relu %x %b = relu %y yield %b, %a"),
        ("yield %x", "yield %y"),
    ],
)
def test_sides_that_differ_rewrite(source: str, target: str):
    assert rule("(%x: [2*n], %y: [2*n])", source, target).rewrites


def test_sides_that_are_never_typed_are_not_proved():
    sides = "%a = add %x, %y yield %a"
    assert prove(rule("(%x: [n + 1], %y: [n + 3])", sides, sides)).verdict != "proved"
