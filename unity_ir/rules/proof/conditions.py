"""
Comparisons and logic as values (forms: sums of monomials) that are 0 or 1, written by `gt` and `eq` alone: `a >= b` is
1 - (b > a), `a or b` a + b - a b, `max(a, b) > c` by both. Products of equal conditions are one, so that all of
propositional logic has a normal form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from unity_ir.rules.proof.forms import (
    UNIT,
    Apply,
    Extreme,
    Form,
    Mono,
    MonoFactor,
    added_up,
    apply,
    constant,
    divided,
    form_text,
    of_factor,
    scaled,
    times,
)
from unity_ir.rules.proof.signs import CONDITIONS, is_positive, is_total, not_negative, single
from unity_ir.rules.proof.solver import Facts

MOST_CONDITIONS = 16
"""Addends of a sum that is looked at as a condition."""


def complement(condition: Form) -> Form:
    """Return 1 - `condition`, the opposite of a condition: a value that is 0 or 1."""
    return (*constant(1), *scaled(condition, -1))


def condition(function: str, arguments: tuple[Form, ...], facts: Facts) -> Form | None:
    """
    Return the value, 0 or 1, of a comparison of two values in normal form that are not both sizes or indices, by `gt`
    and `eq`: `a >= b` is `not b > a`, a maximum is above c if one of its values is. Returns None where it is written so
    already, or for other functions. `facts` are constraints that hold.
    """
    match function, arguments:
        case "ne", (a, b):
            return complement(apply("eq", (a, b)))
        case "gt", (a, b) if a == b:
            return ()
        case _, (a, b) if not (is_total(a, facts) and is_total(b, facts)):
            # What is no number is neither above nor below anything, nor equal to it.
            return None
        case "ge", (a, b):
            return complement(apply("gt", (b, a)))
        case "eq", (a, b):
            return _equal(a, b)
        case "gt", (a, b):
            return _above(a, b, facts)
        case _:
            return None


def _apart(a: Form, b: Form) -> tuple[Form, Form, Form]:
    """
    Return a multiple above 0 of a - b, its addends above 0, and those below with the sign turned: a > b is first >
    second.
    """
    left = added_up((*a, *scaled(b, -1)))
    if left:
        left = scaled(left, 1 / abs(left[0].coefficient))
    return left, tuple(m for m in left if m.coefficient > 0), scaled(tuple(m for m in left if m.coefficient < 0), -1)


def _equal(a: Form, b: Form) -> Form | None:
    if is_condition(a) and is_condition(b):
        return (*times(a, b), *times(complement(a), complement(b)))
    difference, first, second = _apart(a, b)
    if not difference:
        return constant(1)
    if first and second and not (is_condition(first) or is_condition(second)):
        first, second = sorted((first, second), key=form_text)
    elif not first:
        first, second = second, first
    if not second and is_condition(first):
        return complement(first)
    if not second:
        # A product is 0 where one of its factors is.
        mono = single(first)
        if mono is None or mono.domain:
            return None if (a, b) == (first, second) else apply("eq", (first, second))
        if mono.coefficient != 1 or len(mono.factors) != 1:
            return complement(_product(complement(_zero(f)) for f in dict.fromkeys(mono.factors)))
        match mono.factors[0]:
            case Apply("exp" | "recip", _):
                return ()
            case Apply("abs" | "sqrt", (x,)):
                return apply("eq", (x, ()))
            case _:
                pass
    for value, other in ((first, second), (second, first)):
        if other == constant(1) and value and is_condition(value):
            return value
    return None if (a, b) == (first, second) else apply("eq", (first, second))


def _zero(factor: MonoFactor) -> Form:
    """Return the condition that a factor is 0."""
    return apply("eq", (of_factor(factor), ()))


def _product(forms: Iterable[Form]) -> Form:
    found = constant(1)
    for form in forms:
        found = times(found, form)
    return found


def _above(a: Form, b: Form, facts: Facts) -> Form | None:
    if is_condition(a) and is_condition(b):
        return times(a, complement(b))
    difference, first, second = _apart(a, b)
    if outer := _positive_factors(difference, facts):
        return apply("gt", (divided(first, UNIT, outer), divided(second, UNIT, outer)))
    if not_negative(scaled(difference, -1), facts):
        return ()
    if difference and not any(m.factors or m.domain for m in difference):
        return constant(1)
    if not_negative(difference, facts):
        return complement(apply("eq", (first, second)))
    for mono in difference:
        spread = _values(mono)
        if spread is None:
            continue
        reducer, values = spread
        rest = tuple(m for m in difference if m is not mono)
        each = [apply("gt", ((*scaled(v, mono.coefficient), *rest), ())) for v in values]
        if (reducer == "max") == (mono.coefficient > 0):
            return complement(_product(map(complement, each)))
        return _product(each)
    if second == () and is_condition(first):
        return first
    if first == constant(1) and is_condition(second):
        return complement(second)
    return None if (a, b) == (first, second) else apply("gt", (first, second))


def _positive_factors(form: Form, facts: Facts) -> list[MonoFactor]:
    """Return the factors above 0 that all addends of a sum have, and that no sum inside is over."""
    if not form:
        return []
    bound = {b for m in form for b in m.binders}
    shared = [f for f in dict.fromkeys(form[0].factors) if all(f in m.factors for m in form)]
    free = (f for f in shared if f.free.isdisjoint(bound))
    return [f for f in free if is_positive(of_factor(f), facts)]


def _values(mono: Mono) -> tuple[str, list[Form]] | None:
    """
    Return whether the factor of a monomial is a `max` or `min`, and of which values; None for others, and those over
    whole dims.
    """
    match mono.factors:
        case (Extreme("max" | "min" as reducer, parts),) if parts and not any(p.binders or p.domain for p in parts):
            found = reducer, [p.body for p in parts]
        case (Apply("relu", (x,)),):
            found = "max", [x, ()]
        case (Apply("abs", (x,)),):
            found = "max", [x, scaled(x, -1)]
        case _:
            return None
    return None if mono.binders or mono.domain else found


def is_condition(form: Form) -> bool:
    """Return whether a value is 0 or 1: a product of conditions."""
    match form:
        case ():
            return True
        case (Mono(coefficient, (), _, factors),):
            return coefficient == 1 and all(isinstance(f, Apply) and f.function in CONDITIONS for f in factors)
        case _:
            return _is_idempotent(form)


def _is_idempotent(form: Form) -> bool:
    """Return whether a sum of products of conditions equals its square, so that its values are 0 and 1."""
    conditions = all(isinstance(f, Apply) and f.function in CONDITIONS for m in form for f in m.factors)
    if not form or len(form) > MOST_CONDITIONS or any(m.binders or m.domain for m in form) or not conditions:
        return False
    square: dict[frozenset[MonoFactor], Fraction] = {}
    plain = {frozenset(m.factors): m.coefficient for m in form}
    for a in form:
        for b in form:
            key = frozenset((*a.factors, *b.factors))
            square[key] = square.get(key, Fraction(0)) + a.coefficient * b.coefficient
    return {k: c for k, c in square.items() if c} == plain


def excluded(function: str, a: Form, b: Form, factors: Sequence[MonoFactor], facts: Facts) -> bool:
    """
    Return whether a product of factors is 0 wherever the condition `a > b` or `a = b` holds, since another factor is.
    `facts` are constraints that hold.
    """
    if function == "eq" and b == ():
        mono = single(a)
        if mono is None or mono.domain or len(mono.factors) != 1 or mono.factors[0] not in factors:
            return False
        # 0 times what is no number is none.
        return all(is_total(of_factor(f), facts) for f in factors)
    other = [Apply("gt", (b, a))] if function == "gt" else [Apply("gt", (a, b)), Apply("gt", (b, a))]
    return any(o in factors for o in other)
