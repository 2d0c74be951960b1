"""
Find and set the machine of a module: the cluster that its plan is made for, as its operation `machine.machine` names or
describes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects.builtin import ModuleOp

from unity_ir.dialects.machine.ops import MachineOp

if TYPE_CHECKING:
    from unity_ir.machine import Machine


def _machine_op(module: ModuleOp) -> MachineOp | None:
    """
    Return the module's `machine.machine` operation, which says what machine its plan is for; None if there is none.
    """
    return next((op for op in module.ops if isinstance(op, MachineOp)), None)


def machine_name(module: ModuleOp) -> str | None:
    """Return the name of the machine (cluster) that the module's plan is for; None if the module names none."""
    op = _machine_op(module)
    return None if op is None else op.text


def module_machine(module: ModuleOp) -> Machine | None:
    """
    Return the machine that the module's plan is for: built from its description if the module has one, else loaded by
    its name. None if the module has no machine.

    Raises `UnityError` for an unknown name, and for an impossible description.
    """
    from unity_ir.machine import load, machine_from

    op = _machine_op(module)
    if op is None:
        return None
    tables = op.tables
    return load(op.text) if tables is None else machine_from(op.text, tables)


def set_machine(module: ModuleOp, name: str) -> None:
    """
    Make the module name `name` as the machine that its plan is for, in place of any other. `name` is a preset or a
    file, as `unity_ir.machine.load` takes it; whether it exists is not checked. Its description is not added (see
    `expand`).
    """
    _replace(module, MachineOp(name))


def expand(module: ModuleOp) -> None:
    """
    Add the full description (devices, levels, links, protocols) of the module's machine to its `machine.machine`
    operation, in place, where it has only a name. Does nothing if the module has no machine.

    Raises as `module_machine`.
    """
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
