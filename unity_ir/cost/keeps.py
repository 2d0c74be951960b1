"""Find which values of the forward the backward reads; only those are held until then."""

from __future__ import annotations

from functools import lru_cache

from unity_ir.cost.work import applied, repeats
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.recompute import not_kept


@lru_cache(maxsize=65536)
def backward_reads(
    operator: str,
    operands: tuple[tuple[tuple[int, ...], str], ...],
    attributes: Attributes,
    needs: tuple[bool, ...],
    same: tuple[int, ...],
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """
    Return two tuples of flags, (per operand, per result): whether the gradient of the operator named `operator` reads
    that value. The answer does not depend on sharding.

    `operands` are (global shape, element type) pairs; `attributes` are sorted (name, value) pairs; `needs` says, per
    operand, whether its gradient is wanted; `same` is, per operand, the index of the first operand that is the same
    value.
    """
    node, backward = applied(operator, operands, attributes, (), needs, same)
    read = {v for n in backward for v in n.operands}
    return tuple(v in read for v in node.operands), tuple(v in read for v in node.results)


@lru_cache(maxsize=16)
def keeps_of(graph: Graph) -> Keeps:
    """Return the values that a forward graph keeps for its backward. Memoised."""
    return Keeps(graph)


class Keeps:
    """
    The values that a forward graph (serial or parallel) keeps for its backward: those that the backward reads, and the
    graph's outputs.
    """

    def __init__(self, graph: Graph):
        with_gradient = nodes_with_gradient(graph)
        again = not_kept(graph)
        self._operands: dict[Node, tuple[bool, ...]] = {}
        self.values: set[Value] = set()
        """Values that the backward reads, and those that parallel operators bring to where they are read."""
        self.moved_again: set[Node] = set()
        """Parallel operators that are done once more in the backward, as what they bring is not kept."""
        self._moves = {n for n in again if n.is_parallel}
        for value in graph.outputs:
            self._keep(value)
        for node in reversed(graph.nodes()):
            if not node.is_compute:
                continue
            read = (False,) * len(node.operands)
            if node in with_gradient:
                needs = tuple(v.node in with_gradient for v in node.operands)
                facts, key = node.form.facts, (backward_reads, needs)
                found = facts.get(key)
                if found is None:
                    operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
                    found = backward_reads(node.op, operands, node.attributes, needs, repeats(node))
                    facts[key] = found
                read, made = found
                if True in made:
                    self.values |= {v for v, is_read in zip(node.results, made, strict=True) if is_read}
            if node in again and not self.values.isdisjoint(node.results):
                read = (True,) * len(node.operands)
            self._operands[node] = read
            for value, is_read in zip(node.operands, read, strict=True):
                if is_read:
                    self._keep(value)

    def operands(self, node: Node) -> tuple[bool, ...]:
        """
        Return, per operand of a compute node of the graph, whether the backward reads it, in the layout in which the
        node reads it (after any reshard): for the node's gradients, or to recompute the node.
        """
        return self._operands[node]

    def reads(self, node: Node, value: Value) -> bool:
        """
        Return whether the backward reads `value`, an operand of `node`, in the layout in which `node` reads it. `node`
        is one reader of the value; others may read it in other layouts, so ask for each of them.

        If `node` is a compute node: whether computing its gradients, or recomputing it in the backward, reads the
        value. If it is a parallel operator, which brings the value to another layout: whether its result is kept for
        the backward of a later operator.
        """
        if node.is_compute:
            return any(r for v, r in zip(node.operands, self._operands[node], strict=True) if v == value)
        return node.result in self.values

    def _keep(self, value: Value) -> None:
        while True:
            node = value.node
            if node in self._moves or (node.op == "recompute" and node.operands[0].node in self._moves):
                self.moved_again.add(node)
            else:
                self.values.add(value)
            if not node.is_parallel:
                return
            (value,) = node.operands
