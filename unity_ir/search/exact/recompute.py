"""
Find what the backward of a serial graph reads, and which operators may be recomputed there instead.

What is recomputed is held until the backward has passed its operators, all of a chain at once. So chains are kept
short: greedily, largest results first, an operator joins a chain unless that then holds more than a share of all
activations (Chen et al., 2016, cut a network into equal parts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unity_ir.cost.keeps import Keeps
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.search.layouts.limits import limits


class SavedForBackward:
    """
    The values of a serial forward graph that must be saved: those that its backward reads, and its outputs; all values,
    if made without a graph.
    """

    def __init__(self, graph: Graph | None):
        self._keeps = None if graph is None else Keeps(graph)
        self._outputs = frozenset[Value]() if graph is None else frozenset(graph.outputs)
        self.may_recompute = frozenset[Node]() if graph is None else may_recompute(graph, self._keeps)

    def is_saved(self, value: Value) -> bool:
        """
        Return whether the value must be saved: the backward of some operator reads it, or it is an output of the graph.
        """
        return self._keeps is None or value in self._keeps.values

    def results(self, node: Node) -> tuple[bool, ...]:
        """Return, for each result of an operator, whether it must be saved (`is_saved`)."""
        return tuple(map(self.is_saved, node.results))

    def operands(self, node: Node) -> tuple[bool, ...]:
        """Return, for each operand of an operator, whether the operator's own backward reads it."""
        return (True,) * len(node.operands) if self._keeps is None else self._keeps.operands(node)

    def relayed(self, value: Value, uses: Iterable[tuple[Node, int]]) -> bool:
        """
        Return whether a value must be saved in the layout of its relay, to which it is resharded once for all its
        users: the backward of one of `uses`, (user, operand index) pairs, reads it, or it is an output of the graph.
        """
        return value in self._outputs or self._read(uses)

    def relayed_as_output(self, value: Value, uses: Iterable[tuple[Node, int]]) -> bool:
        """
        Return whether a value must be saved in the layout of its relay, to which it is resharded once for all its
        users, only because it is an output of the graph: the backward of none of `uses`, (user, operand index) pairs,
        reads it.
        """
        return value in self._outputs and not self._read(uses)

    def _read(self, uses: Iterable[tuple[Node, int]]) -> bool:
        return any(self.operands(user)[slot] for user, slot in uses)


ALL_SAVED = SavedForBackward(None)
"""Everything counts as saved: for searches that price time only."""


def may_recompute(graph: Graph, keeps: Keeps | None = None) -> frozenset[Node]:
    """
    Return the operators of a serial graph whose results the backward may compute again instead of reading saved ones.

    Recomputing one reads only what its own backward reads anyway, so nothing else has to be saved. Chains of such
    operators are kept short (`limits().recompute_chain`), as all of one are held at once. `keeps` says which values the
    backward reads; None computes it from `graph`. Returns the empty set if the first output is no scalar loss.
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
    most = sum(made.values()) / limits().recompute_chain
    chain: dict[Node, set[Node]] = {}
    for node in sorted(open_to, key=lambda n: -made[n]):
        joined = {node}
        for near in _near(node, users):
            joined |= chain.get(near, set())
        if len(joined) == 1 or sum(made[n] for n in joined) <= most:
            for n in joined:
                chain[n] = joined
    return frozenset(chain)


def _near(node: Node, users: Mapping[Value, Sequence[tuple[Node, int]]]) -> list[Node]:
    """Return the producers of an operator's operands and the users of its results."""
    return [*(v.node for v in node.operands), *(user for v in node.results for user, _ in users.get(v, ()))]
