"""Graphs of one operator at random sizes, with its backward, and arrays for their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from case import Case
from lowered import WITHOUT_GRADIENT

from unity_ir.ops import operator
from unity_ir.pcg.differentiate import operand_gradients
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.types import TensorType, tensor_type
from unity_ir.tdl.elements import converted
from unity_ir.tdl.functions import Array


def serial(name: str, case: Case) -> Node:
    """The operator on inputs x0, x1, ..."""
    kinds = [p.kind for p in operator(name).line.parameters]
    # Those of a variadic operand are alike.
    held = [*kinds, *kinds[-1:] * len(case.shapes)]
    known = {"float": "f64", "int": "i64", "bool": "bool"}
    operands: list[Value] = []
    for i, shape in enumerate(case.shapes):
        dtype = case.dtypes[i] if held[i] == "any" and case.dtypes else known.get(held[i], "f64")
        operands.append(leaf("input", tensor_type(shape, dtype), name=f"x{i}").result)
    return apply(name, operands, case.attributes)


def arrays(leaves: Sequence[Value], case: Case, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)

    def array(value: Value) -> Array:
        name = value.node.name
        kind = "float" if value.type.is_floating else "int" if value.type.is_integer else "bool"
        # Between the bounds as a whole, whatever the parts it may be given in add up to.
        array = case.array(int(name[1:]) if name.startswith("x") else -1, kind, value.shape, random)
        return converted(array, value.type.dtype)

    return {v.node.name: array(v) for v in leaves}


def with_backward(node: Node, leaf_of: Callable[[str, TensorType], Value]) -> tuple[Value, ...]:
    """The results of a node and, if it has any, the gradients of its operands from those of its results, g0, g1, ..."""
    floating = [(f"g{i}", type.dual) for i, type in enumerate(node.types) if type.is_floating]
    if node.operator.gradient is None or not floating:
        return node.results
    found = operand_gradients(node, [leaf_of(*g) for g in floating])
    for value, operand in zip(found, node.operands, strict=True):
        kept = operand in [node.operands[i] for i in WITHOUT_GRADIENT.get(node.op, ())]
        assert (value is None) == (not operand.type.is_floating or kept)
        assert value is None or value.type == operand.type.dual
    return (*node.results, *(v for v in found if v is not None))


def plain(name: str, type: TensorType) -> Value:
    return leaf("input", type, name=name).result
