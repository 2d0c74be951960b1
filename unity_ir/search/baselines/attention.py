"""Find attention in a graph: as one operator, or as a softmax of scores between products of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.search.baselines.operands import is_weight
from unity_ir.tdl.counts import has_contractions


def has_sequence(graph: Graph) -> bool:
    """
    Return whether a graph has attention, so that its activations have a dim along which the positions of a sequence
    run: as one operator, or as a softmax of a product of two activations, whose result another such product reads.
    """
    if any("attention" in n.op for n in graph.nodes()):
        return True
    return bool(score_products(graph))


AROUND_SOFTMAX = ("scale", "add", "mul", "select", "cast", "dropout", "reshape", "transpose", "sub", "div", "max")
"""Operators by which scores are scaled, masked and reshaped before a softmax, or probabilities dropped after it."""


def _is_product(node: Node) -> bool:
    """Return whether a node is a contraction of two activations, such as queries and keys."""
    if not node.is_compute or len(node.operands) < 2 or any(map(is_weight, node.operands)):
        return False
    return has_contractions(node.analysis.bound)


def score_products(graph: Graph) -> set[Node]:
    """
    Return the products of queries and keys in attention that is written as several operators: what a softmax reads, if
    another product of activations reads its result.
    """
    users = graph.users()
    return {
        made.node
        for n in graph.nodes()
        if n.op == "softmax" and any(map(_is_product, _after(n, users)))
        for made in _before(n.operands[0])
        if _is_product(made.node)
    }


def _before(value: Value) -> Iterator[Value]:
    """Yield a value and those it is made of by operators as in `AROUND_SOFTMAX`."""
    seen, stack = {value}, [value]
    while stack:
        yield (at := stack.pop())
        if at.node.op in AROUND_SOFTMAX:
            more = [v for v in at.node.operands if v not in seen]
            seen.update(more)
            stack += more


def _after(node: Node, users: Mapping[Value, Sequence[tuple[Node, int]]]) -> Iterator[Node]:
    """Yield the nodes that read a node's results, through operators as in `AROUND_SOFTMAX`."""
    seen, stack = {node}, [node]
    while stack:
        for user in (u for v in stack.pop().results for u, _ in users.get(v, ()) if u not in seen):
            seen.add(user)
            yield user
            if user.op in AROUND_SOFTMAX:
                stack.append(user)
