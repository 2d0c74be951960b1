"""`pcg-erase`: the serial graph that a parallel one stands for."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.graph import Graph, erase


@dataclass(frozen=True)
class Erase(GraphPass):
    """
    Delete parallel operators and views, and make all types serial.

    rewrite: partition(x) -> x, and so for every parallel operator
    """

    name = "pcg-erase"

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the serial graph of a parallel one, which computes the same on one device: without parallel operators,
        degrees and machine views. `machine` is not used.
        """
        return erase(graph)
