"""TASO's axioms are proved for all sizes, and the one that is false is refuted."""

from __future__ import annotations

import pytest
from taso_axioms.taso import Axiom, axioms, cat, conv
from taso_axioms.terms import op, rule, tensor

from unity_ir.rules.proof.prove import prove

AXIOMS = axioms()


@pytest.mark.slow
@pytest.mark.parametrize("axiom", AXIOMS, ids=lambda a: a.number)
def test_the_verdict_is_as_it_must_be(axiom: Axiom):
    proof = prove(axiom.rule)
    assert proof.verdict == axiom.verdict, proof.detail


def test_there_are_all_44_and_three_lemmas():
    numbers = [a.number.split()[0] for a in AXIOMS]
    assert list(dict.fromkeys(numbers)) == [*map(str, range(1, 45)), "lemma"]
    assert [a.number for a in AXIOMS if a.verdict != "proved"] == ["43"]


def test_flexflows_fusion_of_relu_into_a_gelu_is_refuted():
    # fuse_linear_activation matches a relu whatever activation it is asked to fuse.
    x, w = tensor("x", "n k"), tensor("w", "k m")
    relu = op("relu", op("matmul", x, w))
    unsound = prove(rule("fuse-gelu", relu, op("matmul", x, w, act="gelu")))
    assert unsound.verdict == "refuted"
    assert "result 0 at" in unsound.detail
    assert prove(rule("fuse-relu", relu, op("matmul", x, w, act="relu"))).proved


@pytest.mark.parametrize(("second", "verdict"), [("o", "proved"), ("p", "refuted")])
def test_convolutions_side_by_side_are_a_grouped_one_only_of_as_many_channels(second: str, verdict: str):
    # Four of the rules that TASO ships say so of any two.
    x, y = tensor("x", "n c h l"), tensor("y", "n c h l")
    v, w = tensor("v", "o c i j"), tensor("w", f"{second} c i j")
    apart = cat(1, conv(x, v), conv(y, w))
    grouped = conv(cat(1, x, y), cat(0, v, w), groups="2")
    assert prove(rule("groups", apart, grouped)).verdict == verdict
