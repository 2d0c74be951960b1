"""`lower-pcg-to-spmd`: a placed training step to one rank's program."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from unity_ir.dialects.convert import from_graph, pcg_functions, to_graph
from unity_ir.dialects.convert_program import to_op
from unity_ir.dialects.imported import IMPORTED
from unity_ir.dialects.machine import module_machine
from unity_ir.machine import load
from unity_ir.pcg.graph import erase
from unity_ir.pcg.sharding import devices_of
from unity_ir.plan.lower import lower

REFERENCE = "_reference"
"""Added to a program's name: the serial forward it must agree with, kept for `--check`."""


@dataclass(frozen=True)
class LowerToSpmd(ModulePass):
    """
    Lower placed training steps to one rank's programs: every reshard becomes explicit collectives, and every shape the
    local one.

    rewrite: func.func @f  ->  spmd.program @f, func.func @f_reference (its serial forward)
    """

    name = "lower-pcg-to-spmd"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        """
        Replace each pcg function of the module, in place, by one rank's program (`spmd.program`) and its serial
        forward, a function called `NAME_reference`. If the module has no machine, the program is for one of a single
        level (`box`) with as many devices as the graph uses. Raises `UnityError` for graphs that cannot be lowered.
        """
        machine = module_machine(op)
        for func in pcg_functions(op):
            graph = to_graph(func)
            program = lower(graph, machine or load(f"box:{devices_of(graph)}"))
            serial = erase(replace(graph, updates=(), optimizer=None))
            reference = from_graph(replace(serial, name=graph.name + REFERENCE))
            if IMPORTED in func.attributes:
                reference.attributes[IMPORTED] = func.attributes[IMPORTED]
            block = func.parent
            assert block is not None
            block.insert_op_before(to_op(program), func)
            block.insert_op_before(reference, func)
            func.detach()
            func.erase()
