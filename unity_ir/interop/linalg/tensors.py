"""Insert operations on tensors as a whole: reshapes, padding, and tensors put into others."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.builtin import ArrayAttr, IndexType, IntegerAttr, TensorType, i64
from xdsl.dialects.linalg.ops import FillOp
from xdsl.ir import Block, Operation, Region, SSAValue

from unity_ir.interop.linalg.scalars import Element, constant


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


def filled(builder: Builder, number: SSAValue, held: TensorType) -> SSAValue:
    """Return a tensor of this type, all elements of which are one number."""
    empty = emit(builder, tensor.EmptyOp([], held))
    return emit(builder, FillOp([number], [empty], [held]))


def padded(builder: Builder, value: SSAValue, pads: Sequence[tuple[int, int]], shape: Sequence[int]) -> SSAValue:
    """Return a tensor with zeros around it."""
    element = element_of(value)
    zero = emit(builder, constant(0, element))
    block = Block(arg_types=[IndexType()] * len(shape))
    block.add_op(tensor.YieldOp(zero))
    low, high = ([pad[side] for pad in pads] for side in (0, 1))
    return emit(builder, tensor.PadOp(value, [], [], Region(block), low, high, TensorType(element, shape)))


def inserted(builder: Builder, value: SSAValue, into: SSAValue, offsets: Sequence[SSAValue | int]) -> SSAValue:
    """Return a tensor in which a part, from `offsets` on, is another tensor."""
    dynamic = -(2**63)
    shape = shape_of(value)
    op = tensor.InsertSliceOp.get(
        value,
        into,
        static_sizes=shape,
        static_offsets=[o if isinstance(o, int) else dynamic for o in offsets],
        static_strides=[1] * len(shape),
        offsets=[o for o in offsets if not isinstance(o, int)],
    )
    return emit(builder, op)


def concatenated(builder: Builder, values: Sequence[SSAValue], dim: int) -> SSAValue:
    """Return tensors one after the other along a dim."""
    shapes = [shape_of(value) for value in values]
    whole = [sum(s[d] for s in shapes) if d == dim else size for d, size in enumerate(shapes[0])]
    made = emit(builder, tensor.EmptyOp([], TensorType(element_of(values[0]), whole)))
    start = 0
    for value, shape in zip(values, shapes, strict=True):
        made = inserted(builder, value, made, [start if d == dim else 0 for d in range(len(shape))])
        start += shape[dim]
    return made
