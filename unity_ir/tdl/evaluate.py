"""
Numpy semantics of a bound line (an operator's definition in the tensor description language TDL at given shapes): the
reference every other execution is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from unity_ir.tdl import windows
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.elements import converted
from unity_ir.tdl.functions import FUNCTIONS, Array
from unity_ir.tdl.gather import Pick, gather
from unity_ir.tdl.opaque import OPAQUE
from unity_ir.tdl.segments import segments
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
    Opaque,
    Position,
    Reduce,
    Result,
    Segments,
    Size,
    Var,
    Window,
    accesses,
    index_extent,
    index_names,
    joined_position,
)

SMALL = 4096
"""Products of a contraction up to which they are added up one by one."""

_NEUTRAL: Mapping[str, float] = {"sum": 0, "max": -np.inf, "min": np.inf, "prod": 1}
_REDUCERS: Mapping[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


def evaluate(bound: Bound, operands: Sequence[Array], offsets: Mapping[str, int] | None = None) -> tuple[Array, ...]:
    """
    Evaluate a bound TDL line on numpy arrays, one per operand of the line, in order and of the shapes that it was bound
    to; return its results, in order. This is the reference with which kernels and programs are compared.

    A result that has no element type of its own gets that of the first floating point operand. If the line is one
    task's part of a larger one, `offsets` maps index variables to the global index at which the part begins (0 if left
    out); it matters where an index is used as a value, in a gather, or in a window.
    """
    tensors = {p.name: a for p, a in zip(bound.operands, operands, strict=True)}
    return tuple(_result(bound, r, tensors, offsets or {}) for r in bound.results)


def _result(bound: Bound, result: Result, tensors: Mapping[str, Array], offsets: Mapping[str, int]) -> Array:
    def elements(array: Array) -> Array:
        if result.dtype is not None:
            return converted(array, result.dtype)
        return array.astype(next(tensors[p.name].dtype for p in bound.operands if p.floating))

    axis, branches = segments(result)
    pieces = [_flatten(bound, indices, expr, tensors, offsets) for indices, expr in branches]
    return elements(pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis))


def _flatten(
    bound: Bound, indices: Sequence[Index], expr: Expr, tensors: Mapping[str, Array], offsets: Mapping[str, int]
) -> Array:
    """Return the expression over all values of the indices' variables, composite dims folded into one."""
    names = [n for i in indices if not isinstance(i, Segments) for n in index_names(i)]
    value = _Evaluation(bound, tensors, offsets).over(expr, names)
    if any([isinstance(i, Window) for i in indices]):
        return windows.write(value, indices, bound.extents)
    if len(names) == len(indices) and all([isinstance(i, Var) for i in indices]):
        return value
    return value.reshape([index_extent(i, bound.extents) for i in indices if isinstance(i, Composite | Var)])


