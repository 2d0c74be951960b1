"""What holds of parallel operators is proved for all sizes and degrees, and what does not is refuted."""

from __future__ import annotations

import pytest
from taso_axioms.parallel import statements
from taso_axioms.taso import Axiom
from taso_axioms.terms import op, partition, rule, tensor

from unity_ir.rules.poly import symbol
from unity_ir.rules.proof.forms import REAL, as_poly, of_poly
from unity_ir.rules.proof.prove import prove

STATEMENTS = statements()


@pytest.mark.slow
@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: s.number)
def test_the_verdict_is_as_it_must_be(statement: Axiom):
    proof = prove(statement.rule)
    assert proof.verdict == statement.verdict, proof.detail
    if statement.verdict == "refuted":
        assert proof.detail.startswith("ill-typed: ")


def test_there_are_57_true_and_11_false_ones_and_three_of_our_own():
    own = [s.number for s in STATEMENTS if s.note.startswith("added")]
    assert own == ["B4 add", "D5", "F2 sum"]
    false = [s for s in STATEMENTS if s.verdict == "refuted"]
    assert (len(STATEMENTS) - len(own) - len(false), len(false)) == (57, 11)
    assert all(s.number.endswith("not") for s in false)
    assert len({s.number for s in STATEMENTS}) == len({s.rule.name for s in STATEMENTS}) == len(STATEMENTS)


def test_sizes_that_no_degree_divides_are_no_type_error():
    # Nothing says that d divides n, but where it does, the rule is well typed.
    x = tensor("x", "n k")
    relu = op("relu", x)
    assert prove(rule("divide-relu", relu, op("combine", op("relu", partition(x, 0)), dim=0, by="d"))).proved


def test_sides_of_different_shapes_are_ill_typed():
    x = tensor("x", "n k")
    proof = prove(rule("turn", x, op("transpose", x, perm="1 0"), "n-k-1"))
    assert (proof.verdict, "its sides are of types" in proof.detail) == ("refuted", True)


def test_an_attribute_between_two_integers_is_no_integer():
    # Of integers, p > 0 would be p >= 1.
    p = of_poly(symbol(f"{REAL}p"))
    assert as_poly(p) is None
    assert as_poly(of_poly(symbol("n") - 1)) == symbol("n") - 1
