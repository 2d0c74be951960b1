"""
Rewrite what Megatron-LM's plan needs and layouts alone cannot say: a fused query-key-value product, and the loss.

A shard of a fused product's columns crosses the borders of queries, keys and values, so that no layout divides the
heads of all three. Megatron-LM permutes the weight's columns. Here the weight itself is split: it rests in rows, an
all-to-all among the tensor-parallel devices brings each part to columns, and one back its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, apply, rebuild
from unity_ir.search.baselines.operands import column_variable, is_weight, weight_operand


def split_products(graph: Graph) -> Graph:
    """
    Return the serial graph with each product that is split along its columns divided into a product for each part: with
    a bias or without, and with what an adapter of low rank (LoRA) adds to it, scaled.

    rewrite: split(x @ w + b) -> (x @ w0 + b0, x @ w1 + b1, ..), where (w0, w1, ..) = split(w) and (b0, ..) = split(b)
             split(x @ w + s * (y @ v)) -> (x @ w0 + s * (y @ v0), ..)
    """
    users = graph.users()

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.op == "split" and node.attribute("dim") == len(node.operands[0].shape) - 1:
            parts = _parts(node.operands[0], operands[0], node.attribute("sizes"), users)
            if parts is not None:
                return parts
        return rebuild(node, operands, node.view).results

    return rewrite(graph, changed)


def _parts(
    old: Value, made: Value, sizes: tuple[int, ...], users: Mapping[Value, Sequence[tuple[Node, int]]]
) -> list[Value] | None:
    """
    Return the parts, of these sizes along the last dim, of a value that one operator reads: each of products, sums and
    scalings of its own. `old` is the value in the graph of these `users`, `made` the same in the rewritten one. None if
    the value is made in another way.
    """
    node, operands = old.node, made.node.operands
    if len(users[old]) > 1:
        return None
    if node.op not in ("add", "scale", "cast"):
        return _products(made.node, sizes)
    read: list[list[Value]] = []
    for was, operand in zip(node.operands, operands, strict=True):
        if node.op == "add" and is_weight(was) and operand.shape == made.shape[-1:]:
            read.append(list(apply("split", [operand], {"dim": 0, "sizes": sizes}).results))
            continue
        parts = _parts(was, operand, sizes, users) if operand.shape == made.shape else None
        if parts is None:
            return None
        read.append(parts)
    return [apply(node.op, each, dict(node.attributes)).result for each in zip(*read, strict=True)]


def _products(product: Node, sizes: tuple[int, ...]) -> list[Value] | None:
    """
    Return a product for each part, of these sizes, of the columns of `product`'s weight; None if it is no product whose
    weight has the columns.
    """
    matrix = weight_operand(product)
    if matrix is None or column_variable(product, matrix) is None:
        return None
    columns = product.analysis.operand_dims[product.analysis.bound.operands[matrix].name]
    variable = product.analysis.result_dims[0][-1]
    if variable is None or variable not in columns:
        return None
    split = {"dim": columns.index(variable), "sizes": sizes}
    each = [
        (*product.operands[:matrix], part, *product.operands[matrix + 1 :])
        for part in apply("split", [product.operands[matrix]], split).results
    ]
    return [apply(product.op, operands, dict(product.attributes)).result for operands in each]


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
