"""Fuse chains of two parallel operators into the one collective that performs them (`pcg.collectives`)."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.pcg.collectives import fusion_of
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, parallel, rebuild


def fuse_collectives(graph: Graph) -> Graph:
    """
    Return the graph in which chains of two parallel operators of the same degree are one collective. A chain stays if
    something else reads the value in between, or if that value has a machine view.

    rewrite: replicate(reduce(x)) -> all_reduce(x)
             replicate(combine(x)) -> all_gather(x)
             partition(reduce(x)) -> reduce_scatter(x)
             partition(combine(x)) on another dim -> all_to_all(x)
    """
    users = graph.users()
    outputs = {*graph.outputs, *(u.grad for u in graph.updates)}

    def fuse(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.op in ("replicate", "partition"):
            inner = node.operands[0]
            free = len(users[inner]) == 1 and inner not in outputs and inner.node.view is None
            collective = _collective(inner.node, node) if free else None
            if collective is not None:
                name, attributes = collective
                # The inner operator was rebuilt as it was; its operand is what the collective reads.
                return parallel(name, operands[0].node.operands[0], node.view, **attributes).results
        return rebuild(node, operands, node.view).results

    return rewrite(graph, fuse)


def _collective(inner: Node, outer: Node) -> tuple[str, dict[str, int]] | None:
    """
    Return the collective of two chained operators of the same degree, and its attributes; None where there is none.
    """
    row = fusion_of(inner.op, outer.op)
    if row is None or inner.attribute("by") != outer.attribute("by"):
        return None
    found = {
        dim: int(node.attribute("dim"))
        for node, (_, dim) in zip((inner, outer), row.fuses, strict=True)
        if dim is not None
    }
    if len(set(found.values())) < len(found):
        # A dim that is combined and partitioned again stays as it was.
        return None
    return row.name, {**found, "by": int(outer.attribute("by"))}
