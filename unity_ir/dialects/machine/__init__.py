"""The machine dialect: the cluster a plan is for, its parts, and the views that place an operator's tasks on it."""

from xdsl.ir import Dialect

from unity_ir.dialects.machine.module import expand, machine_name, module_machine, set_machine
from unity_ir.dialects.machine.ops import DeviceOp, LevelOp, LinkOp, MachineOp, ProtocolOp
from unity_ir.dialects.machine.view import ViewAttr, check_size

MACHINE = Dialect("machine", [MachineOp, DeviceOp, LevelOp, LinkOp, ProtocolOp], [ViewAttr])

__all__ = ["MACHINE", "MachineOp", "ViewAttr", "check_size", "expand", "machine_name", "module_machine", "set_machine"]
