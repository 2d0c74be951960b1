"""
Reciprocals, roots and logarithms of sums (forms): what all addends have goes outside.

    1 / sum over j of exp(x[j] - m) = exp(m) / sum over j of exp(x[j])
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import isqrt

from unity_ir.rules.proof.forms import (
    UNIT,
    Apply,
    Form,
    Mono,
    MonoFactor,
    apply,
    constant,
    divided,
    of_factor,
    scaled,
    times,
)
from unity_ir.rules.proof.signs import not_negative, single
from unity_ir.rules.proof.solver import Facts


def _common(form: Form) -> tuple[Fraction, list[MonoFactor]]:
    """
    Return (coefficient, factors) by which all addends of a sum may be divided: the coefficient of the first, and the
    factors that all have, and that no sum inside is over.
    """
    first = min(form, key=lambda m: Mono(UNIT, m.binders, m.domain, m.factors).text)
    found: list[MonoFactor] = []
    for factor in first.factors:
        shared = all(m.factors.count(factor) > found.count(factor) and factor.free.isdisjoint(m.binders) for m in form)
        if shared:
            found.append(factor)
    return first.coefficient, found


def reciprocal(x: Form) -> Form | None:
    """1 / (c a b + c a d) = 1 / c 1 / a 1 / (b + d), and 1 / (1 + exp(a)) = (1 - tanh(a / 2)) / 2."""
    if not x or single(x) is not None:
        return None
    if (tanh := _logistic(x)) is not None:
        return tanh
    coefficient, factors = _common(x)
    if coefficient == 1 and not factors:
        return None
    found = apply("recip", (divided(x, coefficient, factors),))
    for f in factors:
        found = times(found, apply("recip", (of_factor(f),)))
    return scaled(found, 1 / coefficient)


def _logistic(x: Form) -> Form | None:
    if len(x) != 2 or any(m.binders or m.domain for m in x):
        return None
    one, other = sorted(x, key=lambda m: len(m.factors))
    exponentials = [f for f in other.factors if isinstance(f, Apply) and f.function == "exp"]
    if one.factors or one.coefficient != other.coefficient or len(exponentials) < len(other.factors):
        return None
    half = scaled(tuple(m for f in exponentials for m in f.arguments[0]), Fraction(1, 2))
    return scaled((*constant(1), *scaled(apply("tanh", (half,)), -1)), 1 / (2 * one.coefficient))


def logarithm(x: Form, facts: Facts) -> Form | None:
    """log(exp(a) b / c) = a + log(b) - log(c), for c not negative; log(sqrt(a)) = log(a) / 2."""
    mono = single(x)
    if mono is None:
        # What all addends have.
        _, factors = _common(x) if x else (UNIT, [])
        outer = [f for f in factors if isinstance(f, Apply) and f.function == "exp"]
        return (
            (*apply("log", (divided(x, UNIT, outer),)), *(m for f in outer for m in f.arguments[0])) if outer else None
        )
    if mono.domain:
        return None
    match mono:
        case Mono(coefficient, (), _, (Apply("sqrt", (a,)),)) if coefficient == 1:
            return scaled(apply("log", (a,)), Fraction(1, 2))
        case _:
            pass
    found: list[Mono] = []
    rest: list[MonoFactor] = []
    for factor in mono.factors:
        match factor:
            case Apply("exp", (a,)):
                found += a
            case Apply("recip", (c,)) if not_negative(c, facts):
                found += scaled(apply("log", (c,)), -1)
            case _:
                rest.append(factor)
    if not found:
        return None
    left: Form = (Mono(mono.coefficient, (), frozenset(), tuple(rest)),)
    return (*found, *(apply("log", (left,)) if rest or mono.coefficient != 1 else ()))


def root(x: Form, facts: Facts) -> Form | None:
    """
    sqrt(exp(a) b) = exp(a / 2) sqrt(b), sqrt(4 b) = 2 sqrt(b), sqrt(a a b) = |a| sqrt(b) for b that is not negative:
    where it is, and a is 0, the root is 0, and sqrt(b) no number.
    """
    if not x or any(m.domain and not m.binders for m in x):
        return None
    coefficient, factors = _common(x)
    exponents = [f.arguments[0] for f in factors if isinstance(f, Apply) and f.function == "exp"]
    outer: list[MonoFactor] = [f for f in factors if isinstance(f, Apply) and f.function == "exp"]
    pairs = [f for f, n in Counter(f for f in factors if f not in outer).items() for _ in range(n // 2)]
    if pairs and not_negative(divided(x, abs(coefficient), [*outer, *pairs, *pairs]), facts):
        outer += [*pairs, *pairs]
    else:
        pairs = []
    number = _square_root(coefficient)
    if not outer and number in (None, 1):
        return None
    rest = divided(x, coefficient if number else UNIT, outer)
    found = rest if rest == constant(1) else apply("sqrt", (rest,))
    for f in pairs:
        found = times(found, apply("abs", (of_factor(f),)))
    for exponent in exponents:
        found = times(found, apply("exp", (scaled(exponent, Fraction(1, 2)),)))
    return scaled(found, number or 1)


def _square_root(of: Fraction) -> Fraction | None:
    """Return the square root of a number above 0 if it is a fraction."""
    if of <= 0:
        return None
    root = Fraction(isqrt(of.numerator), isqrt(of.denominator))
    return root if root * root == of else None
