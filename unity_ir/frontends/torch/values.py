"""Build values of the graph: operators, constants, casts between PyTorch's and our element types, and shape changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TypeAlias

import numpy as np
import torch

from unity_ir.errors import UnityError
from unity_ir.ops import operator
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.syntax import NOT_FLOATING, AttrValue

Shape: TypeAlias = tuple[int, ...]
Operand: TypeAlias = "Value | torch.Tensor | float"
"""A value of the graph, or a folded one (which depends on no input and no parameter): a tensor or a number."""

DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}
"""The compiler's name of each element type that it has."""

SWAP_HEADS = (0, 2, 1, 3)


def shape_of(x: Operand) -> Shape:
    """Return the shape of an operand: of a value of the graph, or of a tensor known at import; () for a number."""
    return tuple(x.shape) if isinstance(x, Value | torch.Tensor) else ()


def broadcast(*operands: Operand) -> Shape:
    """Return the shape that operands broadcast to, by NumPy's rules. Raises `ValueError` if they do not."""
    return np.broadcast_shapes(*map(shape_of, operands))


def is_bool(x: Operand) -> bool:
    """Return whether an operand is a boolean tensor or value of the graph; False for a number."""
    return x.type.dtype == "bool" if isinstance(x, Value) else getattr(x, "dtype", None) == torch.bool


def element_type(dtype: torch.dtype) -> str:
    """
    Return the compiler's name of an element type: given `torch.float32`, `f32`.

    Raises `UnityError` for complex, 8-bit and other types that the compiler does not have.
    """
    if dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        fix = ", and the real view of complex numbers (torch.view_as_real)" if dtype.is_complex else ""
        raise UnityError(f"element type {str(dtype).removeprefix('torch.')} is not supported; known are {known}{fix}")
    return DTYPES[dtype]


def like(value: Value) -> torch.Tensor:
    """
    Return a tensor on PyTorch's meta device, without data, with the shape and element type of a value of the graph.
    """
    dtype = next(d for d, n in DTYPES.items() if n == value.type.dtype)
    return torch.empty(value.shape, dtype=dtype, device="meta")


def op(name: str, *operands: Value, **attributes: AttrValue) -> Value:
    """
    Apply the graph operator called `name`, which has one result, to operands, with the given attributes; return that
    result. Integer operands are treated as by `results`.
    """
    (result,) = results(name, *operands, **attributes)
    return result


def results(name: str, *operands: Value, **attributes: AttrValue) -> tuple[Value, ...]:
    """
    Apply the graph operator called `name` to operands, with the given attributes; return its results.

    Where the operator wants floating point operands and gets only integers or booleans: sums and products of integers
    become the operators `int_add` and `int_mul`. For other operators the operands are cast to f32, which holds integers
    below 2^24 exactly, and results whose element type is the operands' are cast back to integers.
    """
    line = operator(name).line
    kinds = [p.kind for p in line.parameters]
    if "float" not in kinds or any(p.variadic for p in line.parameters) or len(kinds) != len(operands):
        return apply(name, operands, attributes).results
    floats = {v.type.dtype for v, kind in zip(operands, kinds, strict=True) if kind == "float"}
    if floats - {*NOT_FLOATING}:
        return apply(name, operands, attributes).results
    if name in ("shift", "scale", "neg", "add", "sub", "mul") and "bool" not in floats:
        return (_of_integers(name, operands, attributes),)
    wide = [op("cast", v, to="f32") if kind == "float" else v for v, kind in zip(operands, kinds, strict=True)]
    found = apply(name, wide, attributes).results
    back = "i64" if "i64" in floats else min(floats - {"bool"}, default="i64")
    return tuple(op("cast", v, to=back) if r.elements is None else v for v, r in zip(found, line.results, strict=True))


