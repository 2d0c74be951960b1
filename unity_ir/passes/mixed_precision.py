"""`pcg-mixed-precision`: a forward in f32 to one that is computed in bf16, of weights in f32."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import SMALLEST, mixed_precision


@dataclass(frozen=True)
class MixedPrecision(GraphPass):
    """
    Compute in a shorter element type, such as bf16: weights are stored in f32 (their master) and cast before they are
    read. The operators that compute the function's results stay in f32.

    rewrite: loss(matmul(x, weight : f32))  ->  loss(cast(matmul(cast(x), weight master f32 : bf16, grad = f32)))
    """

    name = "pcg-mixed-precision"

    type: str = "bf16"
    """The element type to compute in, and to read weights as: bf16 or f16."""
    reduce: str = "f32"
    """The element type in which gradients of weights are summed, f32 or `type`."""
    products: str = ""
    """
    `float8`: products of large weights read both operands in 8 bits, all but the last before the loss and those for
    gradients of weights; `float8-all`: these, too.
    """
    smallest: int = SMALLEST
    """The least rows and columns of the weights of those products."""

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the forward graph, computed in the pass's option `type` (bf16 by default). Weights are stored in f32, and
        their gradients are summed in the type of the option `reduce` (f32 by default). `machine` is not used.
        """
        return mixed_precision(graph, self.type, self.reduce, self.products, self.smallest)
