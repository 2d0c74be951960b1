"""The machine dialect: which cluster a plan is for, what it is made of, and where on it an operator's tasks run."""

from xdsl.ir import Dialect

from unity_ir.dialects.machine.module import expand, machine_name, module_machine, set_machine
from unity_ir.dialects.machine.ops import DeviceOp, LevelOp, LinkOp, MachineOp, ProtocolOp
from unity_ir.dialects.machine.view import ViewAttr, check_size

MACHINE = Dialect("machine", [MachineOp, DeviceOp, LevelOp, LinkOp, ProtocolOp], [ViewAttr])

__all__ = ["MACHINE", "MachineOp", "ViewAttr", "check_size", "expand", "machine_name", "module_machine", "set_machine"]
