"""
Floating point operations of a bound line: an operator's definition in the tensor description language (TDL) at given
shapes, which give each index variable its extent (number of positions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import TypeAlias

from unity_ir.tdl.element_types import HALVES
from unity_ir.tdl.functions import FUNCTIONS, ROUNDED
from unity_ir.tdl.gather import gather, scatter
from unity_ir.tdl.inline import renamed
from unity_ir.tdl.opaque import OPAQUE
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    CachedExpr,
    Call,
    Cases,
    Expr,
    Name,
    Opaque,
    Reduce,
    Var,
    accesses,
    children,
    index_names,
)


@dataclass(frozen=True, slots=True)
class FlopsTerm:
    """
    The floating point operations (FLOPs) of one subexpression: `each` for every combination of values of the index
    variables `over`. Subexpressions that are equal up to names of variables have equal `form`.
    """

    form: Expr
    """The subexpression with the variables it depends on named by place."""
    names: tuple[str, ...]
    """These variables, in order of place."""
    each: int
    over: tuple[str, ...]
    picked: tuple[str, ...] = ()
    """Gathered variables (indexed by integers): the operations are split evenly over their shards."""


def terms(bound: Bound) -> tuple[FlopsTerm, ...]:
    """
    Return the floating point operations (FLOPs) of a bound TDL line as symbolic terms, in reading order. Each
    subexpression of the results that takes FLOPs has one term, also if it occurs twice: the FLOPs of one evaluation,
    and the index variables over which it is evaluated.

    `flops` multiplies each by the extents of its variables and adds them up, counting once those that differ only in
    the names of variables. The terms are the same for all extents, unless the line has windows.
    """
    return _terms(tuple(r.expr for r in bound.results))


@lru_cache(maxsize=4096)
def _terms(results: tuple[Expr, ...]) -> tuple[FlopsTerm, ...]:
    seen: set[tuple[Expr, tuple[str, ...]]] = set()
    found: list[FlopsTerm] = []

    def visit(expr: Expr, picks: Picks) -> None:
        free = free_variables(expr)
        names = tuple(n for n in dict.fromkeys(_names(expr)) if n in free)
        form = renamed(expr, {Var(n): Var(f"{place}:") for place, n in enumerate(names)})
        if (form, names) in seen:
            return
        seen.add((form, names))
        if (picked := gather(expr) or scatter(expr)) is not None:
            inner = {**picks, picked.variable: (gather(expr) is not None, free_variables(picked.at))}
            visit(picked.body, inner)
            if scatter(expr) is not None:
                found.append(_term(form, names, 1, free_variables(picked.body), inner))
            return
        for child in children(expr):
            visit(child, picks)
        each = _operations(expr)
        if each:
            over = free_variables(expr.body if isinstance(expr, Reduce | Opaque) else expr)
            found.append(_term(form, names, each, over, picks))

    for expr in results:
        visit(expr, {})
    return tuple(found)


Picks: TypeAlias = Mapping[str, tuple[bool, frozenset[str]]]
"""
Variables that integers pick around an expression: whether it is evaluated at those places alone, and the variables of
the integers.
"""


def _term(form: Expr, names: tuple[str, ...], each: int, over: frozenset[str], picks: Picks) -> FlopsTerm:
    picked = tuple(v for v, (_, at) in picks.items() if v in over or at & over)
    return FlopsTerm(form, names, each, tuple(sorted(_places(over, picks))), picked)


def _places(over: frozenset[str], picks: Picks) -> frozenset[str]:
    """Return the variables with each gathered variable replaced by the variables of the integers that pick it."""
    for variable, (alone, at) in picks.items():
        if alone and variable in over:
            over = over - {variable} | at
    return over


def flops(bound: Bound, whole: Mapping[str, int] | None = None) -> int:
    """
    Return the floating point operations (FLOPs) to compute all results of a bound TDL line once.

    Every distinct subexpression is evaluated once per value of the variables it depends on, as a kernel would; one that
    is gathered (read at the position that an integer operand names) is evaluated once per integer. If the line is one
    task's part of a larger one, `whole` has the extents of the larger one, and the integers are taken to be spread
    evenly over the positions.

    Given `out[m, n] = sum[k](x[m, k] * w[k, n])` returns `2 * m * n * k`; given `out[t, n] = sum[v](where(eq(v, e[t]),
    sum[k](x[t, k] * w[v, k, n]), 0))` returns `2 * t * n * k`, and half of it for a task with half of v.
    """
    whole = whole or bound.extents
    distinct = {(t.form, tuple(bound.extents[n] for n in t.names)): t for t in reversed(terms(bound))}
    return sum(
        t.each * prod(bound.extents[n] for n in t.over) // prod(whole[n] // bound.extents[n] for n in t.picked)
        for t in distinct.values()
    )


def argument_in_float8(expr: Expr) -> Expr | None:
    """Return the number that an expression is, if a product reads it in 8 bits where it has 16; None for others."""
    return expr.args[0] if isinstance(expr, Call) and expr.function == ROUNDED else None


def rounds(bound: Bound, dtypes: Sequence[str]) -> bool:
    """Return whether a line has a product that reads its operands, of these element types, in 8 bits."""
    return {*dtypes} <= {*HALVES} and _rounds(tuple(r.expr for r in bound.results))


@lru_cache(maxsize=4096)
def _rounds(exprs: tuple[Expr, ...]) -> bool:
    return any(argument_in_float8(expr) is not None or _rounds(tuple(children(expr))) for expr in exprs)


def contraction_flops(bound: Bound) -> int:
    """
    Return the floating point operations (FLOPs) of the contractions of a bound line, as the FLOPs of models are quoted.

    Contractions are matrix products, convolutions and attention: sums of products in which two factors each have an
    index that the other lacks and that is not summed over. A multiply-accumulate is 2; a product with a gathered weight
    counts once per integer that gathers.

    Given `out[m, n] = relu(sum[k](x[m, k] * w[k, n]))` returns `2 * m * n * k`; given `out[m] = sum[k](x[m, k] * w[k])`
    returns 0.
    """
    return _contraction_flops(tuple(r.expr for r in bound.results), tuple(bound.extents.items()))


def has_contractions(bound: Bound) -> bool:
    """Return whether a bound line has contractions, as `contraction_flops` defines them."""
    # That is so at any sizes: asked at size 1, lines of one form are looked at once.
    return _contraction_flops(tuple(r.expr for r in bound.results), tuple((name, 1) for name in bound.extents)) > 0


@lru_cache(maxsize=4096)
def _contraction_flops(results: tuple[Expr, ...], items: tuple[tuple[str, int], ...]) -> int:
    extents = dict(items)
    seen: set[Expr] = set()
    total = 0

    def visit(expr: Expr, picks: Picks) -> None:
        nonlocal total
        if (key := _anonymous(expr, extents)) in seen:
            return
        seen.add(key)
        if (picked := gather(expr)) is not None:
            visit(picked.body, {**picks, picked.variable: (True, free_variables(picked.at))})
            return
        if isinstance(expr, Reduce) and expr.reducer == "sum":
            added = expr.body if (to := scatter(expr)) is None else to.body
            factors = [free_variables(f) - set(expr.names) for f in _factors(added) if accesses(f)]
            if any(a - b and b - a for a, b in combinations(factors, 2)):
                total += 2 * prod(extents[n] for n in _places(free_variables(added), picks))
        for child in children(expr):
            visit(child, picks)

    for expr in results:
        visit(expr, {})
    return total


def _anonymous(expr: Expr, extents: Mapping[str, int]) -> Expr:
    """
    Return the expression with the variables it depends on named by place and extent.

    A definition used over two indices is then one expression: attention's scores at the position read and at the
    positions summed over.
    """
    free = free_variables(expr)
    order = (n for n in dict.fromkeys(_names(expr)) if n in free)
    return renamed(expr, {Var(n): Var(f"{place}:{extents[n]}") for place, n in enumerate(order)})


def _names(expr: Expr) -> Iterator[str]:
    """Yield the variables in reading order, with repetitions."""
    match expr:
        case Access(_, indices):
            yield from (n for i in indices for n in index_names(i))
        case Name(name):
            yield name
        case _:
            for child in children(expr):
                yield from _names(child)


def _factors(expr: Expr) -> list[Expr]:
    if isinstance(expr, Binary) and expr.op == "*":
        return [*_factors(expr.left), *_factors(expr.right)]
    return [expr]


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
    """
    Return the names of the index variables that an expression's value depends on: those not bound by a reduction inside
    of it.
    """
    if not isinstance(expr, CachedExpr):
        return frozenset({expr.name}) if isinstance(expr, Name) else frozenset()
    try:
        return expr.free
    except AttributeError:
        found = _free_variables(expr)
        object.__setattr__(expr, "free", found)
        return found


def _free_variables(expr: Expr) -> frozenset[str]:
    match expr:
        case Access(_, indices):
            return frozenset(n for i in indices for n in index_names(i))
        case Reduce(_, _, body):
            return free_variables(body) - set(expr.names)
        case Opaque(_, _, _, body):
            return (free_variables(body) - set(expr.names)) | set(expr.made)
        case Cases(branches):
            return frozenset[str]().union(*(free_variables(e) | {v} for v, e in branches))
        case _:
            return frozenset[str]().union(*map(free_variables, children(expr)))
