"""
Rewrite expressions of bound lines (operators' definitions in the tensor description language TDL at given shapes, such
as `out[m, n] = sum[k](x[m, k] * w[k, n])`): fold constants, rename index variables, and find equal subexpressions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import isfinite, prod
from operator import is_

import numpy as np

from unity_ir.errors import UnityError
from unity_ir.tdl.functions import CONDITIONS, FUNCTIONS
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    Access,
    Binary,
    Bound,
    CachedExpr,
    Call,
    Cases,
    Composite,
    Const,
    Expr,
    Name,
    Opaque,
    PaddedVar,
    Reduce,
    Result,
    Segments,
    Slice,
    Var,
    Window,
    WrittenIndex,
    accesses,
    children,
    index_names,
)

_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def map_children(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """
    Return a copy of the expression in which each direct subexpression is replaced by the result of `change`. An
    expression of which none changes, such as a constant or a read, is returned as it is.
    """
    # No `match`, and what is most frequent first: every rewrite of an expression calls this.
    if isinstance(expr, Access | Const | Name):
        return expr
    if isinstance(expr, Binary):
        first, second = change(expr.left), change(expr.right)
        return expr if first is expr.left and second is expr.right else Binary(expr.op, first, second)
    if isinstance(expr, Call):
        changed = tuple(map(change, expr.args))
        return expr if all(map(is_, changed, expr.args)) else Call(expr.function, changed)
    if isinstance(expr, Reduce):
        body = change(expr.body)
        return expr if body is expr.body else Reduce(expr.reducer, expr.indices, body)
    if isinstance(expr, Opaque):
        body = change(expr.body)
        return expr if body is expr.body else Opaque(expr.function, expr.outputs, expr.inputs, body)
    if isinstance(expr, Cases):
        cases = tuple([(n, change(e)) for n, e in expr.branches])
        return expr if all(c[1] is b[1] for c, b in zip(cases, expr.branches, strict=True)) else Cases(cases)
    return expr


def reductions(expr: Expr) -> list[Reduce]:
    """
    Return every reduction (`sum[k](..)`, `max[k](..)`, ...) in `expr`, each once, inner ones first. Sums that gather
    one element by an integer (`tdl.gather`) are left out.
    """
    found: dict[Reduce, None] = {}

    def visit(part: Expr) -> None:
        for child in children(part):
            visit(child)
        if isinstance(part, Reduce) and gather(part) is None:
            found.setdefault(part)

    visit(expr)
    return list(found)


def outermost_reductions(expr: Expr) -> list[Reduce]:
    """
    Return the reductions (`sum[k](..)`, ...) in `expr` that are not inside another reduction, in reading order. Sums
    that gather one element by an integer (`tdl.gather`) are not returned themselves; those inside of them are.
    """
    if isinstance(expr, Reduce) and gather(expr) is None:
        return [expr]
    return [r for child in children(expr) for r in outermost_reductions(child)]


def is_worth_keeping(expr: Expr) -> bool:
    """
    Return whether an expression that occurs twice is worth computing once and keeping: whether it contains a reduction,
    or a function other than comparisons and logic.
    """
    if isinstance(expr, Reduce):
        return True
    return isinstance(expr, CachedExpr) and not isinstance(expr, Access) and _is_worth_keeping(expr)


@lru_cache(maxsize=16384)
def _is_worth_keeping(expr: Expr) -> bool:
    # Conditions are so cheap that they are computed again rather than assigned to a name.
    return (isinstance(expr, Call) and expr.function not in CONDITIONS) or any(map(is_worth_keeping, children(expr)))


# --- variables -------------------------------------------------------------------------------------------------------


def rename(
    expr: Expr,
    names: Mapping[str, str],
    bind: Callable[[Reduce, Mapping[str, str]], Mapping[str, str]] = lambda node, _: {n: n for n in node.names},
) -> Expr:
    """
    Return the expression with its free index variables renamed: `names` maps old names to new ones.

    `bind`, called with a reduction and the renaming in force around it, returns the new name of each variable that the
    reduction binds; by default they keep theirs. Given `sum[k](x[i, k])` and `{"i": "j"}`, returns `sum[k](x[j, k])`.
    """
    if isinstance(expr, Access):
        return Access(expr.tensor, tuple([_renamed(i, names) for i in expr.indices]))
    if isinstance(expr, Reduce):
        own = bind(expr, names)
        indices = tuple([Var(own[n]) for n in expr.names])
        return Reduce(expr.reducer, indices, rename(expr.body, {**names, **own}, bind))
    if isinstance(expr, Name):
        return Name(names.get(expr.name, expr.name))
    return map_children(expr, lambda child: rename(child, names, bind))


def _renamed(index: WrittenIndex, names: Mapping[str, str]) -> WrittenIndex:
    if isinstance(index, PaddedVar):
        return replace(index, name=names.get(index.name, index.name))
    if isinstance(index, Var):
        return Var(names.get(index.name, index.name))
    match index:
        case Composite(inner):
            return Composite(tuple(names.get(n, n) for n in inner))
        case Segments(inner, active):
            return Segments(tuple(names.get(n, n) for n in inner), active)
        case Slice(part):
            of = _renamed(part, names)
            assert isinstance(of, Var | Composite)
            return replace(index, index=of)
        case Window(terms):
            return replace(index, terms=tuple((factor, names.get(n, n)) for factor, n in terms))
        case _:
            raise TypeError(f"{index} is not bound")


def canonical(expr: Expr, extents: Mapping[str, int], starts: Mapping[str, str]) -> tuple[Expr, tuple[str, ...]]:
    """
    Return (the expression with its index variables renamed by order of occurrence, the old names of its free variables
    in that order), so that expressions which differ only in names become equal. Expressions whose variables differ in
    `extents` or `starts` stay different.

    `extents` maps each index variable to its number of positions. `starts` maps each index variable of which a task
    computes only a part to the name of the kernel argument with the global index at which the part begins; the others
    begin at 0. Given `sum[k](x[i, k])` and `sum[l](x[j, l])` of the same extents, returns the same expression, with
    `("i",)` and `("j",)`.
    """
    return _canonical(expr, tuple(extents.items()), tuple(starts.items()))


@lru_cache(maxsize=16384)
def _canonical(
    expr: Expr, extents: tuple[tuple[str, int], ...], starts: tuple[tuple[str, str], ...]
) -> tuple[Expr, tuple[str, ...]]:
    free, extent, start = _free_in_order(expr), dict(extents), dict(starts)

    def label(number: int, name: str) -> str:
        return f"{number}:{extent[name]}:{start.get(name, '')}"

    def bind(node: Reduce, names: Mapping[str, str]) -> Mapping[str, str]:
        depth = 1 + max((int(n.split(":")[0]) for n in names.values()), default=-1)
        return {n: label(depth + k, n) for k, n in enumerate(node.names)}

    return rename(expr, {n: label(k, n) for k, n in enumerate(free)}, bind), free


@lru_cache(maxsize=16384)
def _free_in_order(expr: Expr) -> tuple[str, ...]:
    match expr:
        case Name(name):
            return (name,)
        case Access(_, indices):
            return tuple(dict.fromkeys(n for i in indices for n in index_names(i)))
        case _:
            bound = expr.names if isinstance(expr, Reduce) else ()
            found = (n for child in children(expr) for n in _free_in_order(child))
            return tuple(n for n in dict.fromkeys(found) if n not in bound)


def recurring(exprs: Iterable[Expr]) -> Callable[[Expr], bool]:
    """
    Return a quick test of whether a subexpression of `exprs` may occur in them twice, up to the names of index
    variables: False says that no other subexpression has the same `canonical` form, True that one may have.

    It compares operators, constants and tensors, but not indices, in a fraction of the time of `canonical`.
    """
    numbers: dict[object, int] = {}
    known: dict[Expr, int] = {}
    times: Counter[int] = Counter()

    def number(expr: Expr) -> int:
        found = known.get(expr)
        if found is None:
            found = known[expr] = numbers.setdefault((_operator(expr), *map(number, children(expr))), len(numbers))
        return found

    def count(expr: Expr) -> None:
        own = number(expr)
        times[own] += 1
        # A second one has everything inside of it twice as well; a third says nothing new.
        if times[own] <= 2:
            for child in children(expr):
                count(child)

    for expr in exprs:
        count(expr)
    return lambda expr: times[number(expr)] > 1


def _operator(expr: Expr) -> object:
    """Return what an expression does with its subexpressions, or reads, whatever its index variables."""
    match expr:
        case Const(value):
            return value
        case Access(tensor):
            return tensor
        case Binary(name) | Call(name) | Reduce(name) | Opaque(name):
            return type(expr), name
        case _:
            return type(expr)


# --- constants -------------------------------------------------------------------------------------------------------


def simplified(bound: Bound, starts: Mapping[str, str]) -> Bound:
    """
    Return a bound TDL line with constants folded, and operations dropped that are then trivial: `1 * x`, `x + 0`,
    `where` of a constant.

    A variable of extent 1 (one position) that starts at 0 is the constant 0, and a reduction over one element is that
    element. `starts` maps each index variable of which a task computes only a part to the name of the kernel argument
    with the global index at which the part begins; the others begin at 0. Raises `UnityError` for constants that are
    not finite.
    """
    folding = _Fold(bound, starts)
    return replace(bound, results=tuple(replace(r, expr=folding.expr(r.expr)) for r in bound.results))


def fold(expr: Expr, bound: Bound, starts: Mapping[str, str]) -> Expr:
    """
    Return an expression over the index variables of the line `bound` with constants folded, and trivial operations such
    as `1 * x` dropped.

    `starts` maps each index variable of which a task computes only a part to the name of the kernel argument with the
    global index at which the part begins; the others begin at 0. Raises `UnityError` for constants that are not finite.
    """
    return _Fold(bound, starts).expr(expr)


def without_ones(bound: Bound) -> Bound:
    """
    Return the bound TDL line without the index variables of one position (extent 1), so that lines which compute the
    same become equal (and share a kernel).

    They are left out of indices (but for concatenations) and of reductions. A plain or composite index with only such
    variables becomes the variable `one`; a reduction over only such variables stays.
    """
    one = "one"
    while one in bound.extents:
        one += "_"
    extents = {**bound.extents, one: 1}

    def index(old: WrittenIndex) -> WrittenIndex:
        if isinstance(old, Segments):
            return old
        if isinstance(old, Slice):
            of = index(old.index)
            assert isinstance(of, Var | Composite)
            return replace(old, index=of)
        if isinstance(old, Window):
            return replace(old, terms=tuple(t for t in old.terms if extents[t[1]] > 1))
        if isinstance(old, PaddedVar) and extents[old.name] > 1:
            return old
        names = tuple(n for n in index_names(old) if extents[n] > 1)
        return Composite(names) if len(names) > 1 else Var(*names or (one,))

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, Access):
            return Access(expr.tensor, tuple(map(index, expr.indices)))
        if isinstance(expr, Reduce):
            longer = tuple(Var(n) for n in expr.names if extents[n] > 1)
            return Reduce(expr.reducer, longer or expr.indices, visit(expr.body))
        return map_children(expr, visit)

    return replace(bound, results=tuple(replace(r, expr=visit(r.expr)) for r in bound.results), extents=extents)


class _Fold:
    def __init__(self, bound: Bound, starts: Mapping[str, str]):
        self.bound = bound
        self.starts = starts

    def expr(self, expr: Expr) -> Expr:
        expr = map_children(expr, self.expr)
        match expr:
            case Name(name) if self.bound.extents[name] == 1 and name not in self.starts:
                return Const(0.0)
            case Binary(op, Const(a), Const(b)) if op != "/" or b:
                return self.number(_ARITHMETIC[op](a, b), f"{a:g} {op} {b:g}")
            case Binary("*", Const(1), other) | Binary("*", other, Const(1)):
                return other
            case Binary("+", Const(0), other) | Binary("+" | "-", other, Const(0)):
                return other
            case Binary("*", Const(0), other) | Binary("*", other, Const(0)) if _holds_positions_only(other):
                return Const(0.0)
            case Call("where", (Const(condition), yes, no)):
                return yes if condition else no
            case Call("and", (Const(known), other) | (other, Const(known))) if _is_condition(other):
                return other if known else Const(0.0)
            case Call("or", (Const(known), other) | (other, Const(known))) if _is_condition(other):
                return Const(1.0) if known else other
            case Call("identity", (argument,)):
                return argument
            case Call(function, args) if all(isinstance(a, Const) for a in args):
                values = [a.value for a in args if isinstance(a, Const)]
                with np.errstate(all="ignore"):
                    value = float(FUNCTIONS[function].evaluate(*map(np.float64, values)))
                return self.number(value, f"{function}({', '.join(f'{v:g}' for v in values)})")
            case Reduce(reducer, _, body) if all(self.bound.extents[n] == 1 for n in expr.names):
                # Where the window is outside of the tensor there is nothing to reduce.
                return expr if reducer != "sum" and _has_window(body, expr.names) else body
            case Reduce(reducer, _, Const(value)):
                count = prod(self.bound.extents[n] for n in expr.names)
                with np.errstate(over="ignore"):
                    power = float(np.float64(value) ** count) if reducer == "prod" else value
                return self.number(value * count if reducer == "sum" else power, f"{reducer} of {value:g}")
            case _:
                return expr

    def number(self, value: float, text: str) -> Const:
        if not isfinite(value):
            raise UnityError(f"pcg.{self.bound.operator}: {text} is not a number; change the attributes it is made of")
        return Const(value)


def _is_condition(expr: Expr) -> bool:
    """Return whether an expression is true or false, and no number that stands for it."""
    return isinstance(expr, Call) and expr.function in CONDITIONS


def _has_window(expr: Expr, names: Collection[str]) -> bool:
    indices = (i for a in accesses(expr) for i in a.indices)
    return any(isinstance(i, Window) and not set(index_names(i)).isdisjoint(names) for i in indices)


def _holds_positions_only(expr: Expr) -> bool:
    match expr:
        case Const() | Name():
            return True
        case Binary(op, left, right):
            return op != "/" and _holds_positions_only(left) and _holds_positions_only(right)
        case _:
            return False


def with_variables_of(
    first: Result, second: Result, extents: Mapping[str, int], starts: Collection[str]
) -> Result | None:
    """
    Return the `second` result of a line with its index variables renamed to those of the `first`, so that one kernel
    can compute both.

    None if the extents of the two results' variables differ (in order, extents of 1 left out), if one of these is in
    `starts` (a task computes only a part of it), or if a variable of the `first` is bound inside of the `second`.

        a[r, i] = x[r, i];  b[r, j] = x[r, j + 4]  ->  a[r, i] = x[r, i];  b[r, i] = x[r, i + 4]
    """
    both = ([n for i in result.indices for n in index_names(i)] for result in (first, second))
    common, own = ([n for n in names if extents[n] > 1] for names in both)
    if [extents[n] for n in common] != [extents[n] for n in own]:
        return None
    if not {*common, *own}.isdisjoint(starts) or not {*common}.isdisjoint(_names_inside(second.expr)):
        return None
    names = dict(zip(own, common, strict=True))
    indices = tuple(_renamed(i, names) for i in second.indices)
    return replace(second, indices=indices, expr=rename(second.expr, names))


def _names_inside(expr: Expr) -> set[str]:
    """Return the variables of reductions, segments and opaque functions in an expression."""
    own = {n for n, _ in expr.branches} if isinstance(expr, Cases) else set[str]()
    own |= {*expr.names} if isinstance(expr, Reduce | Opaque) else set()
    return own.union(*map(_names_inside, children(expr)))
