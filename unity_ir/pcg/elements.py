"""Converts graphs to another floating point type."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.node import Node, Value, apply, leaf, rebuild
from unity_ir.pcg.types import divided_type

FLOATS = ("f32", "bf16", "f16")


def with_dtype(graph: Graph, dtype: str) -> Graph:
    """
    Return the graph computed in the floating point type `dtype`, `f32`, `bf16` or `f16`: its floating point inputs,
    weights, constants and casts are converted. Weights have no master afterwards: each is stored in `dtype`, too.

    Raises `UnityError` for another type.
    """
    if dtype not in FLOATS:
        raise UnityError(f"elements: {dtype!r} is no floating point type of programs; use {', '.join(FLOATS)}")

    def changed(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.is_leaf:
            (type,) = node.types
            if type.is_floating:
                type = divided_type(type.shape, dtype, type.parts, time=type.time)
            own = {name: value for name, value in node.attributes if name != "master"}
            return leaf(node.op, type, node.view, **own).results
        if node.op == "cast" and node.attribute("to") in FLOATS:
            return apply(node.op, operands, {"to": dtype}, node.view).results
        return rebuild(node, operands, node.view).results

    return rewrite(graph, changed)
