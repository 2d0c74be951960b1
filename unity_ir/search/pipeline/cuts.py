"""
Cut a serial forward graph into units, of which stages of a pipeline are made: the parts between which a single value
passes (`pcg.layers.parts`), with all other nodes dealt to them.

What is not trained (a mask, a table of positions), weights and inputs belong to the first unit that reads them. Such
values may pass a cut as well, and so may a weight that a later unit reads, too (tied embeddings).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.layers import Part, parts
from unity_ir.pcg.node import Node, Value


@dataclass(frozen=True)
class Units:
    """A serial forward graph in units, which are numbered in graph order."""

    parts: tuple[Part, ...]
    unit_of: Mapping[Node, int]
    """The unit of every node."""
    passing: tuple[tuple[Value, ...], ...]
    """For each cut, between units c and c + 1: the computed values that units behind it read, and those before make."""
    tied: tuple[tuple[Node, int], ...]
    """Weights that further units read, and each such unit."""


@lru_cache(maxsize=64)
def units(graph: Graph) -> Units:
    """
    Return the units of a serial forward graph: contiguous runs of operators, of which pipeline stages are made. A
    `Units` lists the operators of each unit, the unit of each node, and the values that pass each border between units.
    Memoised.

    The graph is cut wherever a single computed value is all that later operators read of earlier ones
    (`pcg.layers.parts`). Every other node, such as a weight, an input or a mask, belongs to the first unit that reads
    it.
    """
    found = parts(graph)
    unit_of = _units_of_nodes(graph, found)
    readers: dict[Value, int] = {}
    tied: dict[tuple[Node, int], None] = {}
    for node in graph.nodes():
        for value in node.operands:
            readers[value] = max(readers.get(value, 0), unit_of[node])
            if value.node.op == "weight" and unit_of[node] != unit_of[value.node]:
                tied.setdefault((value.node, unit_of[node]))
    passing: list[list[Value]] = [[] for _ in found[1:]]
    for value, last in readers.items():
        if value.node.is_compute:
            for cut in range(unit_of[value.node], last):
                passing[cut].append(value)
    return Units(found, unit_of, tuple(map(tuple, passing)), tuple(tied))


def _units_of_nodes(graph: Graph, found: tuple[Part, ...]) -> dict[Node, int]:
    unit_of = {node: i for i, part in enumerate(found) for node in part.nodes}
    users, nodes = graph.users(), graph.nodes()
    for node in reversed(nodes):
        by = [unit_of[user] for v in node.results for user, _ in users.get(v, ()) if user in unit_of]
        if node not in unit_of and by:
            unit_of[node] = min(by)
    for node in nodes:
        # What only an output reads is made where the last of its operands is.
        if node not in unit_of:
            unit_of[node] = max((unit_of[v.node] for v in node.operands), default=0)
    return unit_of