def _of_integers(name: str, operands: Sequence[Value], attributes: Mapping[str, AttrValue]) -> Value:
    """Return a sum or product of integers, by the operators `int_add` and `int_mul`."""
    x, *more = operands
    by = attributes.get("by", -1)
    y = more[0] if more else constant(int(float(str(by))), (), x.type.dtype)
    if name == "sub":
        return op("int_add", x, op("int_mul", y, constant(-1, (), y.type.dtype)))
    return op("int_add" if name in ("add", "shift") else "int_mul", x, y)


def constant(value: float, shape: Shape, dtype: str) -> Value:
    """Return a constant of the graph, of this shape and element type (such as `f32`), that is `value` everywhere."""
    return leaf("constant", tensor_type(shape, dtype), value=int(value) if dtype == "bool" else value).result


def reshape(x: Value, shape: Sequence[int]) -> Value:
    """
    Return `x` reshaped to `shape`, of as many elements; `x` itself if it has that shape. If `x` is itself reshaped, its
    operand is reshaped instead.

    A reshape that merges attention heads, of a value [b, h, s, d] that was permuted to [b, s, h, d], to [b, s, h * d],
    becomes the operator `merge_heads`.
    """
    shape = tuple(shape)
    while x.shape != shape and x.node.op == "reshape":
        x = x.node.operands[0]
    if x.shape == shape:
        return x
    before = x.node
    if before.op == "transpose" and before.attribute("perm") == SWAP_HEADS:
        b, h, s, d = before.operands[0].shape
        if shape == (b, s, h * d):
            return op("merge_heads", before.operands[0])
    if not _has_common_factors(x.shape, shape):
        x = op("reshape", x, shape=(prod(shape),))
    return x if x.shape == shape else op("reshape", x, shape=shape)


def _has_common_factors(old: Shape, new: Shape) -> bool:
    """
    Return whether shapes are products of the same factors in order: [6, 4] and [3, 8] are, [6, 4] and [4, 6] are not.
    """
    cuts = sorted({prod(s[i:]) for s in (old, new) for i in range(len(s) + 1)})
    return all(b % a == 0 for a, b in pairwise(cuts))


def permute(x: Value, perm: Sequence[int]) -> Value:
    """
    Return `x` with its dims in the order `perm`, in which negative numbers count from the last.

    A permutation that undoes the one before, or has no effect, is dropped. If `x` is a value [b, s, h * d] reshaped to
    [b, s, h, d] and is permuted to [b, h, s, d], both steps become the operator `split_heads` (attention heads).
    """
    perm = tuple(p % len(x.shape) for p in perm)
    if perm == tuple(range(len(perm))):
        return x
    before = x.node
    if before.op == "transpose" and tuple(before.attribute("perm")[p] for p in perm) == tuple(range(len(perm))):
        return before.operands[0]
    if before.op == "reshape" and perm == SWAP_HEADS:
        (source,) = before.operands
        b, s, h, d = x.shape
        if source.shape == (b, s, h * d):
            return op("split_heads", source, heads=h)
    if before.op == "split_heads" and perm == SWAP_HEADS:
        b, h, s, d = x.shape
        return reshape(before.operands[0], (b, s, h, d))
    for dim in [i for i, size in enumerate(x.shape) if size == 1 and before.op == "reshape" and len(perm) == 5]:
        # Without a dim of size 1, such as that of queries among queries, keys and values, heads are seen to be split.
        without = reshape(x, [size for i, size in enumerate(x.shape) if i != dim])
        moved = permute(without, [p - (p > dim) for p in perm if p != dim])
        if moved.node.op == "split_heads":
            return reshape(moved, [x.shape[p] for p in perm])
    return op("transpose", x, perm=perm)


def swap(x: Value, a: int, b: int) -> Value:
    """Return `x` with the dims `a` and `b` exchanged; negative numbers count from the last."""
    perm = list(range(len(x.shape)))
    a, b = a % len(perm), b % len(perm)
    perm[a], perm[b] = perm[b], perm[a]
    return permute(x, perm)


