"""The machine of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects.builtin import ModuleOp

from unity_ir.dialects.machine.ops import MachineOp

if TYPE_CHECKING:
    from unity_ir.machine import Machine


def machine_op(module: ModuleOp) -> MachineOp | None:
    """The operation that says what machine the module's plan is for."""
    return next((op for op in module.ops if isinstance(op, MachineOp)), None)


def machine_name(module: ModuleOp) -> str | None:
    """The name of the machine the module's plan is for, if it says so."""
    op = machine_op(module)
    return None if op is None else op.text


def module_machine(module: ModuleOp) -> Machine | None:
    """
    The machine the module's plan is for, if it says so: described in the module, or by name.

    Raises `UnityError` for a name that is none, and descriptions that cannot be.
    """
    from unity_ir.machine import load, machine_from

    op = machine_op(module)
    if op is None:
        return None
    tables = op.tables
    return load(op.text) if tables is None else machine_from(op.text, tables)


def set_machine(module: ModuleOp, name: str) -> None:
    """Record the machine a plan is for, in place of another one."""
    _replace(module, MachineOp(name))


def expand(module: ModuleOp) -> None:
    """Describe the machine the module names in full."""
    from unity_ir.machine import described

    machine = module_machine(module)
    if machine is not None:
        _replace(module, MachineOp(machine.name, described(machine)))


def _replace(module: ModuleOp, new: MachineOp) -> None:
    for op in list(module.ops):
        if isinstance(op, MachineOp):
            op.detach()
            op.erase()
    block = module.body.block
    if block.first_op is None:
        block.add_op(new)
    else:
        block.insert_op_before(new, block.first_op)
