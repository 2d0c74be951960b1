"""`-t linalg`: the module's training step in upstream MLIR's `linalg`, with layouts in `shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from unity_ir.interop.expressible import LINALG, step_program
from unity_ir.interop.linalg.step import step_module
from unity_ir.passes.graph_pass import placed_graph


@dataclass(frozen=True)
class LinalgTarget(Target):
    """
    Print the module's training step (loss, and gradients of the weights) in upstream MLIR's `linalg` and `shard`.

    With `form=annotated` operations are on whole tensors, and each value is annotated with its layout; a serial graph
    has no annotations. With `form=manual` one device's part is written out: local shapes, and the collectives of the
    plan. A plan that `shard` cannot express is refused.
    """

    name = "linalg"

    form: str = "annotated"

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """
        Write the module's one plan to `output`. If the module has no machine, the plan is taken to be for one of a
        single level (`box`) with as many devices as it uses.

        Raises `UnityError` for several plans or none, a module that is lowered, and a plan that `shard` cannot express.
        """
        graph, machine = placed_graph(module, "linalg")
        output.write(f"{step_module(step_program(graph, machine, LINALG), machine, self.form)!s}\n")
