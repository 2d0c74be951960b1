"""Rewrite rules, and how they are applied to a compact graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph, Update
from unity_ir.pcg.node import Node, Value, rebuild
from unity_ir.rules.match import Match, OpIndex, matches
from unity_ir.rules.pattern import Bindings, Substitution

MOST_AT_ONCE = 1000
"""Applications of one rule everywhere; a rule that undoes itself would never end."""


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
        Yield all matches of all cases of the rule in a graph, in the topological order of the operators that make the
        first replaced value.

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
        Apply the rule to the graph once, at each of its matches in turn; yield (reference, new graph) for each. A match
        is left out if it would compute something twice, or if a weight that had a gradient would have none, even if
        that gradient is zero.

        The reference is text that names the operator which makes the first replaced value: `matmul#3` (node 3 in
        topological order, from 0), or `matmul#3.2` for the second application there. `given` has values by name for
        symbols that no match determines; `index` is the graph's `OpIndex`, None makes one.
        """
        weights: set[Node] | None = None
        last, ways = None, 0
        for match in self.matches(graph, given, index):
            if match.repeats_work:
                continue
            weights = _trained_weights(graph) if weights is None else weights
            after = substitute(graph, match.replaced)
            if after is not None and weights <= _trained_weights(after):
                ways = ways + 1 if match.at is last else 1
                last = match.at
                yield match.reference if ways == 1 else f"{match.reference}.{ways}", after

    def together(
        self, graph: Graph, given: Bindings | None = None, index: OpIndex | None = None, most: int = MOST_AT_ONCE
    ) -> tuple[tuple[str, ...], Graph] | None:
        """
        Apply the rule to a graph at several operators at once, up to `most`. Of each operator's matches the first that
        computes nothing twice is applied, unless it shares an operator with one chosen before. Return (references of
        the operators, such as `matmul#3` for node 3 of `graph`; the new graph), or None if there is no such match.

        `given` has values by name for symbols that no match determines; `index` is the graph's `OpIndex`, None makes
        one. Only one match is applied if all together would leave a weight without gradient, or if two of them each
        need a value that the other replaces.
        """
        index = index or OpIndex(graph)
        chosen: dict[Node, Match] = {}
        seen, taken = set[Node](), set[Node]()
        for match in self.matches(graph, given, index):
            if match.at in seen or match.repeats_work:
                continue
            seen.add(match.at)
            if taken.isdisjoint(match.nodes):
                chosen[match.at] = match
                taken |= match.nodes
            if len(chosen) == most:
                break
        if not chosen:
            return None
        after = _together(graph, list(chosen.values()))
        if after is not None:
            return tuple(match.reference for match in chosen.values()), after
        first = next(self.applications(graph, given, index), None)
        return None if first is None else ((first[0],), first[1])

    def at_once(
        self, graph: Graph, places: Sequence[str], given: Bindings | None = None, index: OpIndex | None = None
    ) -> Graph | None:
        """
        Apply the rule to a graph at several operators at once; return the new graph. `places` are their references,
        such as `matmul#3` (node 3 in topological order, from 0). At each the first match that computes nothing twice is
        applied.

        Returns None if an operator has no such match, if two matches have an operator in common or each need a value
        that the other replaces, or if a weight would lose its gradient. `given` has values by name for symbols that no
        match determines; `index` is the graph's `OpIndex`, None makes one.
        """
        index = index or OpIndex(graph)
        found: dict[str, Match] = {}
        for match in self.matches(graph, given, index):
            if match.reference in places and not match.repeats_work:
                found.setdefault(match.reference, match)
        taken = [node for match in found.values() for node in match.nodes]
        if found.keys() != set(places) or len(found) < len(places) or len(set(taken)) < len(taken):
            return None
        return _together(graph, list(found.values()))

    def everywhere(
        self, graph: Graph, given: Bindings | None = None, most: int = MOST_AT_ONCE
    ) -> tuple[list[tuple[str, ...]], Graph]:
        """
        Apply the rule in rounds, each time at as many operators at once as possible (`together`), until it applies
        nowhere or was applied `most` times in all. Return (for each round, the references of its operators; the last
        graph).

        A reference such as `matmul#3` is to node 3 of the graph before that round. `given` has values by name for
        symbols that no match determines.
        """
        at: list[tuple[str, ...]] = []
        while (left := most - sum(map(len, at))) > 0 and (found := self.together(graph, given, most=left)) is not None:
            at.append(found[0])
            graph = found[1]
        return at, graph


def _together(graph: Graph, found: Sequence[Match]) -> Graph | None:
    """
    Apply matches that have no operator in common; return None where this would need a value before it is made, or where
    a weight would lose its gradient, even if that is zero.
    """
    after = substitute(graph, *(match.replaced for match in found))
    return after if after is not None and _trained_weights(graph) <= _trained_weights(after) else None


def _trained_weights(graph: Graph) -> set[Node]:
    return {n for n in nodes_with_gradient(graph) if n.op == "weight"}


def substitute(graph: Graph, *replacements: Mapping[Value, Value]) -> Graph | None:
    """
    Replace every value that is a key of one of `replacements` by the value it maps to, and rebuild all that depends on
    it; return the new graph. Return None if two replacements each need a value that the other replaces.

    Each of `replacements` (one per match) maps values of the graph to others of the graph, or to new ones computed from
    these. The new nodes of a replacement may read the values that it replaces, and then keep reading the old ones;
    values that another replacement replaces they read as replaced.
    """
    new: dict[Value, Value] = {}
    of = {old: i for i, replaced in enumerate(replacements) for old in replaced}
    before = set(graph.nodes())
    made: dict[Node, int] = {}
    for i, replaced in enumerate(replacements):
        stack = [value.node for value in replaced.values()]
        while stack:
            node = stack.pop()
            if node not in before and node not in made:
                made[node] = i
                stack += [v.node for v in node.operands]

    def by(value: Value, last: int | None) -> Value:
        """Return what a value is replaced by; nothing by replacement number `last`, which the reader belongs to."""
        for _ in replacements:
            at = of.get(value)
            if at is None or at == last:
                break
            value, last = replacements[at][value], at
        return value

    order: dict[Node, None] = dict.fromkeys(graph.inputs)
    begun: set[Node] = set()

    for root in graph.roots:
        stack = [by(root, None).node]
        while stack:
            node = stack[-1]
            if node in order:
                stack.pop()
                continue
            own = made.get(node)
            needed = [n for v in node.operands if (n := by(v, own).node) not in order]
            if not needed:
                order[node] = None
                stack.pop()
            elif node in begun:
                return None
            else:
                begun.add(node)
                stack += reversed(needed)

    def now(value: Value, last: int | None) -> Value:
        value = by(value, last)
        return new.get(value, value)

    for node in order:
        own = made.get(node)
        operands = tuple([now(v, own) for v in node.operands])
        if operands != node.operands:
            new.update(zip(node.results, rebuild(node, operands, node.view).results, strict=True))
    updates = tuple(Update(now(u.weight, None), now(u.grad, None)) for u in graph.updates)
    return replace(graph, outputs=tuple(now(v, None) for v in graph.outputs), updates=updates)