class _Evaluation:
    """Expressions as arrays with one axis per variable of `order`, of size 1 where the variable does not occur."""

    def __init__(self, bound: Bound, tensors: Mapping[str, Array], offsets: Mapping[str, int]):
        self.extents = bound.extents
        self.tensors = tensors
        self.offsets = offsets
        self.fixed: dict[str, Array] = {}
        """Positions of variables that a gather has fixed."""

    def over(self, expr: Expr, names: Sequence[str]) -> Array:
        """Return an expression as an array with exactly one axis per name, each of the variable's extent."""
        return self.filled(self.value(expr, tuple(names)), names)

    def filled(self, value: Array, names: Sequence[str]) -> Array:
        """Return an array, with an axis per name, with each axis as long as the variable's extent."""
        shape = tuple([self.extents[n] for n in names])
        # A number without axes may be numpy's scalar, which is no array.
        return np.asarray(value) if value.shape == shape else np.broadcast_to(value, shape)

    def value(self, expr: Expr, order: tuple[str, ...]) -> Array:
        """Return an expression as an array with one axis per variable of `order`, of size 1 where it does not occur."""
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
                # A window is read as a view, with an axis for each of its variables.
                if (picked := gather(expr)) is not None and not _windows(picked.body):
                    return self.gather(picked, order)
                contraction = self.contract(expr, order)
                if contraction is not None:
                    return contraction
                inner = (*order, *expr.names)
                full = self.passed_over(reducer, expr, self.value(body, inner), inner)
                sizes = [self.extents[n] if n in expr.names else s for n, s in zip(inner, full.shape, strict=True)]
                axes = tuple(range(len(order), len(inner)))
                return _REDUCERS[reducer](np.broadcast_to(full, sizes), axis=axes)
            case Opaque(function, _, _, body):
                return self.opaque(expr, OPAQUE[function].evaluate, self.value(body, (*order, *expr.names)), order)
            case Cases() | Size() | Position():
                raise TypeError(f"{expr} cannot stand inside an expression")

    def passed_over(self, reducer: str, expr: Reduce, value: Array, order: tuple[str, ...]) -> Array:
        """
        Return the body's values, with the reducer's neutral element where a window of the body lies outside its tensor.
        """
        for window in _windows(expr.body):
            names = set(index_names(window))
            # One over variables of a reduction inside of this is for that to pass over.
            if not names.isdisjoint(expr.names) and names <= set(order):
                there = windows.inside(window, self.extents, self.offsets, order)
                value = value if there.all() else np.where(there, value, _NEUTRAL[reducer])
        return value

    def opaque(self, expr: Opaque, function: Any, body: Array, order: tuple[str, ...]) -> Array:
        """
        Return the function along the last dim of its body, with the dim it makes at its variable's place in `order`.
        """
        (made,), (taken,) = expr.made, expr.names
        full = np.broadcast_to(body, [*body.shape[:-1], self.extents[taken]])
        axis = order.index(made)
        return np.moveaxis(np.squeeze(function(full, self.extents[made]), axis), -1, axis)

    def contract(self, expr: Reduce, order: tuple[str, ...]) -> Array | None:
        """Return a sum of a product, computed by einsum over its two factors; None for anything else."""
        match expr:
            case Reduce("sum", _, Binary("*", left, right)):
                pass
            case _:
                return None
        if not self.fixed.keys().isdisjoint(free_variables(expr)):
            return None
        factors: list[tuple[Array, list[str]]] = []
        for factor in (left, right):
            free = free_variables(factor)
            names = [n for n in self.extents if n in free]
            value = self.value(factor, tuple(names))
            if not isinstance(factor, Access):
                value = self.passed_over("sum", expr, value, tuple(names)) if _windows(factor) else value
            value = self.filled(value, names)
            # Conditions count as numbers: a sum of them is no disjunction.
            factors.append((value.astype(np.int64) if value.dtype == bool else value, names))
        if not set(expr.names) <= {n for _, names in factors for n in names}:
            return None
        labels = {n: k for k, n in enumerate(self.extents)}
        out = [n for n in order if any(n in names for _, names in factors)]
        (a, a_names), (b, b_names) = factors
        # What takes longest of a small one is to find out how it may be turned into a matrix product.
        large = prod(self.extents[n] for n in {*a_names, *b_names}) > SMALL
        value = np.einsum(
            a, [labels[n] for n in a_names], b, [labels[n] for n in b_names], [labels[n] for n in out], optimize=large
        )
        return value.reshape([self.extents[n] if n in out else 1 for n in order])

    def gather(self, picked: Pick, order: tuple[str, ...]) -> Array:
        """Return the body at the one position that the integers name, where that is in this piece; 0 elsewhere."""
        at = self.value(picked.at, order) - self.offsets.get(picked.variable, 0)
        there = (at >= 0) & (at < self.extents[picked.variable])
        before = dict(self.fixed)
        self.fixed[picked.variable] = np.where(there, at, 0)
        body = self.value(picked.body, order)
        self.fixed = before
        return np.where(there, body, 0)

    def along(self, name: str, order: tuple[str, ...]) -> Array:
        """Return the array 0, 1, 2, ... along the variable's axis."""
        if name in self.fixed:
            # Inside of a reduction the order has more variables at its end.
            fixed = self.fixed[name]
            return fixed.reshape((*fixed.shape, *(1,) * (len(order) - fixed.ndim)))
        shape = [self.extents[n] if n == name else 1 for n in order]
        return np.arange(self.extents[name]).reshape(shape)

    def read(self, array: Array, indices: Sequence[Any], order: tuple[str, ...]) -> Array:
        if not indices:
            return array.reshape((1,) * len(order))
        if any(isinstance(i, Window) for i in indices):
            return windows.read(array, indices, self.extents, order)
        names = [i.name for i in indices if isinstance(i, Var) and i.name not in self.fixed]
        if names == list(order) and len(names) == len(indices):
            return array
        if len(set(names)) == len(indices) and set(names) <= set(order):
            # Every dim by a variable of its own: a view.
            present = [n for n in order if n in names]
            turned = array if present == names else array.transpose([names.index(n) for n in present])
            return turned.reshape([self.extents[n] if n in names else 1 for n in order])
        return array[tuple(joined_position(i, self.extents, lambda n: self.along(n, order)) for i in indices)]


@lru_cache(maxsize=4096)
def _windows(expr: Expr) -> frozenset[Window]:
    return frozenset({i for a in accesses(expr) for i in a.indices if isinstance(i, Window)})
