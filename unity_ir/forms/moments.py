"""
Recognise lines of the mean of some numbers, and of their mean distances, plain and squared, to that mean.

    mean[c] = sum[n](x[n, c] / N);  shift[c] = sum[n]((x[n, c] - mean[c]) / N);
    square[c] = sum[n]((x[n, c] - mean[c]) * (x[n, c] - mean[c]) / N)

As sums these take two passes over the numbers, since the distances are to their mean; `kernels/triton/moments.py`
takes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from unity_ir.forms.rewrite import canonical, rename
from unity_ir.tdl.syntax import Access, Binary, Bound, Const, Expr, Reduce, Var, Window, index_names

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Moments:
    """The form of a line of the mean of `x`, the mean of its distances to that, and the mean of their squares."""

    x: Access
    rows: Names
    """The variables of the results' dims, of extents above 1, outermost first."""
    columns: Names
    """The variables that are summed over, of extents above 1, outermost first."""


def moments(line: Bound) -> Moments | None:
    """
    Match a bound TDL line as a mean, the mean distance to it, and the mean squared distance, in this order, over all
    rows of one tensor. The line must be simplified (`rewrite.simplified`). Returns None for any other line.
    """
    if len(line.results) != 3 or len({r.indices for r in line.results}) > 1:
        return None
    mean, *others = line.results
    match mean.expr:
        case Reduce("sum", body=Binary("/", Access() as x, Const(count)) as part) as total:
            summed = total.names
        case _:
            return None
    if count != prod(line.extents[n] for n in summed) or any(isinstance(i, Window) for i in x.indices):
        return None
    # The sums of distances have variables of their own.
    own = {n: f"{n}:" for n in summed}
    extents = {**line.extents, **{new: line.extents[old] for old, new in own.items()}}
    off = Binary("-", rename(x, own), mean.expr)
    wanted: list[Expr] = [Binary("/", of, part.right) for of in (off, Binary("*", off, off))]
    names = tuple(Var(n) for n in own.values())
    for result, body in zip(others, wanted, strict=True):
        if canonical(result.expr, extents, {}) != canonical(Reduce("sum", names, body), extents, {}):
            return None
    rows = tuple(n for i in mean.indices for n in index_names(i) if line.extents[n] > 1)
    return Moments(x, rows, tuple(n for n in summed if line.extents[n] > 1))
