"""Described machines: from the core to the dialect's text and back."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machines
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.parser import Parser
from xdsl.printer import Printer

from unity_ir.dialects.machine import MACHINE, MachineOp, expand, module_machine
from unity_ir.dialects.machine.tables import float_text, from_attribute, to_attribute
from unity_ir.machine import Machine, described, load
from unity_ir.machine.load import presets


def parsed(text: str) -> ModuleOp:
    context = Context()
    context.load_dialect(Builtin)
    context.load_dialect(MACHINE)
    module = Parser(context, text).parse_module()
    module.verify()
    return module


def printed(module: ModuleOp, generic: bool = False) -> str:
    out = StringIO()
    Printer(out, print_generic_format=generic).print_op(module)
    return out.getvalue()


def through_text(machine: Machine, generic: bool) -> Machine | None:
    module = ModuleOp([MachineOp(machine.name, described(machine))])
    module.verify()
    text = printed(module, generic)
    again = parsed(text)
    assert printed(again, generic) == text
    return module_machine(again)


@pytest.mark.slow
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("text", [*presets(), "summit:16", "dgx-h100:512", "cpu:1"])
def test_preset_is_the_same_after_its_text(text: str, generic: bool):
    machine = load(text)
    assert through_text(machine, generic) == machine


@pytest.mark.slow
@given(machines())
def test_machine_is_the_same_after_its_text(machine: Machine):
    assert through_text(machine, False) == machine


def test_expanded_machine_is_the_named_one():
    module = parsed('machine.machine "summit:4"')
    named = module_machine(module)
    expand(module)
    assert "machine.level" in printed(module)
    assert module_machine(module) == named == load("summit:4")
    empty = parsed("builtin.module {}")
    expand(empty)
    assert module_machine(empty) is None


TABLES = st.recursive(
    st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
)


@pytest.mark.slow
@given(TABLES)
def test_tables_are_attributes(value: Any):
    assert from_attribute(to_attribute(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_what_they_were(value: float):
    text = float_text(value)
    assert float(text) == value
    assert "." in text
