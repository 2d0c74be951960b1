"""Training in two types: weights, gradients and the optimizer's state in f32, what is computed in a shorter one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, Node, Value, apply, leaf, rebuild, rewrite

SHORT = ("bf16", "f16")


def mixed_precision(graph: Graph, dtype: str) -> Graph:
    """
    Insert casts into a forward graph so that it computes in `dtype` (bf16 or f16), as PyTorch's autocast does.

    Inputs and weights stay f32, and are cast where they are read. Operators whose results are outputs (the loss)
    compute in f32, as do operators that read only integers and constants. Kernels add up in f32. Raises `UnityError`
    for another `dtype`, for a whole training step, and where no input or weight is f32.
    """
    if dtype not in SHORT:
        raise UnityError(f"mixed precision: {dtype!a} is no type to compute in; use {' or '.join(SHORT)}")
    if graph.updates:
        raise UnityError("mixed precision: the function is a whole training step; do it before pcg-differentiate")
    last = {v.node for v in graph.outputs}
    if not any(_is_long(v) for n in graph.nodes() if n.is_leaf for v in n.results):
        raise UnityError("mixed precision: no input or weight is f32; there is nothing to cast")
    short: dict[Value, Value] = {}
    long: set[Value] = set()
    """Constants, and what is made of integers and of these alone, such as positions, which are too long for `dtype`."""

    def cast(value: Value, to: str) -> Value:
        return apply("cast", (value,), {"to": to}, value.node.view).result

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node in last and node.is_compute:
            operands = tuple(cast(v, "f32") if v.type.dtype == dtype else v for v in operands)
            return rebuild(node, operands, node.view).results
        floats = [v for v in operands if v.type.is_floating]
        if not node.is_leaf and not long.issuperset(floats):
            operands = tuple(shortened(v) for v in operands)
            if node.op == "cast" and node.attribute("to") == "f32":
                return apply(node.op, operands, {"to": dtype}, node.view).results
            return rebuild(node, operands, node.view).results
        results = rebuild(node, operands, node.view).results
        if node.op == "constant" or not node.is_leaf:
            long.update(results)
        return results

    def shortened(value: Value) -> Value:
        if not _is_long(value):
            return value
        if value not in short and value.node.op == "constant":
            type = replace(value.type, dtype=dtype)
            short[value] = leaf("constant", type, value.node.view, **dict(value.node.attributes)).result
        elif value not in short:
            short[value] = cast(value, dtype)
        return short[value]

    return rewrite(graph, changed)


def _is_long(value: Value) -> bool:
    return value.type.dtype == "f32"
