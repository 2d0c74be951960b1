"""Recognise results whose dims are windows, and solve each window for the one variable that steps through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.forms.rewrite import outermost
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Bound, Result, Segments, Window, index_names


@dataclass(frozen=True, slots=True)
class WindowWrite:
    """One dim written through a window: `stride * variable + sum(factor * tap) + offset`."""

    variable: str | None
    """Variable to solve for; None where the dim has no steps."""
    stride: int
    taps: tuple[tuple[int, str], ...]
    """Factor and variable of each term that is looped over."""
    offset: int
    size: int
    """Elements of the dim."""


@dataclass(frozen=True, slots=True)
class WindowWrites:
    """`out[2*y + i - 1] = f(y, i)`, which every element can gather by a loop over the taps `i`."""

    dims: Mapping[int, WindowWrite]


def writes_windows(result: Result) -> bool:
    """Return whether some dim of a result is a window."""
    return any(isinstance(i, Window) for i in result.indices)


def window_writes(result: Result, extents: Mapping[str, int]) -> WindowWrites | None:
    """
    Solve every window of a result; return None where elements cannot gather.

    That is so of integers, where a variable is in two dims, and where a reduction is done anew for every tap.
    """
    reduced = frozenset[str]().union(*(free_variables(r) for r in outermost(result.expr)))
    counts = Counter(n for i in result.indices for n in index_names(i) if extents[n] > 1)
    if (
        not result.floating
        or any(isinstance(i, Segments) for i in result.indices)
        or any(c > 1 for c in counts.values())
    ):
        return None
    found: dict[int, WindowWrite] = {}
    for dim, index in enumerate(result.indices):
        if isinstance(index, Window):
            terms = [t for t in index.terms if extents[t[1]] > 1]
            # Taps are looped over, so they are to be few.
            stride, variable = max(terms, key=lambda t: (t[1] in reduced, extents[t[1]]), default=(1, None))
            taps = tuple(t for t in terms if t[1] != variable)
            found[dim] = WindowWrite(variable, stride, taps, index.offset + index.low, index.size)
    taps = {name for write in found.values() for _, name in write.taps}
    return None if reduced & taps else WindowWrites(found)


def is_covered(bound: Bound) -> bool:
    """Return whether elements can gather every result of a line that has windows."""
    return all(not writes_windows(r) or window_writes(r, bound.extents) is not None for r in bound.results)
