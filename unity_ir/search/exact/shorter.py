"""
Start the messages of a graph with many equal layers from those of a shorter graph, with few of these layers.

Equal layers in the middle of a run want the same messages, whatever their number: those of a short run's middle layer.
Passes over the short graph are cheap, and what they end with is nearly where passes over the whole one would end; any
messages are a valid start (`search/exact/trw_s.py`). Equal layers then send equal messages, which are memoised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.layers import parts, shortened_with_map
from unity_ir.pcg.node import Node, Value
from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.exact.known_messages import Known, Moved
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits

Key = Node | Value
"""Names a variable of a factor graph: an operator, or a value, for its relay."""


@dataclass(frozen=True, eq=False)
class Shorter:
    """A serial graph with fewer equal layers, and the node of it that stands for each node of the whole graph."""

    graph: Graph
    of: Mapping[Node, Node]

    def lengthened(
        self,
        short: Known,
        numbers: Mapping[Key, int],
        whole: FactorGraph,
        at: Mapping[Key, int],
        moved: Sequence[Moved],
    ) -> Known:
        """
        Return messages for the factor graph `whole` of the whole graph, given those of the short one, `short`: each
        edge has those of the edge that stands for it, or zeros where there is none.

        `numbers` and `at` number the variables of the short and of the whole graph; `moved` is of those of the whole
        one, and says what the rows of relays are, as in the result.
        """
        edges = {end: number for number, end in enumerate(_numbered(short.ends))}
        stands = [self._number(key, numbers) for key in at]
        ends = [(edge.source, edge.target) for edge in whole.edges]
        # By targets: what the middle layer's first edges come from is the layer before it, in the whole graph its like.
        made: list[Ints] = []
        needs: list[Ints] = []
        there: list[Floats] = []
        back: list[Floats] = []
        for edge, (target, nth) in zip(whole.edges, _numbered(ends), strict=True):
            number = edges.get((stands[target], nth))
            made.append(edge.made.layouts if number is None else short.made[number])
            needs.append(edge.needs.layouts if number is None else short.needs[number])
            there.append(np.zeros(len(needs[-1])) if number is None else short.there[number])
            back.append(np.zeros(len(made[-1])) if number is None else short.back[number])
        rows = [own if number < 0 else short.moved[number] for own, number in zip(moved, stands, strict=True)]
        return Known(tuple(ends), rows, made, needs, there, back)

    def _number(self, key: Key, numbers: Mapping[Key, int]) -> int:
        """Return the number of the short graph's variable that stands for one of the whole graph; -1 if none does."""
        node = self.of.get(key if isinstance(key, Node) else key.node)
        if node is None:
            return -1
        return numbers.get(node if isinstance(key, Node) else node.results[key.index], -1)


def _numbered(ends: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield, for each edge's source and target, the target, and how many edges before it lead there."""
    seen: Counter[int] = Counter()
    for _, target in ends:
        yield target, seen[target]
        seen[target] += 1


def shorter(graph: Graph) -> Shorter | None:
    """
    Return a serial graph with few of the equal layers of `graph` (`limits().rewritten_layers`); None for a graph of few
    operators, and one without enough equal layers. Memoised.
    """
    if sum(n.is_compute for n in graph.nodes()) <= limits().rewritten_operators:
        return None
    return _shorter(graph, limits().rewritten_layers)


@lru_cache(maxsize=16)
def _shorter(graph: Graph, keep: int) -> Shorter | None:
    short, at = shortened_with_map(graph, keep)
    if short is graph:
        return None
    few, of = parts(short), dict[Node, Node]()
    for part, number in zip(parts(graph), at, strict=True):
        for node, other in zip(part.nodes, few[number].nodes, strict=True):
            of[node] = other
            for value, stands in zip(node.operands, other.operands, strict=True):
                if value.node.is_leaf:
                    of.setdefault(value.node, stands.node)
    alike = {_name(node, node.operands): node for node in short.nodes()}
    for node in graph.nodes():
        # Nodes that are in no part: masks, and what updates a state.
        if node not in of:
            operands = tuple(of[v.node].results[v.index] if v.node in of else v for v in node.operands)
            if (stands := alike.get(_name(node, operands))) is not None:
                of[node] = stands
    return Shorter(short, of)


def _name(node: Node, operands: tuple[Value, ...]) -> object:
    """Return what nodes have in common that do the same with the same operands."""
    return node.op, node.attributes, node.types, operands
