"""
Values that are not kept for the backward, but computed or gathered again there (rematerialisation; Chen et al., 2016).

`recompute(f(x))` is `f(x)`; in the forward it says that the backward shall not read `f(x)` itself. Built explicitly,
the backward reads `f(recompute(x))` in its place: the same operator once more, from the nearest values that are kept.
If `f` gathers a weight, this is ZeRO-3 (Rajbhandari et al., 2020). What a reshard has brought elsewhere is a tensor of
its own, and is kept without such a mark.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, parallel, rebuild
from unity_ir.pcg.sharding import Placement, copies_as_repeats

RENAMING = ("replicate", "pick", "recompute")
"""Operators after which the pieces are the same tensors, unless a view says that they are elsewhere."""


@lru_cache(maxsize=16)
def not_kept(graph: Graph) -> frozenset[Node]:
    """
    Return the nodes of a forward graph or training step whose results are not kept for the backward: compute nodes and
    reshards that only `recompute` operators read, and the parallel operators that are steps of such reshards. Outputs,
    and gradients that updates read, are always kept. Memoised.
    """
    found: set[Node] = set()
    nodes = graph.nodes()
    if all(node.op != "recompute" for node in nodes):
        return frozenset()
    users = graph.users()
    outputs = {*graph.outputs, *(u.grad for u in graph.updates)}
    for node in reversed(nodes):
        if node.is_leaf or node.op == "recompute" or not outputs.isdisjoint(node.results):
            continue
        by = [user for v in node.results for user, _ in users.get(v, ())]
        is_step = node.is_parallel and node.view is None
        if by and all(user.op == "recompute" or (is_step and user.is_parallel and user in found) for user in by):
            found.add(node)
    return frozenset(found)


class Recomputation:
    """
    Builds recomputed values for the backward of the forward `graph`: one for each value that the backward reads and
    that is not kept (`not_kept`), from the nearest values that are kept. Each is built once.

    `placement` tells which parallel operators move data; if it is None, `replicate`, `pick` and `recompute` do not, and
    all others do.
    """

    def __init__(self, graph: Graph, placement: Placement | None):
        self.placement = placement
        self.not_kept = not_kept(graph)
        self._forward = set(graph.nodes()) if self.not_kept else set[Node]()
        self._made: dict[Value, Value] = {}

    def in_backward(self, gradient: Value) -> Value:
        """
        Rebuild a gradient so that it reads only kept values of the forward, and return it: values that are not kept are
        replaced by recomputed ones. `gradient` must have been built from values of the forward.

        Nodes of the gradient that are also nodes of the forward, since equal nodes are one object, are replaced, too.
        """
        if not self.not_kept:
            return gradient
        if gradient not in self._made:
            node = gradient.node
            if node in self._forward:
                return self.read(gradient)
            operands = [self.in_backward(v) for v in node.operands]
            same = tuple(operands) == node.operands
            self._made[gradient] = gradient if same else rebuild(node, operands, node.view).results[gradient.index]
            self._made.setdefault(self._made[gradient], self._made[gradient])
        return self._made[gradient]

    def read(self, value: Value) -> Value:
        """
        Return the value that the backward reads for the forward's `value`: `value` itself if it is kept, else a
        recomputed one.
        """
        if not self.not_kept:
            return value
        if value not in self._made:
            self._made[value] = self._read(value)
        return self._made[value]

    def _read(self, value: Value) -> Value:
        node = value.node
        if node in self.not_kept:
            return rebuild(node, [self._from(v) for v in node.operands], node.view).results[value.index]
        if not node.is_parallel or self._moves(node):
            return value
        (operand,) = node.operands
        inner = self.read(operand)
        if inner == operand:
            return value
        return inner if node.op == "recompute" else rebuild(node, [inner], node.view).result

    def _from(self, operand: Value) -> Value:
        """Mark an operand as read to recompute: an operator that reads it so is not the one of the forward."""
        inner = self.read(operand)
        return parallel("recompute", operand).result if inner == operand else inner

    def _moves(self, node: Node) -> bool:
        """Return whether the result of a parallel operator is a tensor of its own."""
        if node.op not in RENAMING:
            return True
        if self.placement is None:
            return False
        before, after = (copies_as_repeats(self.placement.layouts[v]) for v in (node.operands[0], node.result))
        return before != after


def with_recompute(plan: Graph, again: Collection[Node], moved_again: Collection[Node] = ()) -> Graph:
    """
    Return a placed forward graph (one with machine views) whose backward recomputes the results of the compute nodes in
    `again`, and reshards them again for their readers. The results of compute nodes in `moved_again` are kept, and only
    resharded again.

    rewrite: replicate(f(x)) -> recompute(replicate(recompute(f(x)))), for f in `again`
    """

    def mark(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        results = rebuild(node, operands, node.view).results
        maker = node
        while maker.is_parallel:
            maker = maker.operands[0].node
        is_moved = node.is_parallel and node.view is not None and node.op != "recompute"
        if node in again or (is_moved and (maker in again or maker in moved_again)):
            return [parallel("recompute", v).result for v in results]
        return results

    return rewrite(plan, mark)
