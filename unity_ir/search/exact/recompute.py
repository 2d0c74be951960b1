"""
What the backward of a serial graph reads, and which operators may be computed again there instead of keeping that.

What is computed again is there until the backward has passed the operators it is of, all of a chain at once. So chains
are kept short: largest results first, an operator joins if the chain it then is part of is no more than a part of all
activations (Chen et al., 2016, cut a network into equal parts).
"""

from __future__ import annotations

from collections.abc import Iterable

from unity_ir.cost.keeps import Keeps
from unity_ir.pcg.graph import Graph, Node, Value

CHAIN = 8
"""A chain has at most one in so many of the bytes all operators make, unless it is one operator."""


class Kept:
    """Of a serial forward graph: what its backward reads. Results and operands are flagged in order."""

    def __init__(self, graph: Graph | None):
        self._keeps = None if graph is None else Keeps(graph)
        self._outputs = frozenset[Value]() if graph is None else frozenset(graph.outputs)
        self.may_recompute = frozenset[Node]() if graph is None else may_recompute(graph, self._keeps)

    def value(self, value: Value) -> bool:
        """Whether any backward reads a value."""
        return self._keeps is None or value in self._keeps.values

    def results(self, node: Node) -> tuple[bool, ...]:
        """Which results any backward reads."""
        return tuple(map(self.value, node.results))

    def operands(self, node: Node) -> tuple[bool, ...]:
        """Which operands the operator's own backward reads."""
        return (True,) * len(node.operands) if self._keeps is None else self._keeps.operands(node)

    def relayed(self, value: Value, uses: Iterable[tuple[Node, int]]) -> bool:
        """Whether a value is kept where users find it: the backward of any of them reads it, or it is an output."""
        return value in self._outputs or any(self.operands(user)[slot] for user, slot in uses)


NOTHING = Kept(None)
"""For where nothing but time counts: no difference is made."""


def may_recompute(graph: Graph, keeps: Keeps | None = None) -> frozenset[Node]:
    """
    Operators of a serial forward graph whose results need not be kept though the backward reads them; none if it has
    no loss to differentiate.

    Computing them again reads nothing that their own backward does not read, so that nothing else has to be kept.
    """
    if not graph.outputs or graph.outputs[0].shape != ():
        return frozenset()
    keeps = keeps or Keeps(graph)
    users = graph.users()
    outputs = set(graph.outputs)
    open_to = [
        n
        for n in graph.nodes()
        if n.is_compute
        and outputs.isdisjoint(n.results)
        and not keeps.values.isdisjoint(n.results)
        and all(keeps.operands(n))
    ]
    made = {n: sum(t.bytes for t in n.types) for n in open_to}
    most = sum(made.values()) / CHAIN
    chain: dict[Node, set[Node]] = {}
    for node in sorted(open_to, key=lambda n: -made[n]):
        joined = {node}
        for near in _near(node, users):
            joined |= chain.get(near, set())
        if len(joined) == 1 or sum(made[n] for n in joined) <= most:
            for n in joined:
                chain[n] = joined
    return frozenset(chain)


def _near(node: Node, users: dict[Value, list[tuple[Node, int]]]) -> list[Node]:
    """Who makes what an operator reads, and who reads what it makes."""
    return [*(v.node for v in node.operands), *(user for v in node.results for user, _ in users.get(v, ()))]
