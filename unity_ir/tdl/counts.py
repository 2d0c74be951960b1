"""Floating point operations of a bound line."""

from __future__ import annotations

from math import prod

from unity_ir.tdl.functions import FUNCTIONS
from unity_ir.tdl.gather import gather, scatter
from unity_ir.tdl.opaque import OPAQUE
from unity_ir.tdl.syntax import Access, Binary, Bound, Call, Cases, Expr, Name, Opaque, Reduce, children, index_names


def flops(bound: Bound) -> int:
    """
    Floating point operations to compute all results once.

    Every distinct subexpression is evaluated once per value of the variables it depends on, as a kernel would.
    Given `out[m, n] = sum[k](x[m, k] * w[k, n])` returns `2 * m * n * k`.
    """
    seen: set[Expr] = set()
    total = 0

    def visit(expr: Expr) -> None:
        nonlocal total
        if expr in seen:
            return
        seen.add(expr)
        if (picked := gather(expr) or scatter(expr)) is not None:
            visit(picked.body)
            if scatter(expr) is not None:
                total += prod(bound.extents[n] for n in free_variables(picked.body))
            return
        for child in children(expr):
            visit(child)
        each = _operations(expr)
        if each:
            over = free_variables(expr.body if isinstance(expr, Reduce | Opaque) else expr)
            total += each * prod(bound.extents[n] for n in over)

    for result in bound.results:
        visit(result.expr)
    return total


def _operations(expr: Expr) -> int:
    match expr:
        case Binary() | Reduce():
            return 1
        case Call(function, _):
            return FUNCTIONS[function].flops
        case Opaque(function, _, _, _):
            return OPAQUE[function].flops
        case _:
            return 0


def free_variables(expr: Expr) -> frozenset[str]:
    """The index variables an expression's value depends on."""
    match expr:
        case Access(_, indices):
            return frozenset(n for i in indices for n in index_names(i))
        case Name(name):
            return frozenset({name})
        case Reduce(_, _, body):
            return free_variables(body) - set(expr.names)
        case Opaque(_, _, _, body):
            return (free_variables(body) - set(expr.names)) | set(expr.made)
        case Cases(branches):
            return frozenset[str]().union(*(free_variables(e) | {v} for v, e in branches))
        case _:
            return frozenset[str]().union(*map(free_variables, children(expr)))
