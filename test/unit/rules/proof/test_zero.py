"""Functions that are 0 at 0, and no others, may change places with a pad by zeros."""

from __future__ import annotations

import numpy as np
import pytest

from unity_ir.ops import operators
from unity_ir.rules.parse import parse_rules
from unity_ir.rules.proof.normal import ZERO_AT_ZERO
from unity_ir.rules.proof.prove import prove
from unity_ir.tdl.functions import FUNCTIONS

PAD = "{dim = 0, before = p, after = q - 1}"


def verdict(function: str, more: str = "") -> str:
    source = f"%a = pad %x {PAD} %b = {function} %a {more} yield %b"
    target = f"%a = {function} %x {more} %b = pad %a {PAD} yield %b"
    (found,) = parse_rules(f'subst.rule "rule" (%x: [n]) {{ {source} }} to {{ {target} }}', "here")
    return prove(found).verdict


def test_functions_are_zero_there():
    for name in ZERO_AT_ZERO:
        assert FUNCTIONS[name].evaluate(np.zeros(1)) == 0


@pytest.mark.parametrize("function", sorted({*ZERO_AT_ZERO} & operators().keys()))
def test_they_change_places_with_a_pad(function: str):
    assert verdict(function) in ("proved", "almost everywhere")


@pytest.mark.parametrize("function", ["exp", "cos", "sigmoid"])
def test_others_do_not(function: str):
    assert verdict(function) == "refuted"


def test_pads_of_both_dims_and_of_other_sizes():
    two = "%a = pad %x {dim = 0, before = p, after = p} %b = pad %a {dim = 1, before = p, after = q} %c = relu %b"
    relu_first = (
        "%a = relu %x %b = pad %a {dim = 0, before = p, after = p} %c = pad %b {dim = 1, before = <>, after = <q>}"
    )
    for before, after, expected in (("p", "q", True), ("q", "p", False)):
        target = relu_first.replace("<>", before).replace("<q>", after)
        (found,) = parse_rules(
            f'subst.rule "rule" (%x: [n, m]) {{ {two} yield %c }} to {{ {target} yield %c }}', "here"
        )
        assert (prove(found).verdict == "proved") == expected
