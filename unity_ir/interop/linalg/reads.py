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
    sizes = [part.size for part in parts]
    if sizes != shape:
        offsets, steps = [part.first for part in parts], [part.step for part in parts]
        value = emit(builder, tensor.ExtractSliceOp(value, offsets, sizes, steps, TensorType(element, sizes)))
    # Not by the slice itself, for of several dims of size 1 it would not say which are dropped.
    is_kept = [bool(part.names or part.window) for part in parts]
    value = without_ones(builder, value, is_kept)
    kept = [part for part, there in zip(parts, is_kept, strict=True) if there]
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
    held: Any = value.type
    return list(held.get_shape())


def element_of(value: SSAValue) -> Element:
    """Return the element type of a tensor."""
    made: Any = value.type
    return made.element_type


def expanded(builder: Builder, value: SSAValue, counts: Sequence[int], sizes: Sequence[int]) -> SSAValue:
    """Return a tensor with dim i split into `counts[i]` dims; `sizes` are those of all dims then."""
    if list(sizes) == shape_of(value):
        return value
    op = tensor.ExpandShapeOp(value, [], _reassociation(counts), sizes, TensorType(element_of(value), sizes))
    return emit(builder, op)


def collapsed(builder: Builder, value: SSAValue, counts: Sequence[int]) -> SSAValue:
    """
    Return a tensor with its dims joined: the first `counts[0]` to one, then the next `counts[1]`, and so on; a count of
    0 makes a dim of size 1.
    """
    joined = [count for count in counts if count]
    if any(count > 1 for count in joined):
        left = iter(shape_of(value))
        sizes = [prod(next(left) for _ in range(count)) for count in joined]
        value = _collapsed(builder, value, joined, sizes)
    if len(joined) < len(counts):
        left = iter(shape_of(value))
        sizes = [next(left) if count else 1 for count in counts]
        return expanded(builder, value, _runs([count > 0 for count in counts]), sizes)
    return value


def without_ones(builder: Builder, value: SSAValue, is_kept: Sequence[bool]) -> SSAValue:
    """Return a tensor without the dims, of size 1, that are not kept."""
    if all(is_kept):
        return value
    sizes = [size for size, there in zip(shape_of(value), is_kept, strict=True) if there]
    return _collapsed(builder, value, _runs(is_kept), sizes)


def _runs(is_kept: Sequence[bool]) -> list[int]:
    """Return how many dims go with each that is kept: those before it that are not, and with the last all after it."""
    found, waiting = list[int](), 0
    for there in is_kept:
        waiting += 1
        if there:
            found.append(waiting)
            waiting = 0
    if found:
        found[-1] += waiting
    return found


def _collapsed(builder: Builder, value: SSAValue, counts: Sequence[int], sizes: Sequence[int]) -> SSAValue:
    op = tensor.CollapseShapeOp(
        operands=[value],
        result_types=[TensorType(element_of(value), sizes)],
        properties={"reassociation": _reassociation(counts)},
    )
    return emit(builder, op)


def _reassociation(counts: Sequence[int]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    numbers = iter(range(sum(counts)))
    return ArrayAttr([ArrayAttr([IntegerAttr(next(numbers), i64) for _ in range(count)]) for count in counts])
