"""True statements about softmax, norms, pools, ids, reshapes and activations are proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove

PATH = Path(__file__).with_name("true_rules.pcg")
RULES = parse_rules(PATH.read_text(encoding="utf-8"), PATH.name)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_values_are_proved_equal(rule: Substitution):
    proof = prove(rule)
    assert proof.verdict in ("proved", "almost everywhere"), proof.detail


def test_most_have_equal_gradients():
    assert sum(prove(r).proved for r in RULES) > 35
