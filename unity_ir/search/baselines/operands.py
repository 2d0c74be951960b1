"""
Find what operators read: the weight matrix of a dense layer, the table of a lookup, and the variables that divide them.

A weight counts as read through casts of it, and through splits of it into parts.
"""

from __future__ import annotations

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.tdl.counts import has_contractions


def weight_of(value: Value) -> Node | None:
    """
    Return the weight's node for a value that is a weight, a cast of one, or a part of one (`split`); None for others.
    """
    while value.node.op in ("cast", "split"):
        (value,) = value.node.operands
    return value.node if value.node.op == "weight" else None


def is_weight(value: Value) -> bool:
    """Return whether a value is a weight, a cast of one, or a part of one (`split`)."""
    return weight_of(value) is not None


def is_weight_cast(node: Node) -> bool:
    """Return whether a node is a cast of a weight, or of a part of one (`split`)."""
    return node.op == "cast" and is_weight(node.operands[0])


def weight_operand(node: Node) -> int | None:
    """
    Return the index of the operand that is the weight matrix of a dense layer: of a contraction, the only weight (or
    cast or part of one) with 2 or more dims. None for other operators, convolutions and lookups included.
    """
    if not node.is_compute or node.op in ("cast", "split") or node.op.startswith("conv"):
        return None
    if table_operand(node) is not None:
        return None
    weights = [i for i, v in enumerate(node.operands) if is_weight(v) and len(v.type.shape) > 1]
    multiplies = node.is_compute and has_contractions(node.analysis.bound)
    return weights[0] if len(weights) == 1 and multiplies else None


def weight_operands(graph: Graph) -> dict[Node, int | None]:
    """
    Return for every node of a graph, leaves included, the index of its weight matrix among its operands, as
    `weight_operand` does: None where it has none.
    """
    seen: dict[object, int | None] = {}
    found: dict[Node, int | None] = {}
    for node in graph.nodes():
        key = node.op, node.attributes, tuple((v.type, is_weight(v)) for v in node.operands)
        if key not in seen:
            seen[key] = weight_operand(node)
        found[node] = seen[key]
    return found


def table_operand(node: Node) -> int | None:
    """
    Return the index of the operand that is the table of an embedding lookup: the only weight with 2 dims of an operator
    that also reads integers. None for other operators.
    """
    if not node.is_compute:
        return None
    bound = node.analysis.bound
    ids = any(p.integer for p in bound.operands)
    weights = [i for i, v in enumerate(node.operands) if is_weight(v) and len(v.type.shape) == 2]
    return weights[0] if ids and len(weights) == 1 else None


def is_recurrent(graph: Graph) -> bool:
    """Return whether a graph is an unrolled recurrent network: several of its weights are each read more than twice."""
    users = graph.users()
    return sum(len(users.get(n.result, ())) > 2 for n in graph.weights()) > 1


def column_variable(node: Node, operand: int) -> str | None:
    """
    Return the index variable of the columns of a weight, the operand with index `operand` of `node`: the first of the
    weight's variables that occurs in the node's first result; None if none does.
    """
    analysis = node.analysis
    made = set(analysis.result_dims[0])
    dims = analysis.operand_dims[analysis.bound.operands[operand].name]
    return next((v for v in dims if v is not None and v in made), None)


def row_variable(node: Node, operand: int) -> str | None:
    """
    Return the index variable of the rows of a weight, the operand with index `operand` of `node`: the first of the
    weight's variables that does not occur in the node's first result, as it is summed over or picks rows from a table;
    None if all do.
    """
    analysis = node.analysis
    made = set(analysis.result_dims[0])
    dims = analysis.operand_dims[analysis.bound.operands[operand].name]
    return next((v for v in dims if v is not None and v not in made), None)
