"""
The part of a graph that makes its loss: the head, which is the last matrix product before the loss, and what follows.

Of a language model that is where the logits are: tokens x vocabulary, more than anything else that a step holds. Such a
part can run in pieces of the tokens, one after the other, forward and backward together (`plan.loss_pieces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import is_shard, result_role
from unity_ir.tdl.counts import has_contractions
from unity_ir.tdl.divisibility import Analysis


def head(graph: Graph) -> Node:
    """
    Return the head of a graph: the last matrix product, or other contraction, before the loss, which is the first
    output. Raises `UnityError` if the loss depends on none, or on several without another one between them and the
    loss.
    """
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    pending = [v.node for v in graph.outputs[:1] if v.shape == ()]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.is_compute and has_contraction(node.analysis):
            found[node] = None
        else:
            pending += [v.node for v in node.operands]
    if len(found) != 1:
        has = f"{len(found)} matrix products lead" if found else "no matrix product leads"
        raise UnityError(
            f"func.func @{graph.name}: cannot make its loss in {graph.loss_pieces} pieces: {has} to it; leave "
            "loss_pieces out"
        )
    return next(iter(found))


def has_contraction(analysis: Analysis) -> bool:
    """Return whether the operator with this analysis is a contraction: a matrix product, a convolution or attention."""
    return has_contractions(analysis.bound)


def piece_variable(analysis: Analysis, dims: Sequence[int | None]) -> str | None:
    """
    Return the index variable along which the operator with this analysis can be computed in pieces, one after the
    other. `dims` says what a piece reads of each operand, in order: a shard of the dim with this number, or the whole
    operand (None).

    Returns None if no operand is read in shards, if the dims do not belong to one variable that can be divided, or if
    the operator has halos.
    """
    names = [p.name for p in analysis.bound.operands]
    found = {analysis.operand_dims[n][d] for n, d in zip(names, dims, strict=True) if d is not None}
    variable = next(iter(found), None)
    has_borders = any(map(any, analysis.operand_halos.values())) or any(analysis.result_halos)
    if len(found) != 1 or variable not in analysis.splittable or has_borders:
        return None
    return variable


def dims_along(analysis: Analysis, variable: str | None) -> list[int | None]:
    """
    Return, for each operand in order, the number of the dim that is sharded if the index variable `variable` is
    divided; None for an operand that does not have it.
    """
    dims = [analysis.operand_dims.get(p.name, ()) for p in analysis.bound.operands]
    return [of.index(variable) if variable in of else None for of in dims]


def loss_part(graph: Graph) -> Mapping[Node, str]:
    """
    Return the compute nodes of a placed graph (one with machine views) that run in a loop over pieces of the loss, each
    with the index variable along which the pieces divide it. In a forward they are from the head to the loss; in a
    training step their gradients are among them.

    Empty if the loss is in one piece, and if no dim of the head's result, except its last, can be divided into
    `Graph.loss_pieces` pieces. Raises `UnityError` if there is no head (`head`).
    """
    if graph.loss_pieces == 1:
        return {}
    start = head(graph)
    for dim, size in enumerate(start.types[0].piece_shape[:-1]):
        variable = start.analysis.result_dims[0][dim]
        if size % graph.loss_pieces == 0 and variable is not None:
            found = _along(graph, start, variable)
            if found:
                return found
    return {}


def _along(graph: Graph, start: Node, variable: str) -> Mapping[Node, str]:
    """Return the part whose pieces are along an index variable of the head; empty if there is none."""
    dims: dict[Value, int] = {}
    found: dict[Node, str] = {}
    for node in graph.nodes():
        own = dims_along(node.analysis, variable) if node is start else [dims.get(v) for v in node.operands]
        if all(dim is None for dim in own):
            continue
        if node.is_parallel:
            dims.update((v, dim) for v in node.results for dim in own if dim is not None)
            continue
        divided = piece_variable(node.analysis, own)
        if divided is None:
            return {}
        found[node] = divided
        if node is start or not has_contraction(node.analysis):
            roles = ((v, result_role(node.analysis, i, divided)) for i, v in enumerate(node.results))
            dims.update((v, role) for v, role in roles if is_shard(role))
    return found
