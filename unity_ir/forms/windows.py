"""
Find windows (affine indices such as `2*y + i - 1`, as of convolutions) that leave their tensor, and mask the reductions
that must skip the positions outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import inf

from unity_ir.forms.rewrite import map_children
from unity_ir.tdl.divisibility import uses_as_value
from unity_ir.tdl.syntax import Access, Binary, Bound, Call, Const, Expr, Name, Reduce, Window, accesses, index_names

NEUTRAL: Mapping[str, float] = {"sum": 0.0, "max": -inf, "min": inf, "prod": 1.0}
"""Value of a reduction over no elements."""


def local_range(window: Window, extents: Mapping[str, int]) -> tuple[int, int]:
    """
    Return (first, last): the least and the greatest position in the local tensor (a task's shard) that a window reads
    as its variables run over their positions. Below 0 or beyond the end of the tensor, they are outside of it.

    `extents` maps each index variable to its number of positions.
    """
    first = window.offset + window.low
    return first, first + window.span(extents)


def exceeds_tensor(window: Window, extents: Mapping[str, int]) -> bool:
    """
    Return whether a window reads or writes outside of the whole tensor, in this task or in any other.

    `extents` maps each index variable to its number of positions in this task.
    """
    last = window.offset + window.span(extents)
    if window.terms:
        # The steps of a divided window fill the dim (`tdl.regions`), which tells where the last piece starts.
        factor, variable = window.terms[0]
        step = factor * extents[variable]
        last += step * (max(1, window.whole // step) - 1)
    return window.offset < 0 or last >= window.whole


def _windows_to_mask(expr: Reduce, extents: Mapping[str, int]) -> list[Window]:
    """
    Return the windows of the reduction `expr` that must be masked: outside of the tensor they read zeros, which would
    change its value (of a maximum, say; in a sum of products they do not).

    `extents` maps each index variable to its number of positions.
    """
    found: dict[Window, None] = {}
    for index in (i for a in accesses(expr.body) for i in a.indices):
        if (
            isinstance(index, Window)
            and not set(index_names(index)).isdisjoint(expr.names)
            and exceeds_tensor(index, extents)
        ):
            found.setdefault(index)
    return [w for w in found if expr.reducer != "sum" or not _vanishes(expr.body, w)]


def masked(expr: Expr, extents: Mapping[str, int]) -> Expr:
    """
    Return the expression in which reductions skip the positions outside of a tensor, which a window would read as
    zeros, wherever these zeros would change the result: their bodies become `where(inside, body, neutral element)`.

    `extents` maps each index variable to its number of positions.
    """
    expr = map_children(expr, lambda child: masked(child, extents))
    return masked_body(expr, extents) if isinstance(expr, Reduce) else expr


def masked_body(expr: Reduce, extents: Mapping[str, int]) -> Reduce:
    """
    Return the reduction `expr` made to skip positions outside of a tensor, which a window reads as zeros, if these
    would change its value: its body becomes `where(inside, body, neutral element)`. Reductions inside of it stay as
    they are.

    `extents` maps each index variable to its number of positions.
    """
    windows = _windows_to_mask(expr, extents)
    if not windows:
        return expr
    there = reduce(lambda a, b: Call("and", (a, b)), map(inside, windows))
    return Reduce(expr.reducer, expr.indices, Call("where", (there, expr.body, Const(NEUTRAL[expr.reducer]))))


def inside(window: Window) -> Expr:
    """
    Return the boolean expression that is true where a window's position is inside of the whole tensor; index variables
    in it stand for global indices, also in a task that computes only a part.
    """
    position: Expr = Const(float(window.offset))
    for factor, name in window.terms:
        term = Name(name) if factor == 1 else Binary("*", Const(float(factor)), Name(name))
        position = Binary("+", term, position) if window.offset or position != Const(0.0) else term
    return Call("and", (Call("ge", (position, Const(0.0))), Call("lt", (position, Const(float(window.whole))))))


def needs_start(bound: Bound, variable: str) -> bool:
    """
    Return whether the kernel of a task that computes only a part of the index variable `variable` must be given the
    global index at which the part begins: because the line uses the variable as a value (as a causal mask does), or to
    mask a window.
    """
    if uses_as_value(bound, variable):
        return True
    return bound.has_windows and any(_mentions(masked(r.expr, bound.extents), variable) for r in bound.results)


def _mentions(expr: Expr, variable: str) -> bool:
    found = False

    def visit(part: Expr) -> Expr:
        nonlocal found
        found = found or part == Name(variable)
        return map_children(part, visit)

    visit(expr)
    return found


def _vanishes(expr: Expr, window: Window) -> bool:
    """Return whether an expression is 0 at positions where the elements read through a window are."""
    match expr:
        case Const(value):
            return value == 0
        case Access(_, indices):
            return window in indices
        case Binary("*", left, right):
            return _vanishes(left, window) or _vanishes(right, window)
        case Binary("/", left, _):
            return _vanishes(left, window)
        case Binary("+" | "-", left, right):
            return _vanishes(left, window) and _vanishes(right, window)
        case Call("where", (_, yes, no)):
            return _vanishes(yes, window) and _vanishes(no, window)
        case Reduce("sum", _, body):
            return _vanishes(body, window)
        case _:
            return False
