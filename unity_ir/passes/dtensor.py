"""`-t dtensor`: the module's plan as DTensor placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from unity_ir.dialects.convert import pcg_functions, to_graph
from unity_ir.dialects.machine import module_machine
from unity_ir.dialects.spmd import ProgramOp
from unity_ir.errors import UnityError
from unity_ir.interop.dtensor.described import described, text
from unity_ir.interop.dtensor.expressible import step_program
from unity_ir.machine import load
from unity_ir.pcg.sharding import devices_of


@dataclass(frozen=True)
class DTensorTarget(Target):
    """
    Print the module's plan as JSON: a mesh, the DTensor placements of parameters, inputs, operators and modules, and
    each redistribute of the forward and the backward. Plans that DTensor cannot express are refused.
    """

    name = "dtensor"

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """
        Write the module's one plan as JSON text to `output`. If the module has no machine, the plan is taken to be for
        one of a single level (`box`) with as many devices as it uses.

        Raises `UnityError` for several plans or none, a module that is lowered, and a plan that DTensor cannot express.
        """
        if any(isinstance(op, ProgramOp) for op in module.ops):
            raise UnityError("dtensor: the module is lowered already; leave lower-pcg-to-spmd out")
        functions = pcg_functions(module)
        if len(functions) != 1:
            raise UnityError(f"dtensor: a plan is one function of pcg operations, and the module has {len(functions)}")
        graph = to_graph(functions[0])
        machine = module_machine(module) or load(f"box:{devices_of(graph)}")
        output.write(text(described(step_program(graph, machine), machine)))
