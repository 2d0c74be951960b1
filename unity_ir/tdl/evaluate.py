"""Numpy semantics of a bound line: the reference every other execution is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unity_ir.tdl.functions import FUNCTIONS, Array
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Index,
    Name,
    Reduce,
    Result,
    Segments,
    Size,
    Var,
)

_REDUCERS: Mapping[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def evaluate(bound: Bound, operands: Sequence[Array], offsets: Mapping[str, int] | None = None) -> tuple[Array, ...]:
    """
    The results of `bound` on numpy operands of the shapes its extents imply.

    `offsets` gives the global index at which a piece's variables start, for expressions that use an index as a value.
    """
    tensors = {p.name: a for p, a in zip(bound.operands, operands, strict=True)}
    return tuple(_result(bound, r, tensors, offsets or {}) for r in bound.results)


def _result(bound: Bound, result: Result, tensors: Mapping[str, Array], offsets: Mapping[str, int]) -> Array:
    floats = [p.name for p in bound.operands if not p.integer]
    dtype = tensors[floats[0]].dtype
    if not isinstance(result.expr, Cases):
        return _flatten(bound, result.indices, result.expr, tensors, offsets).astype(dtype)
    axis = next(i for i, index in enumerate(result.indices) if isinstance(index, Segments))
    pieces: list[Array] = []
    for variable, expr in result.expr.branches:
        indices = tuple(Var(variable) if i == axis else index for i, index in enumerate(result.indices))
        pieces.append(_flatten(bound, indices, expr, tensors, offsets))
    return np.concatenate(pieces, axis).astype(dtype)


def _flatten(
    bound: Bound, indices: Sequence[Index], expr: Expr, tensors: Mapping[str, Array], offsets: Mapping[str, int]
) -> Array:
    """The expression over all values of the indices' variables, composite dims folded into one."""
    names = [
        n for i in indices for n in (i.names if isinstance(i, Composite) else (i.name,) if isinstance(i, Var) else ())
    ]
    value = _Evaluation(bound, tensors, offsets).over(expr, names)
    shape = [
        int(np.prod([bound.extents[n] for n in i.names])) if isinstance(i, Composite) else bound.extents[i.name]
        for i in indices
        if isinstance(i, Composite | Var)
    ]
    return value.reshape(shape)


class _Evaluation:
    """Expressions as arrays with one axis per variable of `order`, of size 1 where the variable does not occur."""

    def __init__(self, bound: Bound, tensors: Mapping[str, Array], offsets: Mapping[str, int]):
        self.extents = bound.extents
        self.tensors = tensors
        self.offsets = offsets

    def over(self, expr: Expr, names: Sequence[str]) -> Array:
        value = self.value(expr, tuple(names))
        return np.broadcast_to(value, [self.extents[n] for n in names])

    def value(self, expr: Expr, order: tuple[str, ...]) -> Array:
        match expr:
            case Const(value):
                return np.asarray(value).reshape((1,) * len(order))
            case Name(name):
                return self.along(name, order) + self.offsets.get(name, 0)
            case Access(tensor, indices):
                return self.read(self.tensors[tensor], indices, order)
            case Binary(op, left, right):
                a, b = self.value(left, order), self.value(right, order)
                return a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a / b
            case Call(function, args):
                return FUNCTIONS[function].evaluate(*(self.value(a, order) for a in args))
            case Reduce(reducer, _, body):
                contraction = self.contract(expr, order)
                if contraction is not None:
                    return contraction
                inner = (*order, *expr.names)
                full = self.value(body, inner)
                sizes = [self.extents[n] if n in expr.names else s for n, s in zip(inner, full.shape, strict=True)]
                axes = tuple(range(len(order), len(inner)))
                return _REDUCERS[reducer](np.broadcast_to(full, sizes), axis=axes)
            case Cases() | Size():
                raise TypeError(f"{expr} cannot stand inside an expression")

    def contract(self, expr: Reduce, order: tuple[str, ...]) -> Array | None:
        """A sum of a product of two plain accesses, by einsum; None for anything else."""
        match expr:
            case Reduce("sum", _, Binary("*", Access(left, i), Access(right, j))):
                pass
            case _:
                return None
        if not all(isinstance(k, Var) for k in (*i, *j)):
            return None
        left_names = [k.name for k in i if isinstance(k, Var)]
        right_names = [k.name for k in j if isinstance(k, Var)]
        labels = {n: k for k, n in enumerate(dict.fromkeys([*left_names, *right_names]))}
        if not labels.keys() >= {*expr.names}:
            return None
        out = [n for n in order if n in labels]
        value = np.einsum(
            self.tensors[left],
            [labels[n] for n in left_names],
            self.tensors[right],
            [labels[n] for n in right_names],
            [labels[n] for n in out],
            optimize=True,
        )
        return value.reshape([self.extents[n] if n in labels else 1 for n in order])

    def along(self, name: str, order: tuple[str, ...]) -> Array:
        """0, 1, 2, ... along the variable's axis."""
        shape = [self.extents[n] if n == name else 1 for n in order]
        return np.arange(self.extents[name]).reshape(shape)

    def read(self, array: Array, indices: Sequence[Any], order: tuple[str, ...]) -> Array:
        if not indices:
            return array.reshape((1,) * len(order))
        return array[tuple(self.position(i, order) for i in indices)]

    def position(self, index: Index, order: tuple[str, ...]) -> Array:
        match index:
            case Var(name):
                return self.along(name, order)
            case Composite(names):
                position = self.along(names[0], order)
                for name in names[1:]:
                    position = position * self.extents[name] + self.along(name, order)
                return position
            case Segments(names, active):
                assert active is not None, "a segment is read through one of its variables"
                return self.along(names[active], order) + sum(self.extents[n] for n in names[:active])
