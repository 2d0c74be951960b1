"""Floating point operations of a bound line."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from unity_ir.tdl.functions import FUNCTIONS
from unity_ir.tdl.gather import gather, scatter
from unity_ir.tdl.syntax import Access, Binary, Bound, Call, Cases, Expr, Name, Reduce, children, index_names


def flops(bound: Bound) -> int:
    """
    Floating point operations to compute all results once.

    Every distinct subexpression is evaluated once per value of the variables it depends on, as a kernel would.
    Given `out[m, n] = sum[k](x[m, k] * w[k, n])` returns `2 * m * n * k`.
    """
    return sum(grid for grid, _ in flop_terms(bound))


def flop_terms(bound: Bound) -> list[tuple[int, tuple[str, ...]]]:
    """
    The same, one term per subexpression: its operations and the variables it ranges over, so that a configuration's
    share is the term divided by the degrees of those variables.
    """
    seen: set[Expr] = set()
    terms: list[tuple[int, tuple[str, ...]]] = []

    def visit(expr: Expr) -> None:
        if expr in seen:
            return
        seen.add(expr)
        if (picked := gather(expr) or scatter(expr)) is not None:
            visit(picked.body)
            if scatter(expr) is not None:
                names = tuple(sorted(free_variables(picked.body)))
                terms.append((prod(bound.extents[n] for n in names), names))
            return
        for child in children(expr):
            visit(child)
        each = _operations(expr)
        if each:
            over = free_variables(expr.body if isinstance(expr, Reduce) else expr)
            names = tuple(sorted(over))
            terms.append((each * prod(bound.extents[n] for n in names), names))

    for result in bound.results:
        visit(result.expr)
    return terms


def _operations(expr: Expr) -> int:
    match expr:
        case Binary() | Reduce():
            return 1
        case Call(function, _):
            return FUNCTIONS[function].flops
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
        case Cases(branches):
            return frozenset[str]().union(*(free_variables(e) | {v} for v, e in branches))
        case _:
            return frozenset[str]().union(*map(free_variables, children(expr)))


def share(term: tuple[int, tuple[str, ...]], degrees: Mapping[str, int]) -> float:
    """One task's part of a flop term under the given degrees."""
    count, names = term
    return count / prod(degrees.get(n, 1) for n in names)
