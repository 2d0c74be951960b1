"""`pcg-differentiate`: a forward with a loss to a whole training step."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, optimizer_of
from unity_ir.pcg.sharding import devices_of, mesh_of


@dataclass(frozen=True)
class Differentiate(GraphPass):
    """
    Build the backward from the operators' gradients, and one update per weight.

    rewrite: f(x) -> loss  ->  f(x) -> loss, with forward, backward, and a pcg.update of every weight
    """

    name = "pcg-differentiate"

    optimizer: str | None = None
    """The optimizer of the updates; by default the one that the function was searched for, or sgd."""

    lr: float | int | None = None  # xDSL reads `lr=1` as an int
    beta1: float | int | None = None
    beta2: float | int | None = None
    eps: float | int | None = None
    weight_decay: float | int | None = None

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the training step of a forward graph: it with its backward, and an optimizer update per weight, added.
        The optimizer is that of the pass's options, else the graph's, else sgd; the mesh is that of `machine()`, or one
        of as many devices as the graph uses.

        Raises `UnityError` for options that are no hyperparameters of the optimizer, or out of range.
        """
        searched = "sgd" if graph.optimizer is None else graph.optimizer.name
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise UnityError(f"pcg-differentiate: lr is {self.lr}; it must be a number above 0")
        given = {name: getattr(self, name) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
        settings = {name: value for name, value in given.items() if value is not None}
        optimizer = optimizer_of("pcg-differentiate", self.optimizer or searched, settings)
        found = machine()
        mesh = mesh_of(devices_of(graph)) if found is None else found.mesh
        return differentiate(graph, optimizer, mesh)
