"""`pcg-stripe`: a forward graph to one whose tokens are in striped order."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.passes.graph_pass import GraphPass, ModuleMachine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.striped import striped


@dataclass(frozen=True)
class Stripe(GraphPass):
    """
    Put the tokens of a sequence in striped order, so that devices that divide it have about as many scores under a
    causal mask.

    rewrite: attention(rotary(f(tokens)), ..)  ->  attention_striped(rotary_striped(f(stripe(tokens))), ..)
    """

    name = "pcg-stripe"

    stripes: int
    """In how many stripes: a multiple of the devices that are to divide the sequence."""
    block: int | None = None
    """How many neighbouring tokens stay together; by default 128, or fewer of a short sequence."""

    def rewrite(self, graph: Graph, machine: ModuleMachine) -> Graph:
        """
        Return the forward graph in striped order; `machine` is not used. Raises `UnityError` where there is no causal
        attention, an operator depends on the order of tokens, or stripes of blocks do not divide the sequence.
        """
        return striped(graph, self.stripes, self.block)
