"""`pcg-fuse-collectives`: chains of parallel operators to the collective that performs them."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph


@dataclass(frozen=True)
class FuseCollectives(GraphPass):
    """
    Replace chains of parallel operators by the collective that performs them.

    rewrite: replicate(reduce(x)) -> all_reduce(x)
             replicate(combine(x)) -> all_gather(x)
             partition(reduce(x)) -> reduce_scatter(x)
             partition(combine(x)) on another dim -> all_to_all(x)
    """

    name = "pcg-fuse-collectives"

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the graph with chains of parallel operators replaced by the collective that performs them, such as
        `replicate(reduce(x))` by `all_reduce(x)`; `machine` is not used.
        """
        return fuse_collectives(graph)
