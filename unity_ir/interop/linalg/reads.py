"""
Prepare an operand so that each of its dims is read at one index variable, or at a window inside of it: by
`tensor.pad`, `tensor.extract_slice` and `tensor.expand_shape`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from xdsl.builder import Builder
from xdsl.dialects import tensor
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from unity_ir.interop.linalg.tensors import element_of, emit, expanded, padded, shape_of, without_ones
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
        value = padded(builder, value, [part.pads for part in parts], shape)
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
