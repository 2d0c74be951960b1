"""
Values of bound lines (operators' TDL definitions at given shapes) over the integers modulo the prime 2^31 - 1, for many
operands at once, to compare terms exactly.

Sums and products are exact; scalar functions are random oracles, so that what is equal is so as terms over functions
of which nothing is known. `maximum` and comparisons are those of the residues, which are a lattice and an order as good
as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, prod
from zlib import crc32

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    Call,
    Cases,
    Const,
    Expr,
    Index,
    Name,
    Reduce,
    Result,
    Segments,
    Var,
    Window,
    accesses,
    index_names,
    joined_position,
)

P = 2**31 - 1
"""The prime: products of two residues fit into 64 bits."""

Batch = npt.NDArray[np.int64]
"""Residues; the first axis runs over the batch."""


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash each 64-bit word by Splitmix64's finaliser, a bijection that looks random (Steele et al., OOPSLA'14)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def oracle(function: str, args: Sequence[Batch]) -> Batch:
    """
    Apply a scalar function, such as `exp`, as if nothing were known of it but its name: return pseudo-random residues
    modulo the prime 2^31 - 1, elementwise, the same for the same function name and arguments. But for chance, terms
    then get equal values only if they are equal whatever the function is.
    """
    state = np.asarray(crc32(function.encode()) + 1, dtype=np.uint64)
    for a in args:
        state = mixed(state * np.uint64(0x9E3779B97F4A7C15) + a.astype(np.uint64))
    return (state % np.uint64(P)).astype(np.int64)


def residue(value: float) -> int:
    """
    Return a number modulo the prime 2^31 - 1, taken as the nearest rational p/q with q at most 10^6.

    Infinities and NaN have a fixed residue each.
    """
    if not isfinite(value):
        return crc32(str(value).encode()) % P
    fraction = Fraction(value).limit_denominator(10**6)
    return fraction.numerator * pow(fraction.denominator, -1, P) % P


def inverse(x: Batch) -> Batch:
    """Return 1/x modulo the prime 2^31 - 1 for each residue, and 0 for 0."""
    out, power, left = np.ones_like(x), x, P - 2
    while left:
        if left & 1:
            out = out * power % P
        power = power * power % P
        left >>= 1
    return out


class ResidueLine:
    """
    Evaluates a bound line in integers modulo the prime 2^31 - 1. Called with its operands, each an int64 array [batch,
    *shape] of residues, it returns its results alike, in order.

    The call raises `UnityError` for expressions that have no value there, such as opaque functions.
    """

    def __init__(self, bound: Bound):
        self.bound = bound
        self.extents = bound.extents
        self._reads: dict[tuple[Access, tuple[str, ...]], tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = {}

    def __call__(self, operands: Sequence[Batch]) -> list[Batch]:
        """Return the results, given operands with a first axis for the batch."""
        self.tensors = {p.name: a for p, a in zip(self.bound.operands, operands, strict=True)}
        self.count = len(operands[0])
        with np.errstate(over="ignore"):
            return [self._result(r) for r in self.bound.results]

    def _result(self, result: Result) -> Batch:
        if not isinstance(result.expr, Cases):
            return self._flat(result.indices, result.expr)
        axis = next(i for i, index in enumerate(result.indices) if isinstance(index, Segments))
        pieces: list[Batch] = []
        for variable, expr in result.expr.branches:
            indices = tuple(Var(variable) if i == axis else index for i, index in enumerate(result.indices))
            pieces.append(self._flat(indices, expr))
        return np.concatenate(pieces, axis + 1)

    def _flat(self, indices: Sequence[Index], expr: Expr) -> Batch:
        order = tuple(dict.fromkeys(n for i in indices for n in index_names(i)))
        value = self._value(expr, order)
        value = np.broadcast_to(value, (self.count, *(self.extents[n] for n in order)))
        shape = self.bound.result_shape(Result("", tuple(indices), expr))
        if not any(isinstance(i, Window) for i in indices):
            return value.reshape((self.count, *shape))
        # What falls on one place is added up, what falls outside is lost.
        at, inside = self._positions(indices, shape, order)
        at, inside = (np.broadcast_to(a, value.shape[1:]) for a in (at, inside))
        out = np.zeros((self.count, prod(shape)), dtype=np.int64)
        for k, place in zip(np.flatnonzero(inside), at[inside], strict=True):
            out[:, place] += value.reshape(self.count, -1)[:, k]
        return (out % P).reshape((self.count, *shape))

    def _value(self, expr: Expr, order: tuple[str, ...]) -> Batch:
        """
        Return an expression with one axis for the batch and one for each variable, of size 1 where it does not occur.
        """
        match expr:
            case Const(value):
                return np.full((1,) * (len(order) + 1), residue(value), dtype=np.int64)
            case Name(name):
                return self._along(name, order)[None] % P
            case Access():
                return self._read(expr, order)
            case Binary(op, left, right):
                a, b = self._value(left, order), self._value(right, order)
                b = inverse(b) if op == "/" else b
                return (a + b if op == "+" else a - b if op == "-" else a * b) % P
            case Call(function, args):
                return _call(function, [self._value(a, order) for a in args])
            case Reduce(reducer, _, body):
                return self._reduce(reducer, expr, self._value(body, (*order, *expr.names)), order)
            case _:
                raise UnityError(
                    f"pcg.{self.bound.operator}: {type(expr).__name__.lower()} has no value modulo a prime"
                )

    def _reduce(self, reducer: str, expr: Reduce, value: Batch, order: tuple[str, ...]) -> Batch:
        inner = (*order, *expr.names)
        neutral = {"sum": 0, "prod": 1, "max": -1, "min": P}[reducer]
        for window in {i for a in accesses(expr.body) for i in a.indices if isinstance(i, Window)}:
            if not set(index_names(window)).isdisjoint(expr.names):
                _, inside = self._positions([window], (window.size,), inner)
                value = np.where(inside[None], value, neutral)
        sizes = [self.extents[n] if n in expr.names else s for n, s in zip(inner, value.shape[1:], strict=True)]
        value = np.broadcast_to(value, (len(value), *sizes))
        axes = tuple(range(len(order) + 1, len(inner) + 1))
        match reducer:
            case "sum":
                return value.sum(axis=axes) % P
            case "max":
                return value.max(axis=axes)
            case "min":
                return value.min(axis=axes)
            case _:
                flat = value.reshape((*value.shape[: len(order) + 1], -1))
                out = flat[..., 0]
                for i in range(1, flat.shape[-1]):
                    out = out * flat[..., i] % P
                return out

    def _along(self, name: str, order: tuple[str, ...]) -> npt.NDArray[np.int64]:
        return np.arange(self.extents[name]).reshape([-1 if n == name else 1 for n in order])

    def _read(self, access: Access, order: tuple[str, ...]) -> Batch:
        array = self.tensors[access.tensor]
        found = self._reads.get((access, order))
        if found is None:
            indices: list[Index] = []
            for i in access.indices:
                assert isinstance(i, Index)
                indices.append(i)
            found = self._reads[access, order] = self._positions(indices, array.shape[1:], order)
        at, inside = found
        value = array.reshape(len(array), -1)[:, at]
        return value if inside.all() else np.where(inside, value, 0)

    def _positions(
        self, indices: Sequence[Index], shape: Sequence[int], order: tuple[str, ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """
        Return row-major positions over the variables (0 where they lie outside), and a mask of those that lie inside.
        """
        flat = np.zeros((1,) * len(order), dtype=np.int64)
        inside = np.ones((1,) * len(order), dtype=np.bool_)
        for index, size in zip(indices, shape, strict=True):
            at = self._position(index, order)
            here = (at >= 0) & (at < size)
            flat, inside = flat * size + np.where(here, at, 0), inside & here
        return flat, inside

    def _position(self, index: Index, order: tuple[str, ...]) -> npt.NDArray[np.int64]:
        if not isinstance(index, Window):
            return joined_position(index, self.extents, lambda n: self._along(n, order))
        at = np.full((1,) * len(order), index.offset, dtype=np.int64)
        for factor, variable in index.terms:
            at = at + factor * self._along(variable, order)
        return at


def _call(function: str, args: list[Batch]) -> Batch:
    match function:
        case "maximum":
            return np.maximum(*args)
        case "minimum":
            return np.minimum(*args)
        case "where":
            condition, yes, no = args
            return np.where(condition != 0, yes, no)
        case "gt" | "ge" | "lt" | "le" | "eq" | "ne":
            compare = {"gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal}
            return {**compare, "eq": np.equal, "ne": np.not_equal}[function](*args).astype(np.int64)
        case "and":
            return ((args[0] != 0) & (args[1] != 0)).astype(np.int64)
        case "or":
            return ((args[0] != 0) | (args[1] != 0)).astype(np.int64)
        case "not":
            return (args[0] == 0).astype(np.int64)
        case _:
            return oracle(function, np.broadcast_arrays(*args))
