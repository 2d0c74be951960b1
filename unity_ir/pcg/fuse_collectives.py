"""Chains of two parallel operators as the one collective that performs them."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.pcg.graph import Graph, Node, Value, parallel, rebuild, rewrite


def fuse_collectives(graph: Graph) -> Graph:
    """
    Fuse where nothing reads the value in between and it has no place of its own.

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
    """The collective of two chained operators of the same degree, or None."""
    if inner.op not in ("reduce", "combine") or inner.attribute("by") != outer.attribute("by"):
        return None
    by = {"by": int(outer.attribute("by"))}
    match inner.op, outer.op:
        case "reduce", "replicate":
            return "all_reduce", by
        case "combine", "replicate":
            return "all_gather", {"dim": int(inner.attribute("dim")), **by}
        case "reduce", "partition":
            return "reduce_scatter", {"dim": int(outer.attribute("dim")), **by}
        case "combine", "partition" if inner.attribute("dim") != outer.attribute("dim"):
            return "all_to_all", {"dim": int(inner.attribute("dim")), "to": int(outer.attribute("dim")), **by}
        case _:
            return None
