"""Operators that only move elements, of any element type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Application, Operator, Shapes, Tensor
from unity_ir.tdl.syntax import AttrValue


def _concat_gradient(of: Application) -> Sequence[Tensor | None]:
    dim = of.int("dim")
    return SPLIT(of.grad, dim=dim, sizes=tuple(x.shape[dim] for x in of.operands))


def _transpose_gradient(of: Application) -> Sequence[Tensor | None]:
    perm = of.ints("perm")
    return (TRANSPOSE.one(of.grad, perm=tuple(perm.index(i) for i in range(len(perm)))),)


CONCAT = Operator(
    "concat(x*: any; dim: int)  out[a.., (i*), b..] = x*[a.., i*, b..]  where rank(a..) = dim",
    gradient=_concat_gradient,
)

SPLIT = Operator(
    "split(x: any; dim: int, sizes: ints)  out*[a.., i*, b..] = x[a.., (i*), b..]"
    "  where rank(a..) = dim, size(i*) = sizes",
    gradient=lambda of: (CONCAT.one(*of.grads, dim=of.int("dim")),),
)

TRANSPOSE = Operator(
    "transpose(x: any; perm: ints)  out[perm(a..)] = x[a..]",
    gradient=_transpose_gradient,
)

SPLIT_HEADS = Operator(
    "split_heads(x; heads: int)  out[b, h, s, d] = x[b, s, (h d)]  where size(h) = heads",
    gradient=lambda of: (MERGE_HEADS.one(of.grad),),
)

MERGE_HEADS = Operator(
    "merge_heads(x)  out[b, s, (h d)] = x[b, h, s, d]",
    gradient=lambda of: (SPLIT_HEADS.one(of.grad, heads=of.operands[0].shape[1]),),
)


def _reshape_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """
    Return the line in which old and new shape are products of common factors, each factor an index variable.

    Given [64, 784] to [64, 28, 28], returns `out[i0, i1, i2] = x[i0, (i1 i2)]` with sizes 64, 28, 28.
    """
    (old,), new = shapes, attributes["shape"]
    assert isinstance(new, tuple)
    cuts = _cuts("reshape", old, new)
    return f"reshape(x: any)  {_reshaped(cuts, old, new)}" + _sizes([a // b for a, b in pairwise(cuts)], old, new)


def _cuts(name: str, old: tuple[int, ...], new: tuple[int, ...]) -> list[int]:
    """
    Return the numbers of elements, in descending order, that an index of some dim of either shape steps over, with that
    of all: quotients of neighbours are the common factors. Raises `UnityError`, about operator `name`, if there are
    none.
    """
    if prod(old) != prod(new) or min(new, default=1) < 1:
        raise UnityError(f"pcg.{name}: {list(old)} and {list(new)} hold different numbers of elements")
    cuts = sorted({prod(s[i:]) for s in (old, new) for i in range(len(s) + 1)}, reverse=True)
    if any(a % b for a, b in pairwise(cuts)):
        raise UnityError(
            f"pcg.{name}: {list(old)} to {list(new)} has no common factors; reshape to [{prod(old)}] in between"
        )
    return cuts


def _reshaped(cuts: Sequence[int], old: tuple[int, ...], new: tuple[int, ...]) -> str:
    """Return the line of a reshape after its head, such as `out[i0, i1] = x[(i0 i1)]`, given its `_cuts`."""

    def dims(shape: tuple[int, ...]) -> str:
        out: list[str] = []
        unit = 0
        for i, size in enumerate(shape):
            hi, lo = prod(shape[i:]), prod(shape[i + 1 :])
            names = [f"i{k}" for k, cut in enumerate(cuts[:-1]) if lo < cut <= hi]
            if size == 1:
                names = [f"u{unit}" if shape is old else f"v{unit}"]
                unit += 1
            out.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
        return ", ".join(out)

    # A dim of size 1 belongs to one side only: the other reads it, or makes it, at position 0.
    return f"out[{dims(new)}] = x[{dims(old)}]"


def _sizes(factors: Sequence[int], old: Sequence[int], new: Sequence[int]) -> str:
    clauses = [f"size(i{k}) = {factor}" for k, factor in enumerate(factors)]
    clauses += [f"size(u{k}) = 1" for k in range(sum(s == 1 for s in old))]
    clauses += [f"size(v{k}) = 1" for k in range(sum(s == 1 for s in new))]
    return "  where " + ", ".join(clauses) if clauses else ""


RESHAPE = Operator(
    _reshape_line,
    signature="reshape(x: any; shape: ints)",
    gradient=lambda of: (RESHAPE.one(of.grad, shape=of.operands[0].shape),),
)


def _reshape_sample_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """
    Return the line of a reshape of two samples, with the size of one.

    Given [1, 8, 4] to [8, 4] with dims 0 and 0, returns `out[(i0 i1), i2] = x[i0, i1, i2]` with sizes 1, 8, 4.
    """
    (old,), new, dims = shapes, attributes["shape"], attributes["dims"]
    assert isinstance(new, tuple)
    assert isinstance(dims, tuple)
    _cuts("reshape_sample", old, new)
    if len(dims) != 2 or not all(0 <= dim < len(shape) for dim, shape in zip(dims, (old, new), strict=True)):
        raise UnityError(f"pcg.reshape_sample: dims is {dims}; it must be a dim of the operand, and one of the result")
    if any(prod(shape[:dim]) != 1 for dim, shape in zip(dims, (old, new), strict=True)):
        raise UnityError(f"pcg.reshape_sample: samples run along dims {dims}, before which dims must have size 1")
    two = [(*s[:dim], 2 * s[dim], *s[dim + 1 :]) for dim, s in zip(dims, (old, new), strict=True)]
    cuts = _cuts("reshape_sample", *two)
    factors = [a // b for a, b in pairwise(cuts)]
    return f"reshape_sample(x: any)  {_reshaped(cuts, *two)}" + _sizes([factors[0] // 2, *factors[1:]], *two)


RESHAPE_SAMPLE = Operator(
    _reshape_sample_line,
    signature="reshape_sample(x: any; shape: ints, dims: ints)",
    gradient=lambda of: (
        RESHAPE_SAMPLE.one(of.grad, shape=of.operands[0].shape, dims=tuple(reversed(of.ints("dims")))),
    ),
)
"""
The reshape of one sample where a step has more, one in each micro-batch: `dims` are those of operand and result along
which they run. A dim of all samples that has more than that (the tokens of a batch) cannot be divided along it, though
a single sample's could be.
"""


def _slice_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, start, step = of.int("dim"), of.int("start"), of.int("step")
    behind = of.operands[0].shape[dim] - start - step * (of.int("size") - 1) - 1
    return (PAD.one(of.grad, dim=dim, before=start, after=behind, interior=step - 1),)


SLICE = Operator(
    "slice(x: any; dim: int, start: int, size: int, step: int = 1)  out[a.., i, b..] = x[a.., step*i + start, b..]"
    "  where rank(a..) = dim, size(i) = size",
    gradient=_slice_gradient,
)


def _pad_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    dim, before, after, interior = (attributes[name] for name in ("dim", "before", "after", "interior"))
    (shape,) = shapes
    assert isinstance(dim, int)
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert isinstance(interior, int)
    if not 0 <= dim < len(shape):
        raise UnityError(f"pcg.pad: dim {dim} is out of range; its operand has dims 0..{len(shape) - 1}")
    if min(before, after, interior) < 0:
        raise UnityError(f"pcg.pad: before {before}, after {after}, interior {interior}: none may be negative")
    size = before + (shape[dim] - 1) * (interior + 1) + 1 + after
    place = f"{interior + 1}*i + {before}"
    return f"pad(x: any)  out[a.., {place}, b..] = x[a.., i, b..]  where rank(a..) = {dim}, size({place}) = {size}"


def _pad_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, (x,) = of.int("dim"), of.operands
    step = of.int("interior") + 1
    return (SLICE.one(of.grad, dim=dim, start=of.int("before"), size=x.shape[dim], step=step),)


PAD = Operator(
    _pad_line,
    signature="pad(x: any; dim: int, before: int, after: int, interior: int = 0)",
    gradient=_pad_gradient,
)
"""Zeros before and after a dim, and `interior` of them between any two elements (XLA's pad)."""

OPERATORS = (CONCAT, SPLIT, TRANSPOSE, SPLIT_HEADS, MERGE_HEADS, RESHAPE, RESHAPE_SAMPLE, SLICE, PAD)
