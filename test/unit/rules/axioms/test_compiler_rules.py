"""Proves the rules of XLA's simplifier and of PyTorch's Inductor that hold, and refutes or leaves those that do not."""

from __future__ import annotations

import pytest
from compiler_rules import COLLECTIONS, NOT_SAID, VERDICTS, XLA, rules

from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove

RULES = [r for c in COLLECTIONS for r in rules(c)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_the_verdict_is_as_it_must_be(rule: Substitution):
    proof = prove(rule)
    assert proof.verdict == VERDICTS.get(rule.name, "proved"), proof.detail


def test_more_than_17_of_20_of_xla_are_decided():
    undecided = sum(v == "undecided" for v in VERDICTS.values()) + NOT_SAID
    total = sum(len(rules(c)) for c in XLA) + NOT_SAID
    assert len(rules("tensorright")) + NOT_SAID == 118
    assert total > 200
    assert (total - undecided) / total > 0.85
