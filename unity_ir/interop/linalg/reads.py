"""
Prepare an operand so that each of its dims is read at one index variable, or at a window inside of it: by
`tensor.pad`, `tensor.extract_slice` and `tensor.expand_shape`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.builtin import ArrayAttr, IndexType, IntegerAttr, TensorType, i64
from xdsl.ir import Block, Operation, Region, SSAValue

from unity_ir.interop.linalg.scalars import Element, constant
from unity_ir.tdl.syntax import Composite, Segments, Slice, Var, Window, WrittenIndex, index_names


@dataclass(frozen=True)
class PreparedRead:
    """A tensor, and for each of its dims the index variable or the window, inside of the dim, at which it is read."""

    tensor: SSAValue
    dims: tuple[Var | Window, ...]


@dataclass(frozen=True)
class _Part:
    """The part of a dim that is read: `size` elements from `first`, every `step`-th, by variables, outermost first."""

    first: int
    size: int
    step: int
    names: tuple[str, ...]
    window: Window | None = None
    pads: tuple[int, int] = (0, 0)


def prepared(
    builder: Builder,
    value: SSAValue,
    indices: Sequence[WrittenIndex],
    extents: Mapping[str, int],
    bound: Collection[str],
) -> PreparedRead:
    """
    Prepare a tensor that is read at bound indices, one for each of its dims. Dims that are read at one position, as
    those that broadcast, are dropped. Elements that windows read outside of the tensor are 0.

    `extents` has the number of positions of each index variable, `bound` the variables that results or reductions run
    over: any other is of a dim of size 1.
    """
    shape, element = shape_of(value), element_of(value)
    parts = [_part(i, size, extents, bound) for i, size in zip(indices, shape, strict=True)]
    if any(any(part.pads) for part in parts):
        shape = [size + sum(part.pads) for size, part in zip(shape, parts, strict=True)]
        value = _padded(builder, value, [part.pads for part in parts], shape)
    kept = [part for part in parts if part.names or part.window]
    sizes = [part.size for part in kept]
    if len(kept) < len(parts) or sizes != shape:
        steps = [[getattr(part, name) for part in parts] for name in ("first", "size", "step")]
        offsets, counts, strides = steps
        slice_op = tensor.ExtractSliceOp(value, offsets, counts, strides, TensorType(element, sizes))
        value = emit(builder, slice_op)
    split = [1 if part.window else len(part.names) for part in kept]
    value = expanded(builder, value, split, [s for p in kept for s in ([p.size] if p.window else _sizes(p, extents))])
    dims = [index for part in kept for index in ([part.window] if part.window else map(Var, part.names))]
    return PreparedRead(value, tuple(dims))


def _sizes(part: _Part, extents: Mapping[str, int]) -> list[int]:
    return [extents[name] for name in part.names]


def _part(index: WrittenIndex, size: int, extents: Mapping[str, int], bound: Collection[str]) -> _Part:
    names = tuple(name for name in index_names(index) if name in bound)
    match index:
        case Var() | Composite():
            return _Part(0, size, 1, names)
        case Segments(parts, int(active)):
            return _Part(sum(extents[n] for n in parts[:active]), extents[parts[active]], 1, (parts[active],))
        case Slice(within, start):
            return _Part(start, prod(extents[n] for n in index_names(within)), 1, names)
        case Window():
            terms = tuple((factor, name) for factor, name in index.terms if name in bound)
            start, last = index.offset + index.low, index.offset + index.low + index.span(extents)
            pads = max(0, -start), max(0, last - size + 1)
            first, held = start + pads[0], size + sum(pads)
            if len(terms) > 1:
                return _Part(0, held, 1, names, Window(terms, first, held, held), pads)
            factor = terms[0][0] if terms else 1
            return _Part(first, prod(extents[n] for n in names), factor, names, pads=pads)
        case _:
            raise TypeError(f"{index} is not bound")


def _padded(builder: Builder, value: SSAValue, pads: Sequence[tuple[int, int]], shape: Sequence[int]) -> SSAValue:
    """Return a tensor with zeros around it."""
    element = element_of(value)
    zero = emit(builder, constant(0, element))
    block = Block(arg_types=[IndexType()] * len(shape))
    block.add_op(tensor.YieldOp(zero))
    low, high = ([pad[side] for pad in pads] for side in (0, 1))
    return emit(builder, tensor.PadOp(value, [], [], Region(block), low, high, TensorType(element, shape)))


def emit(builder: Builder, op: Operation) -> SSAValue:
    """Insert an operation of one result; return that."""
    return builder.insert(op).results[0]


def shape_of(value: SSAValue) -> list[int]:
    """Return the sizes of the dims of a tensor."""
    assert isinstance(value.type, TensorType)
    return list(value.type.get_shape())


def element_of(value: SSAValue) -> Element:
    """Return the element type of a tensor."""
    made: Any = value.type
    return made.element_type


def expanded(builder: Builder, value: SSAValue, counts: Sequence[int], sizes: Sequence[int]) -> SSAValue:
    """Return a tensor with dim i split into `counts[i]` dims; `sizes` are those of all dims then."""
    if all(count == 1 for count in counts):
        return value
    op = tensor.ExpandShapeOp(value, [], _reassociation(counts), sizes, TensorType(element_of(value), sizes))
    return emit(builder, op)


def collapsed(builder: Builder, value: SSAValue, counts: Sequence[int]) -> SSAValue:
    """Return a tensor with its dims joined: the first `counts[0]` to one, then the next `counts[1]`, and so on."""
    if all(count == 1 for count in counts):
        return value
    left = iter(shape_of(value))
    sizes = [prod(next(left) for _ in range(count)) for count in counts]
    if 0 in counts:
        # A dim of no variables has size 1. It is split off another, or there is no other.
        value = collapsed(builder, value, [count for count in counts if count])
        own = [size for size, count in zip(sizes, counts, strict=True) if count]
        return _with_ones(builder, value, own, counts, sizes)
    op = tensor.CollapseShapeOp(
        operands=[value],
        result_types=[TensorType(element_of(value), sizes)],
        properties={"reassociation": _reassociation(counts)},
    )
    return emit(builder, op)


def _with_ones(
    builder: Builder, value: SSAValue, own: Sequence[int], counts: Sequence[int], sizes: Sequence[int]
) -> SSAValue:
    """Return a tensor with a dim of size 1 wherever `counts` is 0."""
    splits: list[int] = []
    ones = 0
    for count in counts:
        if count:
            splits.append(1 + ones)
            ones = 0
        else:
            ones += 1
    if splits:
        splits[-1] += ones
    op = tensor.ExpandShapeOp(value, [], _reassociation(splits), sizes, TensorType(element_of(value), sizes))
    assert sum(splits) == len(sizes) or not own
    return emit(builder, op)


def _reassociation(counts: Sequence[int]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    numbers = iter(range(sum(counts)))
    return ArrayAttr([ArrayAttr([IntegerAttr(next(numbers), i64) for _ in range(count)]) for count in counts])
