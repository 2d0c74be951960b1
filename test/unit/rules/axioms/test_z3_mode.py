"""What follows from the axioms by matching, and that nothing false does."""

from __future__ import annotations

import pytest
from taso_axioms.composites import composites
from taso_axioms.taso import add, cat, matmul, mul, relu
from taso_axioms.terms import op, results, rule, tensor
from taso_axioms.z3_mode import prove_by_axioms

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove

RULES = {r.name: r for r in composites()}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda r: r.name)
def test_composites_are_proved_without_axioms(rule: Substitution):
    assert prove(rule).proved


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["merge-matmuls", "merge-convs", "transpose-three", "perceptron-reduce", "late-reduce"]
)
def test_some_follow_from_the_axioms(name: str):
    assert prove_by_axioms(RULES[name]).proved


@pytest.mark.slow
def test_what_no_axiom_says_does_not_follow():
    # TASO has x(y + z) = xy + xz, and not the sum on the left.
    proof = prove_by_axioms(RULES["matmul-factor"], timeout=200)
    assert (proof.verdict, "Z3 does not find" in proof.detail) == ("undecided", True)


def _false() -> list[Substitution]:
    x, y, w, s = tensor("x", "n k"), tensor("y", "n k"), tensor("w", "k m"), tensor("s", "n k")
    a, b = tensor("a", "n k"), tensor("b", "n l")
    wrong = results("split", 2, cat(1, a, b), dim=1, sizes="l k")
    return [
        rule("relu-inside", relu(matmul(x, w)), matmul(relu(x), w)),
        rule("relu-sum", relu(add(x, y)), add(relu(x), relu(y))),
        rule("scale-of-sum", mul(add(x, y), s), add(mul(x, s), y)),
        rule("gelu", relu(matmul(x, w)), op("matmul", x, w, act="gelu")),
        rule("wrong-parts", wrong[0], a),
        rule("swapped-parts", cat(1, a, b), cat(1, b, a)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rule", _false(), ids=lambda r: r.name)
def test_what_is_false_does_not_follow(rule: Substitution):
    assert not prove(rule).proved
    assert not prove_by_axioms(rule, timeout=200).proved