def expand(x: Value, shape: Sequence[int]) -> Value:
    """
    Return `x` broadcast to `shape` by NumPy's rules: dims of size 1 are stretched, missing leading dims are added. `x`
    must fit.
    """
    shape = tuple(shape)
    old = (1,) * (len(shape) - len(x.shape)) + x.shape
    wide = [i for i, (a, b) in enumerate(zip(old, shape, strict=True)) if a != b]
    if not wide:
        return reshape(x, shape)
    x = reshape(x, [s for i, s in enumerate(old) if i not in wide])
    at = 0
    while at < len(wide):
        run = 1
        while at + run < len(wide) and wide[at + run] == wide[at] + run:
            run += 1
        sizes = tuple(shape[wide[at] : wide[at] + run])
        x = op("expand", x, dim=wide[at], sizes=sizes, degrees=(1,) * run)
        at += run
    return x


def cut(x: Value, dim: int, start: int, size: int, step: int = 1) -> Value:
    """
    Return the slice of `x` with `size` positions along dim `dim`: `start`, `start + step`, ...; `x` itself if that is
    all. If `x` was permuted or reshaped before, the slice is of the value before, as in `parts`; if it is a
    concatenation along this dim, of the one operand that has all these positions, where there is one.
    """
    if (start, size, step) == (0, x.shape[dim], 1):
        return x
    before = x.node
    if before.op == "concat" and before.attribute("dim") == dim:
        first = start
        for operand in before.operands:
            if 0 <= first and first + (size - 1) * step < operand.shape[dim]:
                return cut(operand, dim, first, size, step)
            first -= operand.shape[dim]
    if step == 1 and before.op == "transpose":
        perm = tuple(before.attribute("perm"))
        return permute(cut(before.operands[0], perm[dim], start, size), perm)
    if step == 1 and (outer := _outer_part(x, dim)) is not None:
        at, inner = outer
        part = cut(before.operands[0], at, start * inner, size * inner)
        return reshape(part, (*x.shape[:dim], size, *x.shape[dim + 1 :]))
    return op("slice", x, dim=dim, start=start, size=size, step=step)


def parts(x: Value, dim: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    """
    Return consecutive slices of `x` along dim number `dim`, of the sizes `sizes` in order; these must sum to the size
    of the dim.

    Of a value that was permuted, or of which this dim was the outer part of a larger one, the value before is cut, and
    the slices are permuted and reshaped: queries, keys and values are parts of the columns of one product, however a
    model arranges them before it takes them apart.
    """
    if len(sizes) == 1:
        return (x,)
    before = x.node
    if before.op == "transpose":
        perm = tuple(before.attribute("perm"))
        return tuple(permute(part, perm) for part in parts(before.operands[0], perm[dim], sizes))
    if (outer := _outer_part(x, dim)) is not None:
        at, inner = outer
        found = parts(before.operands[0], at, [size * inner for size in sizes])
        return tuple(
            reshape(part, (*x.shape[:dim], size, *x.shape[dim + 1 :])) for part, size in zip(found, sizes, strict=True)
        )
    return apply("split", (x,), {"dim": dim, "sizes": tuple(sizes)}).results


def _outer_part(x: Value, dim: int) -> tuple[int, int] | None:
    """
    Return (old dim, size of the rest of it) if `x` is a reshaped value, and dim number `dim` the outer part of a dim
    of the value before: of [4, 6] reshaped to [4, 3, 2], and 1, it is (1, 2). None if it is not.
    """
    if x.node.op != "reshape":
        return None
    old, new = x.node.operands[0].shape, x.shape
    begin, at = prod(new[:dim]), 0
    while at < len(old) and prod(old[:at]) < begin:
        at += 1
    while at < len(old) and old[at] == 1:
        at += 1
    if at == len(old) or prod(old[:at]) != begin or old[at] % new[dim]:
        return None
    ends = {prod(new[dim:end]) for end in range(dim + 1, len(new) + 1)}
    return (at, old[at] // new[dim]) if old[at] in ends else None
