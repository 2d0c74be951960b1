"""`pcg-differentiate`: a forward with a loss to a whole training step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer, optimizer_of
from unity_ir.pcg.sharding import devices_of, mesh_of

Number = float | int | None  # xDSL reads `lr=1` as an int


@dataclass(frozen=True)
class OptimizerOptions:
    """
    Options of passes that choose an optimizer: its name, its hyperparameters (`ops.optimizers`), gradient clipping
    (`clip`), an average of the weights (`ema`) and groups of weights with hyperparameters of their own (`groups`).
    """

    optimizer: str | None = None
    """The optimizer of the updates; by default the one that the function was searched for, or sgd."""

    lr: Number = None
    beta1: Number = None
    beta2: Number = None
    eps: Number = None
    weight_decay: Number = None
    momentum: Number = None
    clip: Number = None
    """Most the norm of the whole gradient may be, beyond which it is scaled down."""
    ema: Number = None
    """The part of an exponential moving average of the trained weights that stays in each step: 0.999."""
    groups: str | None = None
    """Hyperparameters of some weights: `groups="@vectors weight_decay=0; head.* lr=0.0001"`."""

    @property
    def given(self) -> dict[str, Any]:
        """The options that the user gave, by name, the optimizer's name among them; {} if none was given."""
        named = ((f.name, getattr(self, f.name)) for f in fields(OptimizerOptions))
        return {name: value for name, value in named if value is not None}


@dataclass(frozen=True)
class Differentiate(OptimizerOptions, GraphPass):
    """
    Build the backward from the operators' gradients, and one update per weight.

    rewrite: f(x) -> loss  ->  f(x) -> loss, with forward, backward, and a pcg.update of every weight
    """

    name = "pcg-differentiate"

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the training step of a forward graph: the forward, its backward, and an update of every weight.

        The optimizer is that of the pass's options, else the graph's, else sgd. Hyperparameters that the graph has for
        this optimizer stay unless options replace them. The mesh is that of `machine()`, or, if that is None, one with
        as many devices as the graph uses.

        Raises `UnityError` for options that are no hyperparameters of the optimizer, or out of range, and for a graph
        that has its backward already, or no scalar loss as its first output.
        """
        searched = graph.optimizer or Optimizer()
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise UnityError(f"pcg-differentiate: lr is {self.lr}; it must be a number above 0")
        settings = self.given
        name = settings.pop("optimizer", searched.name)
        own = searched.given if name == searched.name else {}
        optimizer = optimizer_of("pcg-differentiate", name, {**own, **settings})
        found = machine()
        mesh = mesh_of(devices_of(graph)) if found is None else found.mesh
        return differentiate(graph, optimizer, mesh)
