"""`pcg-differentiate`: a forward with a loss to a whole training step."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from unity_ir.dialects.convert import pcg_functions, replace_function, to_graph
from unity_ir.dialects.machine import machine_name
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Optimizer
from unity_ir.pcg.layout import devices_of, mesh_of


@dataclass(frozen=True)
class Differentiate(ModulePass):
    """
    Build the backward from the operators' gradients, and one update per weight.

    rewrite: f(x) -> loss  ->  f(x) -> loss, with forward, backward, pcg.update of every weight
    """

    name = "pcg-differentiate"

    optimizer: str = "sgd"
    lr: float = 0.1

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise UnityError(f"pcg-differentiate: unknown optimizer {self.optimizer!r}; known are sgd, adam")
        name = machine_name(op)

        for func in pcg_functions(op):
            graph = to_graph(func)
            mesh = mesh_of(devices_of(graph)) if name is None else load(name).mesh
            replace_function(func, differentiate(graph, Optimizer(self.optimizer, self.lr), mesh))
