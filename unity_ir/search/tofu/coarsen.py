"""
Coarsen a graph: group operators and tensors that share a partition strategy (Tofu, section 5.1).

Tofu groups a forward operator with its backward ones; here the backward follows from the forward. So the groups are the
steps of an unrolled recurrent network, recognised by shared weights, and runs of elementwise operators.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.search.layouts.limits import limits


@dataclass(frozen=True)
class Groups:
    """The group number of every compute operator and of every value; a group has one partition strategy."""

    operators: dict[Node, int]
    values: dict[Value, int]


def without_groups(graph: Graph) -> Groups:
    """
    Return trivial groups, for a search without coarsening: each compute operator, and each value, is a group of its
    own.
    """
    nodes = graph.nodes()
    operators = {n: i for i, n in enumerate(n for n in nodes if n.is_compute)}
    values = {v: i for i, v in enumerate(v for n in nodes for v in n.results)}
    return Groups(operators, values)


def coarsen(graph: Graph) -> Groups:
    """
    Return groups of operators, and of values, that are to be partitioned in the same way (Tofu, section 5.1); above
    all, each step of an unrolled recurrent network gets the groups of the others.

    Two operators are in one group if they are equal (name, attributes, types of operands) and read the same weights, of
    those that several operators read. Operators that read no such weight must instead have operands made by operators
    that are equal in this sense, followed back to a depth of `limits().coarsen_depth`. The results of a group's
    operators form groups of values. In graphs with no weight read more than twice, each operator and value is alone
    (`without_groups`).
    """
    nodes, users = graph.nodes(), graph.users()
    shared = {n.result for n in nodes if n.op == "weight" and len(users.get(n.result, ())) > 1}
    colours: dict[tuple[Node, int], Hashable] = {}

    def colour(node: Node, depth: int) -> Hashable:
        """Return a key of what an operator computes, to the given depth; a weight with several users is its own key."""
        if (node, depth) not in colours:
            own = (node.op, node.attributes, tuple(v.type for v in node.operands), node.types)
            weights = tuple((i, v) for i, v in enumerate(node.operands) if v in shared)
            if node.is_leaf:
                found: Hashable = node
            elif weights:
                found = (own, weights)
            elif depth == 0:
                found = own
            else:
                found = (own, tuple((v.index, colour(v.node, depth - 1)) for v in node.operands))
            colours[node, depth] = found
        return colours[node, depth]

    if not any(len(users[v]) > 2 for v in shared):
        return without_groups(graph)
    numbers: dict[Hashable, int] = {}
    operators: dict[Node, int] = {}
    values: dict[Value, int] = {}
    named: dict[Hashable, int] = {}
    for node in nodes:
        key: Hashable = node if node.is_leaf else colour(node, limits().coarsen_depth)
        if node.is_compute:
            operators[node] = numbers.setdefault(key, len(numbers))
        for value in node.results:
            values[value] = named.setdefault((key, value.index), len(named))
    return Groups(operators, values)
