"""`machine-expand`: the machine a module names, written out in full."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import PassFailedException

from unity_ir.dialects.machine import expand, machine_name, set_machine
from unity_ir.errors import UnityError


@dataclass(frozen=True)
class MachineExpand(ModulePass):
    """
    Write the full description of the module's machine into the module.

    rewrite: machine.machine "2gpu" -> machine.machine "2gpu" { machine.device ... machine.level ... }
    """

    name = "machine-expand"

    machine: str | None = None
    """A preset or a file to take in place of the module's."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """
        Add the full description of the module's machine to the module, in place; if the option `machine` names one,
        that first replaces the module's. Raises `PassFailedException` if there is neither, and for an unknown machine.
        """
        if self.machine is None and machine_name(op) is None:
            raise PassFailedException("machine-expand: the machine is missing; add machine.machine to the module")
        try:
            if self.machine is not None:
                set_machine(op, self.machine)
            expand(op)
        except UnityError as error:
            raise PassFailedException(str(error)) from error
