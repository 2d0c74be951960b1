"""
Compute the strides of the tensor reads in a bound line (an operator's definition in the tensor description language
TDL, such as `out[m, n] = sum[k](x[m, k] * w[k, n])`, at given shapes), and split a flat position into its index
variables.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.tdl.syntax import (
    Access,
    Bound,
    Composite,
    Expr,
    PaddedVar,
    Reduce,
    Segments,
    Slice,
    Var,
    Window,
    WrittenIndex,
    accesses,
    children,
    index_extent,
)

RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "triton", "tl", "torch", "dist"})


class Names:
    """Makes unique Python identifiers for one scope; never a reserved word or one of `taken`."""

    def __init__(self, taken: Iterable[str] = ()):
        self._taken = {*RESERVED, *taken}

    def new(self, wish: str) -> str:
        """
        Return a Python identifier based on `wish` that this scope does not have yet, and reserve it.

        Given `x` three times returns `x`, `x_2`, `x_3`. Characters that identifiers cannot have become underscores.
        """
        base = re.sub(r"[^A-Za-z0-9_]", "_", wish)
        base = base if re.match(r"[A-Za-z_]", base) else f"_{base}"
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


@dataclass(frozen=True, slots=True)
class Address:
    """
    The flat index, in elements, of an access to a contiguous tensor: `offset + sum(stride * variable)`. Variables of
    extent 1 have no stride.
    """

    strides: Mapping[str, int]
    offset: int = 0


def address(indices: Sequence[WrittenIndex], extents: Mapping[str, int]) -> Address:
    """
    Return the address of the element at `indices` (one per dim) of a row-major tensor, contiguous unless its rows are
    padded: a stride in elements by index variable (none for variables with one position), and a constant offset.

    `extents` maps each index variable to its number of positions. Given `[b, (h d)]` with h=2, d=8 returns strides
    b=16, h=8, d=1. Raises `TypeError` for indices that are not bound yet (packs).
    """
    strides: dict[str, int] = {}
    offset, stride = 0, 1

    def add(name: str, by: int) -> None:
        if extents[name] > 1:
            strides[name] = strides.get(name, 0) + by

    for index in reversed(indices):
        match index:
            case Var(name):
                add(name, stride)
            case Composite(names):
                inner = stride
                for name in reversed(names):
                    add(name, inner)
                    inner *= extents[name]
            case Segments(names, active):
                assert active is not None, "a segment is read through one of its variables"
                offset += stride * sum(extents[n] for n in names[:active])
                add(names[active], stride)
            case Slice(part, start, _):
                inner = address((part,), extents)
                offset += stride * start
                for name, by in inner.strides.items():
                    add(name, by * stride)
            case Window(terms, position, _, _, low):
                offset += stride * (position + low)
                for factor, name in terms:
                    add(name, factor * stride)
            case _:
                raise TypeError(f"{index} is not bound")
        stride *= index.row if isinstance(index, PaddedVar) else index_extent(index, extents)
    return Address(strides, offset)


@dataclass(frozen=True, slots=True)
class Run:
    """
    Neighbouring variables of a list over all of which an address steps with one stride, so that they can be flattened
    into one.
    """

    names: tuple[str, ...]
    stride: int
    """Elements of the tensor per step."""
    size: int
    """Number of steps: the product of the variables' extents."""
    inner: int
    """Positions of the flat index per step: the product of the extents after the run."""
    outermost: bool
    """Whether only extents of 1 come before the run."""


def runs(variables: Sequence[str], extents: Mapping[str, int], where: Address) -> list[Run]:
    """
    Group index variables into runs: neighbours in `variables` over which the address `where` steps with one stride, so
    that a kernel can treat them as one dim. Return the fewest such runs, outermost first.

    `variables` are those of one flat position, outermost first; `extents` maps each to its number of positions.
    Variables with one position, or without a stride in `where`, are left out. Given variables a, b, c of 2, 3, 4
    positions and strides b=4, c=1, returns one run (b, c) of size 12 and stride 1.
    """
    found: list[Run] = []
    inner = 1
    adjacent = False
    for name in reversed(variables):
        size = extents[name]
        if size == 1:
            continue
        stride = where.strides.get(name, 0)
        last = found[-1] if found else None
        if stride and adjacent and last is not None and stride == last.stride * last.size:
            found[-1] = Run((name, *last.names), last.stride, last.size * size, last.inner, False)
        elif stride:
            found.append(Run((name,), stride, size, inner, False))
        adjacent = stride != 0
        inner *= size
    if found and found[-1].inner * found[-1].size == inner:
        last = found[-1]
        found[-1] = Run(last.names, last.stride, last.size, last.inner, True)
    return found[::-1]


def operand_shapes(bound: Bound) -> dict[str, tuple[int, ...]]:
    """
    Return the shape of every operand that a bound TDL line reads, by the operand's name. For the line that one device's
    task computes (`tdl.parallel.line_of_task`), these are the shapes of that task's shards.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for access in _bound_accesses(bound):
        shapes.setdefault(access.tensor, tuple(index_extent(i, bound.extents) for i in access.indices))
    return shapes


def _stored(indices: Sequence[WrittenIndex], extents: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape in memory of a tensor at `indices`: padded rows are as long as they are stored."""
    return tuple(i.row if isinstance(i, PaddedVar) else index_extent(i, extents) for i in indices)


def _bound_accesses(bound: Bound) -> tuple[Access, ...]:
    """Return every read of a tensor in the expressions of a bound TDL line's results, in reading order."""
    return tuple(a for r in bound.results for a in accesses(r.expr))


def needs_int64(bound: Bound) -> bool:
    """
    Return whether the kernel of a bound TDL line needs 64-bit indices: whether an operand, a result or the range of a
    reduction has more than about 2^31 elements.
    """
    shapes = [_stored(a.indices, bound.extents) for a in (*_bound_accesses(bound), *bound.results)]
    shapes += [tuple(bound.extents[n] for n in r.names) for result in bound.results for r in _reductions(result.expr)]
    # Positions are computed beyond the last element: by a tile in the last block, by `tiling.AT_WORK` in the last part
    # of a split row.
    return any(prod(s) > 2**31 - 2**20 for s in shapes)


def _reductions(expr: Expr) -> list[Reduce]:
    own = [expr] if isinstance(expr, Reduce) else []
    return own + [r for child in children(expr) for r in _reductions(child)]


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below `n`; 1 for `n` of 0."""
    return 1 << max(n - 1, 0).bit_length()


def flat_address(names: Sequence[str], extents: Mapping[str, int]) -> Address:
    """
    Return the address of an element of a contiguous row-major tensor whose dims are the index variables `names`,
    outermost first: a stride in elements for each variable with more than one position.

    `extents` maps each index variable to its number of positions. Given a, b of 2, 3 positions, returns strides a=3,
    b=1.
    """
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed(names):
        if extents[name] > 1:
            strides[name] = stride
        stride *= extents[name]
    return Address(strides)
