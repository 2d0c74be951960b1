"""
The part of a graph that makes its loss: the head, which is the last matrix product before the loss, and what follows.

Of a language model that is where the logits are: tokens x vocabulary, more than anything else that a step holds. Such a
part can run in pieces of the tokens, one after the other, forward and backward together (`plan.loss_pieces`).
"""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, Node, topological
from unity_ir.tdl.counts import contraction_flops


def head(graph: Graph) -> Node:
    """
    Return the only matrix product, or other contraction, from which a path leads to the loss, the first output, without
    another one on it. Raises `UnityError` if there is none, or more than one.
    """
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    pending = [v.node for v in graph.outputs[:1] if v.shape == ()]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.is_compute and contraction_flops(node.analysis.bound) > 0:
            found[node] = None
        else:
            pending += [v.node for v in node.operands]
    if len(found) != 1:
        has = f"{len(found)} matrix products lead" if found else "no matrix product leads"
        raise UnityError(
            f"func.func @{graph.name}: cannot make its loss in {graph.loss_pieces} pieces, as {has} to it; leave "
            "loss_pieces out"
        )
    return next(iter(found))


def loss_part(graph: Graph) -> frozenset[Node]:
    """Return the nodes of a forward graph from its head to its loss. Raises `UnityError` as `head` does."""
    found = {head(graph)}
    for node in topological(graph.outputs[:1]):
        if not found.isdisjoint(v.node for v in node.operands):
            found.add(node)
    return frozenset(found)
