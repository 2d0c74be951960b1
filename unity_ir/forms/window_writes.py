"""
Recognise results that are written through windows, `out[2*y + i] = ..`, as the gradients of convolutions and poolings
are, and choose the variable of each window to solve for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.forms.rewrite import outermost_reductions
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Bound, Result, Segments, Window, index_names


@dataclass(frozen=True, slots=True)
class WindowWrite:
    """One dim written through a window: at position `stride * variable + sum(factor * tap) + offset`."""

    variable: str | None
    """The variable to solve for; None if all variables of the window have extent 1."""
    stride: int
    """The factor of `variable`; 1 if that is None."""
    taps: tuple[tuple[int, str], ...]
    """Factor and variable of each other term; kernels loop over these."""
    offset: int
    """Position in the local tensor (a task's shard) at which all variables are 0."""
    size: int
    """Size of the dim."""


@dataclass(frozen=True, slots=True)
class WindowWrites:
    """
    A result written through windows, such as `out[2*y + i - 1] = f(y, i)`: an element can be gathered by a loop over
    the taps `i`, solving for `y`.
    """

    dims: Mapping[int, WindowWrite]
    """By number of the dim, how each dim that is indexed by a window is written."""


def writes_windows(result: Result) -> bool:
    """Return whether some dim of a result is written through a window, such as `out[2*y + i] = ..`."""
    return any(isinstance(i, Window) for i in result.indices)


def window_writes(result: Result, extents: Mapping[str, int]) -> WindowWrites | None:
    """
    Match a result written through windows, such as `out[2*y + i] = f(y, i)`, and choose for each window the variable to
    solve for (`y`), so that a kernel can gather every element by a loop over the others (`i`). Return the choice for
    each such dim, by the dim's number; it is empty if there are no windows.

    Returns None where that is not possible: results that are not floating point, a variable in two dims, concatenated
    dims, and reductions that would be computed anew in every pass of the loop. `extents` maps each index variable to
    its number of positions.
    """
    reduced = frozenset[str]().union(*(free_variables(r) for r in outermost_reductions(result.expr)))
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
            # Kernels loop over taps, so the longest variable is the one to solve for.
            stride, variable = max(terms, key=lambda t: (t[1] in reduced, extents[t[1]]), default=(1, None))
            taps = tuple(t for t in terms if t[1] != variable)
            found[dim] = WindowWrite(variable, stride, taps, index.offset + index.low, index.size)
    taps = {name for write in found.values() for _, name in write.taps}
    return None if reduced & taps else WindowWrites(found)


def is_covered(bound: Bound) -> bool:
    """
    Return whether a kernel can gather the elements of every result that a bound TDL line writes through windows
    (`window_writes`); True if there are none.
    """
    return all(not writes_windows(r) or window_writes(r, bound.extents) is not None for r in bound.results)
