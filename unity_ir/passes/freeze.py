"""`pcg-freeze`: some weights of a forward are not trained."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.freeze import freeze
from unity_ir.pcg.graph import Graph


@dataclass(frozen=True)
class Freeze(GraphPass):
    """
    Freeze weights by patterns of their names: they get no gradient, no update, and no optimizer state.

    rewrite: weight "fc1.weight"  ->  weight "fc1.weight" frozen
    """

    name = "pcg-freeze"

    weights: str
    """Patterns of names with commas between them; `!` before one trains what it matches: `"*,!lm_head.*"`."""

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """Return the forward graph with the weights that the option `weights` names frozen. `machine` is not used."""
        return freeze(graph, self.weights)
