"""
Rewrite what Megatron-LM's plan needs and layouts alone cannot say: a fused query-key-value product, and the loss.

A shard of a fused product's columns crosses the borders of queries, keys and values, so that no layout divides the
heads of all three. Megatron-LM permutes the weight's columns. Here the weight itself is split: it rests in rows, an
all-to-all among the tensor-parallel devices brings each part to columns, and one back its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.pcg.graph import Graph, Node, Value, apply, rebuild, rewrite
from unity_ir.search.baselines.operands import column_variable, is_weight, weight_operand


def split_products(graph: Graph) -> Graph:
    """
    Return the serial graph with each product that is split along its columns, with bias or without, divided into a
    product for each part.

    rewrite: split(x @ w + b) -> (x @ w0 + b0, x @ w1 + b1, ..), where (w0, w1, ..) = split(w) and (b0, ..) = split(b)
    """
    users = graph.users()

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        return _parts(node, operands, users) or rebuild(node, operands, node.view).results

    return rewrite(graph, changed)


def _parts(node: Node, operands: tuple[Value, ...], users: Mapping[Value, Sequence[tuple[Node, int]]]) -> list[Value]:
    """Return the parts of a split product, each of a product of its own; [] if the node splits something else."""
    if node.op != "split" or node.attribute("dim") != len(node.operands[0].shape) - 1:
        return []
    sizes = node.attribute("sizes")
    (old,), (made,) = node.operands, operands
    bias: Value | None = None
    if old.node.op == "add" and len(users[old]) == 1 and is_weight(old.node.operands[1]):
        bias = made.node.operands[1]
        if bias.shape != old.shape[-1:]:
            return []
        old, made = old.node.operands[0], made.node.operands[0]
    product = made.node
    matrix = weight_operand(product)
    if matrix is None or len(users[old]) > 1 or column_variable(product, matrix) is None:
        return []
    weight = product.operands[matrix]
    columns = product.analysis.operand_dims[product.analysis.bound.operands[matrix].name]
    variable = product.analysis.result_dims[0][-1]
    if variable is None or variable not in columns:
        return []
    weights = apply("split", [weight], {"dim": columns.index(variable), "sizes": sizes}).results
    biases = () if bias is None else apply("split", [bias], {"dim": 0, "sizes": sizes}).results
    parts: list[Value] = []
    for i, part in enumerate(weights):
        each = (*product.operands[:matrix], part, *product.operands[matrix + 1 :])
        value = apply(product.op, each, dict(product.attributes)).result
        parts.append(apply("add", [value, biases[i]]).result if biases else value)
    return parts


def vocabulary_parallel_loss(graph: Graph, parts: int) -> Graph:
    """
    Return the serial graph with cross-entropies replaced so that their classes can be sharded `parts` ways
    (Megatron-LM, section 3).

    rewrite: cross_entropy(x, t) -> mean(log(sum_exp(x, m)) + m - class_score(x, t)), where m is the maximum of x

    A cross-entropy is replaced only if a dense layer makes its logits `x`, and `parts` divides the number of classes.
    """

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.op != "cross_entropy" or operands[0].shape[-1] % parts or not _is_dense(operands[0]):
            return rebuild(node, operands, node.view).results
        logits, labels = operands
        largest = apply("max_of_parts", [apply("detach", [logits]).result], {"parts": parts}).result
        shift = apply("reduce_max", [largest], {"dim": len(labels.shape)}).result
        total = apply("add", [apply("log", apply("sum_exp", [logits, shift]).results).result, shift]).result
        losses = apply("sub", [total, apply("class_score", [logits, labels]).result]).result
        return apply("reduce_mean", [losses], {"dim": 0, "count": len(labels.shape)}).results

    return rewrite(graph, changed)


def _is_dense(value: Value) -> bool:
    """Return whether a dense layer makes a value, up to casts, biases, and slices and reshapes of its other dims."""
    while not is_weight(value) and (value.node.op in ("cast", "add") or _keeps_classes(value.node)):
        value = value.node.operands[0]
    return weight_operand(value.node) is not None


def _keeps_classes(node: Node) -> bool:
    """Return whether a node slices or reshapes dims of its operand other than the last."""
    return node.op in ("slice", "reshape") and node.results[0].shape[-1:] == node.operands[0].shape[-1:]
