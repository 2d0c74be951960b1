"""`pcg-mixed-precision`: a forward in f32 to one that is computed in bf16, of weights in f32."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision


@dataclass(frozen=True)
class MixedPrecision(GraphPass):
    """
    Cast f32 inputs and weights where they are read; what makes the function's results stays in f32.

    rewrite: loss(matmul(x, w))  ->  loss(cast(matmul(cast(x), cast(w))))
    """

    name = "pcg-mixed-precision"

    type: str = "bf16"

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """Return the forward graph computed in the lower precision, with weights kept in f32."""
        return mixed_precision(graph, self.type)
