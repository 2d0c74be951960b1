"""
Maxima and minima of a few values in normal form: a minimum of maxima, without values that others exceed.

    max(c, min(d, max(a, c))) = min(max(c, d), max(a, c))

`max(x, 0)` is written `relu(x)` where that is all there is, and `max(x, -x)` `|x|`. Only maxima of single values are
taken apart; those over a whole dim stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from unity_ir.rules.proof.forms import (
    UNIT,
    Apply,
    Extreme,
    Form,
    Mono,
    MonoFactor,
    Quantified,
    added_up,
    apply,
    divided,
    form_text,
    of_factor,
    scaled,
)
from unity_ir.rules.proof.signs import is_total, is_turned, nonempty, not_negative
from unity_ir.rules.proof.solver import Facts

INCREASING = ("exp", "tanh", "erf", "floor")
"""Functions of a maximum that are the maximum of them."""

MOST_CLAUSES = 12
"""Maxima that a minimum of maxima may have; what would have more is left as it is."""

_Values = tuple[tuple[str, Form], ...]
"""Values of which the maximum is taken, each once, sorted by their text."""


def extreme_of_values(factor: Extreme, facts: Facts) -> Form | None:
    """
    Return the normal form of a maximum or minimum of single values, whose bodies are in normal form: a value, `relu`,
    `abs`, or a factor `Extreme`, perhaps of others. Returns None if it is that already, or over a whole dim, or a
    product. `facts` are constraints that hold.
    """
    if factor.reducer not in ("max", "min") or any(p.binders or p.domain for p in factor.parts):
        return None
    clauses = _clauses(factor)
    if clauses is None:
        return None
    found = _written(_least(clauses, facts))
    return None if found == (Mono(UNIT, (), frozenset(), (factor,)),) else found


def _value(form: Form) -> tuple[str, Form]:
    return form_text(form), form


def _clauses(factor: Extreme) -> list[_Values] | None:
    """Return the maxima of which a maximum or minimum is the minimum; None if there are too many."""
    parts: list[list[_Values]] = []
    for part in factor.parts:
        inner = _inner(part.body)
        found = [(_value(part.body),)] if inner is None else _clauses(inner)
        if found is None:
            return None
        parts.append(found)
    if factor.reducer == "min":
        joined = [clause for part in parts for clause in part]
    else:
        count = 1
        for part in parts:
            count *= len(part)
        if count > MOST_CLAUSES:
            return None
        joined = [tuple(sorted({t: f for c in chosen for t, f in c}.items())) for chosen in product(*parts)]
    return joined if len(joined) <= MOST_CLAUSES else None


def _inner(form: Form) -> Extreme | None:
    """Return the maximum or minimum of single values that a value is; `relu(x)` is one of x and 0."""
    match form:
        case (Mono(coefficient, (), domain, (Apply("relu", (x,)),)),) if coefficient == 1 and not domain:
            return Extreme("max", (Quantified((), frozenset(), x), Quantified((), frozenset(), ())))
        case (Mono(coefficient, (), domain, (Extreme(reducer, parts) as found,)),) if (
            coefficient == 1
            and not domain
            and reducer in ("max", "min")
            and parts
            and not any(p.binders or p.domain for p in parts)
        ):
            return found
        case _:
            return None


def _at_most(one: Form, other: Form, facts: Facts) -> bool:
    """Return whether it is shown that `one <= other`."""
    return not_negative(added_up((*other, *scaled(one, -1))), facts)


def _least(clauses: list[_Values], facts: Facts) -> list[_Values]:
    """Return the clauses without values that another of theirs exceeds, and without clauses that exceed another."""
    kept: list[_Values] = []
    for clause in clauses:
        left = list(clause)
        for value in clause:
            if is_total(value[1], facts) and any(
                other is not value and _at_most(value[1], other[1], facts) for other in left
            ):
                left.remove(value)
        kept.append(tuple(left))
    kept = list(dict.fromkeys(kept))
    out = list(kept)
    for clause in kept:
        known = all(is_total(form, facts) for _, form in clause)
        if known and any(other is not clause and _exceeds(clause, other, facts) for other in out):
            out.remove(clause)
    return out


def _exceeds(clause: _Values, other: _Values, facts: Facts) -> bool:
    """Return whether it is shown that the maximum of a clause is at least that of another one."""
    return all(any(t == u or _at_most(f, g, facts) for u, g in clause) for t, f in other)


def _written(clauses: list[_Values]) -> Form:
    values = [_extreme("max", [f for _, f in clause]) for clause in clauses]
    return _extreme("min", sorted(values, key=lambda f: _value(f)[0]))


def _extreme(reducer: str, values: list[Form]) -> Form:
    """Return the maximum or minimum of values, as `relu` or `abs` where it is one of two that say so."""
    if len(values) == 1:
        return values[0]
    sign = 1 if reducer == "max" else -1
    if len(values) == 2:
        if () in values:
            (x,) = [v for v in values if v != ()]
            return scaled(apply("relu", (scaled(x, sign),)), sign)
        if _value(values[0])[0] == _value(scaled(values[1], -1))[0]:
            return scaled(apply("abs", (values[0],)), sign)
    parts = sorted((Quantified((), frozenset(), v) for v in values), key=lambda p: p.text)
    return (Mono(UNIT, (), frozenset(), (Extreme(reducer, tuple(parts)),)),)


def pulled_out(factor: Extreme, facts: Facts) -> Form | None:
    """
    Return a maximum or minimum, whose bodies are in normal form, without what all its values have in common: equal
    addends, a positive factor, a minus sign, or an increasing function. Returns None if they have nothing, or for a
    product.

        max over j of (x[j] + c) = c + max over j of x[j]
    """
    if factor.reducer not in ("max", "min") or not factor.parts:
        return None
    bound = {b for p in factor.parts for b in p.binders}
    bodies = [p.body for p in factor.parts]
    if not any(bodies) and any(nonempty(p, facts) for p in factor.parts):
        return ()
    if (inner := _monotone(bodies)) is not None:
        function, arguments = inner
        return apply(function, (_with_bodies(factor, arguments),))
    texts = [{m.text for m in body} for body in bodies]
    common = tuple(m for m in bodies[0] if m.free.isdisjoint(bound) and all(m.text in t for t in texts))
    if common:
        shared = {m.text for m in common}
        return (*common, *_with_bodies(factor, [tuple(m for m in b if m.text not in shared) for b in bodies]))
    monos = [m for body in bodies for m in body]
    sign = -1 if all(body and is_turned(body) for body in bodies) else 1
    sizes = {abs(m.coefficient) for m in monos}
    scale = sizes.pop() if len(sizes) == 1 else UNIT
    outer = [f for f in dict.fromkeys(monos[0].factors) if _shared(f, monos, bound, facts)] if monos else []
    if scale == 1 and not outer and sign == 1:
        return None
    found = _with_bodies(
        factor if sign == 1 else Extreme({"max": "min", "min": "max"}[factor.reducer], factor.parts),
        [divided(body, sign * scale, outer) for body in bodies],
    )
    return tuple(Mono(m.coefficient * sign * scale, m.binders, m.domain, (*m.factors, *outer)) for m in found)


def _monotone(bodies: Sequence[Form]) -> tuple[str, list[Form]] | None:
    """Return (f, arguments) if all values are an increasing function f of these; None otherwise."""
    found: list[Form] = []
    functions: set[str] = set()
    for body in bodies:
        match body:
            case (Mono(coefficient, (), domain, factors),) if coefficient == 1 and not domain and factors:
                calls = [f for f in factors if isinstance(f, Apply) and f.function in INCREASING]
                if len(calls) < len(factors) or (len(calls) > 1 and any(f.function != "exp" for f in calls)):
                    return None
                functions.update(f.function for f in calls)
                found.append(tuple(m for f in calls for m in f.arguments[0]))
            case _:
                return None
    return (functions.pop(), found) if len(functions) == 1 else None


def _shared(factor: MonoFactor, monos: Sequence[Mono], bound: set[str], facts: Facts) -> bool:
    """Return whether a factor of all monomials is one by which all values of a maximum may be divided."""
    inside = bound.union(*(m.binders for m in monos))
    everywhere = all(factor in m.factors and not m.domain for m in monos)
    if not everywhere or not factor.free.isdisjoint(inside):
        return False
    return not_negative(of_factor(factor), facts)


def _with_bodies(factor: Extreme, bodies: Sequence[Form]) -> Form:
    parts = (Quantified(p.binders, p.domain, body) for p, body in zip(factor.parts, bodies, strict=True))
    return (Mono(UNIT, (), frozenset(), (Extreme(factor.reducer, tuple(parts)),)),)
