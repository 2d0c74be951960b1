"""Recognise sums that add every element to the one place that an integer operand picks: an embedding's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from unity_ir.forms.addresses import address
from unity_ir.forms.rewrite import reductions
from unity_ir.tdl.gather import Pick, scatter
from unity_ir.tdl.syntax import Access, Binary, Composite, Reduce, Result, Var, index_names

MOST_PLACES = 8
"""
Most places per integer for which a scatter-add into a tensor is matched: its kernel has a program for every place,
which copies it, and the kernel without a tensor one for every integer only.
"""

FEWEST_IN_GROUPS = 32
"""
Fewest integers of a group, and elements of a place, for which many scatter-adds, one for each group, are matched: where
there are fewer integers, to look at all of them for each place costs less than to sort them, and where places have few
elements, a program for each would be too many.
"""


@dataclass(frozen=True, slots=True)
class Scatter:
    """
    A scatter-add: `out[v, e] = sum[b](where(eq(v, at[b]), body[b, e], 0)) + total[v, e]`, or many of them, `out[v, g,
    e] = sum[b](where(eq(v, at[g, b]), body[g, b, e], 0))`; `pick` has the variable `v`, `at` and the body.
    """

    pick: Pick
    positions: tuple[str, ...]
    """The summed variables `b`, in the order of the integers' dims."""
    kept: tuple[str, ...]
    """The variables of the integers' first dims that are not summed: there is a sum for each position along them."""
    total: Access | None = None
    """The read of what the sum is added to; None if it is added to nothing."""


def scattered(result: Result, extents: Mapping[str, int]) -> Scatter | None:
    """
    Match a result of a bound TDL line as a scatter-add, such as an embedding's gradient: each element is added at the
    position that an integer operand gives for it. Return its parts, or None for anything else.

    The sum must be over all dims of the integers, or over the last. To a sum over all, a tensor of the result's shape
    may be added; such a result is matched only if the dim that the integers index has at most `MOST_PLACES` positions
    for each integer. `extents` maps each index variable to its number of positions; variables with one position are
    ignored.
    """
    expr, total = result.expr, None
    match expr:
        case Binary("+", Reduce() as added, Access() as total) | Binary("+", Access() as total, Reduce() as added):
            if address(total.indices, extents) != address(result.indices, extents):
                return None
            expr = added
        case _:
            pass
    found = scatter(expr)
    if found is None or not isinstance(expr, Reduce) or reductions(found.body):
        return None
    if not all(isinstance(i, Var | Composite) for i in found.at.indices):
        return None
    read = tuple(n for i in found.at.indices for n in index_names(i) if extents[n] > 1)
    summed = {n for n in expr.names if extents[n] > 1}
    places = [n for i in result.indices for n in index_names(i)]
    kept, positions = read[: len(read) - len(summed)], read[len(read) - len(summed) :]
    if {*positions} != summed or len({*read}) < len(read) or found.variable in read or found.variable not in places:
        return None
    columns = prod(extents[n] for n in places if n not in (found.variable, *kept))
    if kept and (total is not None or min(columns, prod(extents[n] for n in positions)) < FEWEST_IN_GROUPS):
        return None
    count = prod(extents[n] for n in read)
    if total is not None and extents[found.variable] > MOST_PLACES * count:
        return None
    return Scatter(found, positions, kept, total)
