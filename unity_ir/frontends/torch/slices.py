"""
Join slices that together are all of a value to one split: queries, keys and values that a model picks from one product
by their indices, `qkv[0], qkv[1], qkv[2]`, are then its parts, as where it calls `unbind` or `chunk`.
"""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.frontends.torch.values import parts
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, rebuild


def with_slices_joined(graph: Graph) -> Graph:
    """
    Return the graph in which slices of a value are the results of one split of it, wherever slices along one dim
    together have each of its positions once. Other slices stay.

    rewrite: (slice(x, 0..2), slice(x, 2..6)) -> split(x, sizes = (2, 4)), of an x with 6 positions
    """
    splits = {node: (dim, starts) for dim, starts in _partitions(graph) for node in starts.values()}

    def changed(node: Node, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        if node not in splits:
            return rebuild(node, operands, node.view).results
        dim, starts = splits[node]
        order = sorted(starts)
        found = parts(operands[0], dim, [starts[start].result.shape[dim] for start in order])
        return (found[order.index(int(node.attribute("start")))],)

    return rewrite(graph, changed) if splits else graph


def _partitions(graph: Graph) -> list[tuple[int, Mapping[int, Node]]]:
    """
    Return each set of two or more slices of a value along a dim that have each of its positions once, as (dim, slices
    by where they begin).
    """
    found: dict[tuple[Value, int], dict[int, Node]] = {}
    for node in graph.nodes():
        if node.op == "slice" and node.attribute("step") == 1:
            dim, start = int(node.attribute("dim")), int(node.attribute("start"))
            found.setdefault((node.operands[0], dim), {}).setdefault(start, node)
    return [
        (dim, starts)
        for (value, dim), starts in found.items()
        if len(starts) > 1 and _covers(starts, dim, value.shape[dim])
    ]


def _covers(starts: Mapping[int, Node], dim: int, size: int) -> bool:
    """Return whether slices, by where they begin along a dim, have each of its `size` positions once."""
    end = 0
    for start in sorted(starts):
        if start != end:
            return False
        end += starts[start].result.shape[dim]
    return end == size
