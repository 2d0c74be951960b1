"""What a rule is, and how it is applied to a compact graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from unity_ir.pcg.differentiate import trained
from unity_ir.pcg.graph import Graph, Node, Update, Value, rebuild, topological

MOST_AT_ONCE = 1000
"""Applications of one rule in one go; a rule that undoes itself would never end."""

Users = Mapping[Value, list[tuple[Node, int]]]
Match = Mapping[Value, Value]
"""Values of the graph, each with the value that may stand in its place."""


@dataclass(frozen=True, slots=True)
class Rule:
    """
    A substitution. `match` says, for a node, what may replace which values; the replacement is written over values of
    the same graph that do not depend on those replaced.
    """

    name: str
    match: Callable[[Node, Users], Iterator[Match]]

    def applications(self, graph: Graph) -> Iterator[tuple[str, Graph]]:
        """
        Every way to apply the rule once: the operator it was applied at, and the graph after it.

        Every weight that had a gradient still has one: a rewrite may not lose a weight whose part in the loss is zero.
        """
        users = graph.users()
        weights = _trained_weights(graph)
        for number, node in enumerate(graph.nodes()):
            if node.is_compute:
                for match in self.match(node, users):
                    after = substitute(graph, match)
                    if weights <= _trained_weights(after):
                        yield f"{node.op}#{number}", after

    def everywhere(self, graph: Graph) -> tuple[list[str], Graph]:
        """The rule applied until it applies no more: the operators it was applied at, in order, and the graph."""
        at: list[str] = []
        while (found := next(self.applications(graph), None)) is not None and len(at) < MOST_AT_ONCE:
            at.append(found[0])
            graph = found[1]
        return at, graph


def _trained_weights(graph: Graph) -> set[Node]:
    return {n for n in trained(graph) if n.op == "weight"}


def substitute(graph: Graph, match: Match) -> Graph:
    """The graph with every matched value replaced, and all that depends on it rebuilt."""
    new: dict[Value, Value] = {}

    def now(value: Value) -> Value:
        return new[match.get(value, value)]

    for node in topological((*match.values(), *graph.roots), first=graph.inputs):
        built = node if node.is_leaf else rebuild(node, [now(v) for v in node.operands], node.view)
        new.update(zip(node.results, built.results, strict=True))
    updates = tuple(Update(now(u.weight), now(u.grad)) for u in graph.updates)
    return replace(graph, outputs=tuple(map(now, graph.outputs)), updates=updates)
