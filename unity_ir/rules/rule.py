"""Rewrite rules, and how they are applied to a compact graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from unity_ir.pcg.differentiate import trained
from unity_ir.pcg.graph import Graph, Node, Update, Value, rebuild, topological
from unity_ir.rules.match import Match, OpIndex, matches
from unity_ir.rules.pattern import Bindings, Substitution

MOST_AT_ONCE = 1000
"""Applications of one rule in one go; a rule that undoes itself would never end."""


@dataclass(frozen=True, slots=True)
class Rule:
    """
    A rewrite rule: one or more substitutions (source pattern to target pattern) under one name, the cases of one idea,
    such as fusing any of several activations.
    """

    name: str
    cases: tuple[Substitution, ...]

    def matches(self, graph: Graph, given: Bindings | None = None, index: OpIndex | None = None) -> Iterator[Match]:
        """
        Yield all matches of all cases of the rule in a graph, in the order of the nodes they are at.

        `given` has values by name for symbols that no match determines. `index` is the graph's `OpIndex`; None makes
        one.
        """
        index = index or OpIndex(graph)
        found = (matches(case, index, given) for case in self.cases)
        return heapq.merge(*found, key=lambda m: index.number[m.at])

    def applications(
        self, graph: Graph, given: Bindings | None = None, index: OpIndex | None = None
    ) -> Iterator[tuple[str, Graph]]:
        """
        Apply the rule to the graph once, in every way that makes it compute nothing twice; yield (place, new graph) for
        each.

        The place names the operator that makes the first replaced value: `matmul#3` (node 3 in topological order), or
        `matmul#3.2` for the second match there. Applications after which a weight that had a gradient has none are left
        out, even if that gradient is zero. `given` has values by name for symbols that no match determines; `index` is
        the graph's `OpIndex`, None makes one.
        """
        weights: set[Node] | None = None
        last, ways = None, 0
        for match in self.matches(graph, given, index):
            if match.repeats_work:
                continue
            weights = _trained_weights(graph) if weights is None else weights
            after = substitute(graph, match.replaced)
            if weights <= _trained_weights(after):
                ways = ways + 1 if match.at is last else 1
                last = match.at
                yield match.place if ways == 1 else f"{match.place}.{ways}", after

    def everywhere(
        self, graph: Graph, given: Bindings | None = None, most: int = MOST_AT_ONCE
    ) -> tuple[list[str], Graph]:
        """
        Apply the rule at the first place where that makes the graph compute nothing twice, again and again until there
        is none, `most` times at most; return the places (`matmul#3`: node 3 of the graph at that moment), in order of
        application, and the last graph.

        `given` has values by name for symbols that no match determines.
        """
        at: list[str] = []
        while len(at) < most and (found := next(self.applications(graph, given), None)) is not None:
            at.append(found[0])
            graph = found[1]
        return at, graph


def _trained_weights(graph: Graph) -> set[Node]:
    return {n for n in trained(graph) if n.op == "weight"}


def substitute(graph: Graph, replaced: Mapping[Value, Value]) -> Graph:
    """
    Replace every value that is a key of `replaced` by the value it maps to, and rebuild all that depends on it; return
    the new graph.

    A replacement is a value of the graph, or new over values of the graph; it must not depend on a replaced value.
    """
    new = dict(replaced)

    def now(value: Value) -> Value:
        return new.get(value, value)

    for node in topological(graph.roots, first=graph.inputs):
        operands = tuple([now(v) for v in node.operands])
        if operands != node.operands:
            for value, rebuilt in zip(node.results, rebuild(node, operands, node.view).results, strict=True):
                new.setdefault(value, rebuilt)
    updates = tuple(Update(now(u.weight), now(u.grad)) for u in graph.updates)
    return replace(graph, outputs=tuple(map(now, graph.outputs)), updates=updates)
