"""`-t stablehlo`: the module's training step in StableHLO, for XLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.target import Target

from unity_ir.interop.expressible import JAX, step_program
from unity_ir.passes.graph_pass import placed_graph


@dataclass(frozen=True)
class StableHloTarget(Target):
    """
    Print the module's training step (loss, and gradients of the weights) in StableHLO with Shardy's `sdy`, for XLA.

    With `form=manual` each device's part is written out: local shapes, and the collectives of the plan. With
    `form=annotated` operations are on whole arrays, with the sharding of each value: XLA adds the collectives. It is
    written by JAX, which must be installed, for `platform` (cuda, rocm, tpu or cpu), which need not be there. A plan
    that JAX cannot express is refused.
    """

    name = "stablehlo"

    form: str = "manual"
    platform: str = "cuda"

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        """
        Write the module's one plan as StableHLO to `output`. If the module has no machine, the plan is taken to be for
        one of a single level (`box`) with as many devices as it uses.

        Raises `UnityError` for several plans or none, a module that is lowered, and a plan that JAX cannot express.
        """
        graph, machine = placed_graph(module, "stablehlo")
        from unity_ir.interop.jax.step import stablehlo

        output.write(stablehlo(step_program(graph, machine, JAX), machine, self.form, self.platform))
