"""Recognise sums that add every element to the one place that an integer operand picks: an embedding's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.forms.rewrite import reductions
from unity_ir.tdl.gather import Pick, scatter
from unity_ir.tdl.syntax import Reduce, Result, Segments, index_names


@dataclass(frozen=True, slots=True)
class Scatter:
    """
    A scatter-add: `out[v, e] = sum[b](where(eq(v, at[b]), body[b, e], 0))`; `pick` has the variable `v`, `at` and the
    body.
    """

    pick: Pick
    positions: tuple[str, ...]
    """The summed variables `b`, in the order of the integers' dims."""


def scattered(result: Result, extents: Mapping[str, int]) -> Scatter | None:
    """
    Match a result of a bound TDL line as a scatter-add, such as an embedding's gradient: each element is added at the
    position that an integer operand gives, and the sum is over all dims of that operand. Return its parts; None for
    anything else.

    `extents` maps each index variable to its number of positions. Variables of one position are ignored.
    """
    found = scatter(result.expr)
    if found is None or not isinstance(result.expr, Reduce) or reductions(found.body):
        return None
    if any(isinstance(i, Segments) for i in found.at.indices):
        return None
    positions = tuple(n for i in found.at.indices for n in index_names(i) if extents[n] > 1)
    summed = [n for n in result.expr.names if extents[n] > 1]
    places = [n for i in result.indices for n in index_names(i)]
    if sorted(positions) != sorted(summed) or found.variable not in places:
        return None
    return Scatter(found, positions)
