"""`-t dtensor`: the module's plan as DTensor placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from unity_ir.interop.dtensor.described import described, text
from unity_ir.interop.expressible import DTENSOR, step_program
from unity_ir.passes.graph_pass import placed_graph


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
        graph, machine = placed_graph(module, "dtensor")
        output.write(text(described(step_program(graph, machine, DTENSOR), machine)))
