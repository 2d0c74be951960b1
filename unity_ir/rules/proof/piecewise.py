"""
A second look at forms (sums of monomials) that should be 0 and whose normal form does not show it: short sums are
written out, denominators cleared, and maxima and comparisons taken apart by which of two values is larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from importlib import import_module
from typing import Any

from unity_ir.rules.poly import number
from unity_ir.rules.proof.conditions import complement
from unity_ir.rules.proof.forms import (
    UNIT,
    Apply,
    Constraint,
    Extreme,
    Form,
    Mono,
    MonoFactor,
    Quantified,
    apply,
    constant,
    of_factor,
    scaled,
    substitute,
    times,
)
from unity_ir.rules.proof.integers import holds
from unity_ir.rules.proof.normal import normal, within
from unity_ir.rules.proof.signs import CONDITIONS, is_total
from unity_ir.rules.proof.solver import Facts

z3: Any = import_module("z3")  # Its types are not known.

MOST_ORDERS = 4
"""Pairs of values whose orders are gone through: three of each."""

SHORT = 8
"""Addends of a sum that is written out."""

MOST_MONOMIALS = 200
"""Monomials of a form that is taken apart."""


def taken_apart(form: Form, facts: Facts) -> Iterator[Form]:
    """
    Yield forms that are all 0 if and only if `form` is: one for each order of the values that it compares. `facts` are
    constraints that hold.

    Sums over a few indices are written out; `max(a, b)` is b + (a - b) [a > b], `relu` and `abs` likewise.
    """
    spelled = normal(tuple(m for mono in form for m in _spelled(mono, facts)), facts)
    yield from _orders(spelled, facts, MOST_ORDERS)


def _spelled(mono: Mono, facts: Facts) -> Form:
    """Return a monomial with short sums written out, and with its maxima as sums of products of comparisons."""
    for b in mono.binders:
        if (values := _few(b, mono.domain)) is not None:
            rest = Mono(mono.coefficient, tuple(x for x in mono.binders if x != b), mono.domain, mono.factors)
            each = (m for v in values for m in substitute((rest,), {b: number(v)}))
            return tuple(m for one in each for m in _spelled(one, facts))
    guard = next((c for f in mono.factors for c in _guards(f) if _splits(c, mono)), None)
    if guard is not None:
        cases = ((guard,), *((c,) for c in guard.negated))
        return tuple(m for c in cases for m in _spelled(_where(mono, frozenset(c)), facts))
    found: Form = (Mono(mono.coefficient, mono.binders, mono.domain, ()),)
    for factor in mono.factors:
        value = None if not factor.free.isdisjoint(mono.binders) else _by_comparison(factor, facts)
        found = times(found, of_factor(factor) if value is None else value)
    return found


def _few(binder: str, domain: frozenset[Constraint]) -> range | None:
    """Return the values of a binder that runs over a few numbers, whatever the sizes; None if it does not."""
    bounds = [c.poly for c in domain if c.poly.symbols == frozenset({binder}) and not c.equal]
    above = [p.without(binder).constant for p in bounds if p.coefficient(binder).constant == -1]
    below = [p.without(binder).constant for p in bounds if p.coefficient(binder).constant == 1]
    if not above or not below or None in (*above, *below):
        return None
    low, high = max(-v for v in below if v is not None), min(v for v in above if v is not None)
    return range(low, high + 1) if high - low < SHORT else None


def _guards(factor: MonoFactor) -> list[Constraint]:
    """Return the guards of addends in the arguments of a function."""
    match factor:
        case Apply(_, arguments):
            return [c for a in arguments for m in a if not m.binders for c in sorted(m.domain, key=str)]
        case _:
            return []


def _splits(c: Constraint, mono: Mono) -> bool:
    return not c.equal and not c.poly.symbols.isdisjoint(mono.binders) and c not in mono.domain


def _where(mono: Mono, domain: frozenset[Constraint]) -> Mono:
    """Return a monomial in a part of its domain, in which guards of its arguments are known."""
    factors = [
        Apply(f.function, tuple(within(a, domain) for a in f.arguments)) if isinstance(f, Apply) else f
        for f in mono.factors
    ]
    return Mono(mono.coefficient, mono.binders, mono.domain | domain, tuple(factors))


def _by_comparison(factor: MonoFactor, facts: Facts) -> Form | None:
    """
    Return a maximum or minimum of a few values, `relu` or `abs`, by comparisons, also in operands of comparisons; None
    for other factors.
    """
    match factor:
        case _ if not is_total(of_factor(factor), facts):
            return None
        case Apply("relu", (x,)):
            return times(x, _above(x, ()))
        case Apply("abs", (x,)):
            return times(x, (*_above(x, ()), *scaled(_above((), x), -1)))
        case Apply("gt" | "eq" as function, arguments):
            return apply(function, tuple(tuple(m for mono in a for m in _spelled(mono, facts)) for a in arguments))
        case Extreme("max" | "min" | "prod" as reducer, parts):
            values = [body for p in parts for body in _bodies(p)]
            known = [v for v in values if v is not None]
            if len(known) < len(values):
                return None
            return reduce(times, known, constant(1)) if reducer == "prod" else _chosen(reducer, known)
        case _:
            return None


def _bodies(part: Quantified) -> Iterator[Form | None]:
    """Yield all values of a set of a few; None where there may be more."""
    if not part.binders:
        yield None if part.domain else part.body
        return
    first, *others = part.binders
    values = _few(first, part.domain)
    if values is None:
        yield None
        return
    for v in values:
        known = {first: number(v)}
        domain = [c.substitute(known) for c in part.domain]
        if any(c.poly.constant is not None and not holds(c, {}) for c in domain):
            continue
        left = frozenset(c for c in domain if c.poly.constant is None)
        yield from _bodies(Quantified(tuple(others), left, substitute(part.body, known)))


def _chosen(reducer: str, values: Sequence[Form]) -> Form:
    """Return the maximum or minimum of values as a sum of each times the condition that it is the one."""
    found: list[Mono] = []
    for i, value in enumerate(values):
        chosen = constant(1)
        for j, other in enumerate(values):
            if j != i:
                above = _above(other, value) if reducer == "max" else _above(value, other)
                below = _above(value, other) if reducer == "max" else _above(other, value)
                # Of equal values the first is taken.
                chosen = times(chosen, below if j < i else complement(above))
        found += times(value, chosen)
    return tuple(found)


def _above(one: Form, other: Form) -> Form:
    return apply("gt", (one, other))


_Relation = tuple[Form, str]
"""A value, and how it compares with 0: `>` or `=`."""


def _orders(form: Form, facts: Facts, left: int, path: tuple[_Relation, ...] = ()) -> Iterator[Form]:
    """Yield the form in each order of two values that it compares, and of further ones, that numbers can have."""
    if not form:
        return
    found = next(_compared(form, facts), None) if left and len(form) <= MOST_MONOMIALS else None
    if found is None:
        if not contradictory(path):
            yield form
        return
    if isinstance(found, Apply):
        for value in (0, 1):
            yield from _orders(normal(_known(form, {found: value}), facts), facts, left - 1, path)
        return
    one, other = found
    both = ((one, other), (other, one))
    for first, second in both:
        known = {Apply("gt", (first, second)): 1, Apply("gt", (second, first)): 0}
        known |= {Apply("eq", p): 0 for p in both}
        taken = (*path, ((*first, *scaled(second, -1)), ">"))
        yield from _orders(normal(_known(form, known), facts), facts, left - 1, taken)
    known = {Apply("gt", p): 0 for p in both} | {Apply("eq", p): 1 for p in both}
    same = normal(_with_equal(_known(form, known), one, other), facts)
    yield from _orders(same, facts, left - 1, (*path, ((*one, *scaled(other, -1)), "=")))


def contradictory(path: Sequence[_Relation]) -> bool:
    """Return whether it is shown that no numbers have all these orders; each monomial is a number by itself."""
    if len(path) < 2:
        return False
    solver = z3.SimpleSolver()
    for form, relation in path:
        total = z3.RealVal(0)
        for m in form:
            key = Mono(UNIT, m.binders, m.domain, m.factors)
            value = z3.Real(key.text) if m.factors or m.domain else z3.RealVal(1)
            total = total + z3.Q(m.coefficient.numerator, m.coefficient.denominator) * value
        solver.add(total > 0 if relation == ">" else total == 0)
    return bool(solver.check() == z3.unsat)


def _compared(
    form: Form, facts: Facts, bound: frozenset[str] = frozenset(), nested: bool = False
) -> Iterator[tuple[Form, Form] | Apply]:
    """
    Yield the pairs of values that are compared in a form, in arguments of functions, too, but not under a sum over what
    they depend on, first those that have no comparisons inside; and conditions of other kinds in such arguments.
    """
    for mono in form:
        inside = bound.union(mono.binders)
        for factor in mono.factors:
            match factor:
                case Apply(function, arguments):
                    for argument in arguments:
                        yield from _compared(argument, facts, inside, nested=True)
                    if not factor.free.isdisjoint(inside):
                        continue
                    if function in ("gt", "eq") and all(is_total(a, facts) for a in arguments):
                        yield arguments[0], arguments[1]
                    elif nested and function in CONDITIONS and function not in ("gt", "eq"):
                        yield factor
                case _:
                    pass


def _known(form: Form, values: dict[Apply, int]) -> Form:
    """Return a form with the conditions in `values` replaced by 0 or 1, in arguments of functions, too."""
    out: list[Mono] = []
    for mono in form:
        given = [values.get(f) if isinstance(f, Apply) else None for f in mono.factors]
        if 0 not in given:
            kept = tuple(_known_in(f, values) for f, v in zip(mono.factors, given, strict=True) if v is None)
            out.append(Mono(mono.coefficient, mono.binders, mono.domain, kept))
    return tuple(out)


def _known_in(factor: MonoFactor, values: dict[Apply, int]) -> MonoFactor:
    match factor:
        case Apply(function, arguments):
            return Apply(function, tuple(_known(a, values) for a in arguments))
        case _:
            return factor


def _with_equal(form: Form, one: Form, other: Form) -> Form:
    """Return a form where two values are known to be equal: a factor that is linear in their difference is replaced."""
    difference = (*one, *scaled(other, -1))
    for mono in difference:
        if mono.binders or mono.domain or len(mono.factors) != 1:
            continue
        (factor,) = mono.factors
        rest = tuple(m for m in difference if m is not mono)
        if not any(_occurs(factor, f) for m in rest for f in m.factors):
            return _replaced(form, factor, scaled(rest, -1 / mono.coefficient))
    return form


def _occurs(factor: MonoFactor, inside: MonoFactor) -> bool:
    if factor == inside:
        return True
    match inside:
        case Apply(_, arguments):
            return any(_occurs(factor, f) for a in arguments for m in a for f in m.factors)
        case Extreme(_, parts):
            return any(_occurs(factor, f) for p in parts for m in p.body for f in m.factors)
        case _:
            return False


def _replaced(form: Form, factor: MonoFactor, value: Form) -> Form:
    """Return a form with `value` for every factor equal to `factor`, in arguments of functions, too."""
    out: list[Mono] = []
    for mono in form:
        found: Form = (Mono(mono.coefficient, mono.binders, mono.domain, ()),)
        for f in mono.factors:
            found = times(found, value if f == factor else of_factor(_inside(f, factor, value)))
        out += found
    return tuple(out)


def _inside(factor: MonoFactor, old: MonoFactor, value: Form) -> MonoFactor:
    match factor:
        case Apply(function, arguments):
            return Apply(function, tuple(_replaced(a, old, value) for a in arguments))
        case Extreme(reducer, parts):
            return Extreme(
                reducer, tuple(Quantified(p.binders, p.domain, _replaced(p.body, old, value)) for p in parts)
            )
        case _:
            return factor


def denominators(form: Form) -> list[Form]:
    """Return the values by which a form in normal form divides: arguments of reciprocals that are factors."""
    found = {f.text: f.arguments[0] for m in form for f in m.factors if isinstance(f, Apply) and f.function == "recip"}
    return list(found.values())


def nonzero_denominators(form: Form) -> list[Form]:
    """
    Return the values by which a form in normal form divides, and that are not 0 wherever it is a number: those whose
    reciprocals have no guards and, in all monomials, no conditions beside them, which may be 0 where the value is.
    """
    found: list[Form] = []
    for value in denominators(form):
        inverse = Apply("recip", (value,))
        having = [m for m in form if inverse in m.factors]
        masked = any(isinstance(f, Apply) and f.function in CONDITIONS for m in having for f in m.factors)
        if not masked and any(not m.domain and inverse.free.isdisjoint(m.binders) for m in having):
            found.append(value)
    return found


def cleared(form: Form, values: Sequence[Form]) -> Form:
    """
    Return a form multiplied by powers of `values`, which are not 0, so that it divides by none of them. It is 0 where
    the form is.
    """
    for value in values:
        inverse = Apply("recip", (value,))
        if any(not inverse.free.isdisjoint(m.binders) for m in form):
            continue
        most = max((m.factors.count(inverse) for m in form), default=0)
        out: list[Mono] = []
        for mono in form:
            kept = tuple(f for f in mono.factors if f != inverse)
            found: Form = (Mono(mono.coefficient, mono.binders, mono.domain, kept),)
            for _ in range(most - (len(mono.factors) - len(kept))):
                found = times(found, value)
            out += found
        form = tuple(out)
    return form
