"""
Checks that the target of a rule is a number wherever its source is one: steps cancel what may be no number, such as
1 / 0, as if it were.

What a function of the target asks of a value, such as not to be 0, has to be shown of it, or a function of the source
has to ask the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any

from unity_ir.rules.certificate.laws import Facts, follows, impossible, same_domain, same_factors, symbols_of
from unity_ir.rules.certificate.scalars import nonempty, number_of, sign_of
from unity_ir.rules.certificate.terms import (
    BRANCHES,
    PARTIAL,
    Apply,
    Constraint,
    Factor,
    Form,
    Mono,
    Number,
    Refused,
    Scope,
    as_poly,
    call,
    constant,
    exchanged,
    not_below_zero,
    of_factor,
    one_of,
    one_product,
    substituted,
    times,
)
from unity_ir.rules.poly import number, symbol

CASES = 6
"""Guards that are looked at case by case."""

EXTREMES = ("max", "min")
"""Functions of sets that are no number where there is nothing in them."""


def require_defined(target: Form, source: Form, facts: Facts, looked_at: Sequence[str], cases: int = CASES) -> None:
    """
    Raise `Refused` unless every function of the target that is in `looked_at` is shown to be a number, or is in the
    source, too, wherever it is in the target. `cases` guards on free indices are looked at case by case.
    """
    known = asked(source, facts, tuple(looked_at))
    for one in asked(target, facts, tuple(looked_at)):
        if _holds(one) or impossible(one.facts):
            continue
        alike = [
            [c for c in o.facts if not follows(c, one.facts)] for s in known for o in _at(s, one) if _covers(o, one)
        ]
        if [] in alike:
            continue
        free = [c for missing in alike for c in missing if c.poly.symbols <= symbols_of(facts)]
        if not free or not cases:
            raise Refused(f"the target may be no number where the source is one: {one.value}")
        on = min(free, key=str)
        for case in (on, *on.negated()):
            require_defined(target, source, facts | {case}, looked_at, cases - 1)
        return


def quotient(mono: Mono, here: Facts, said: Mapping[str, Any], source: Form, facts: Facts) -> Form:
    """
    Return a monomial without x / x, or with the sign of x for x / abs(x). Raises `Refused` unless x is not 0 where the
    monomial stands, with the facts `here`, or the source, of which `facts` hold, asks that it is not.
    """
    x, over = one_of(mono.factors, said["factor"]), one_of(mono.factors, said["other"])
    here = here | mono.domain
    if not isinstance(over, Apply) or over.function != "recip":
        raise Refused(f"{over} divides nothing")
    (under,) = over.arguments
    rest = exchanged(mono.factors, max(said["factor"], said["other"]), ())
    left = (replace(mono, factors=exchanged(rest, min(said["factor"], said["other"]), ())),)
    whole, absolute = Apply("", (under,)), Apply("", (Scope((), frozenset(), call("abs", of_factor(x))),))
    if same_factors((Apply("", (Scope((), frozenset(), of_factor(x)),)),), (whole,), here):
        value = constant(1)
    elif same_factors((absolute,), (whole,), here):
        value = sign_of(of_factor(x))
    else:
        raise Refused(f"{over} is not of {x}")
    branches = tuple(f for f in mono.factors if isinstance(f, Apply) and f.function in BRANCHES)
    known = asked(source, facts, PARTIAL)
    for one in (_Asked(a, here, branches) for a in _nonzero(of_factor(x))):
        found = (o for s in known for o in _at(s, one) if _covers(o, one) and all(follows(c, here) for c in o.facts))
        if not _holds(one) and next(found, None) is None:
            raise Refused(f"{x} may be 0")
    return times(left, value)


@dataclass(frozen=True)
class _Asked:
    """States what a function requires of its operand to be a number, and where the function is computed."""

    value: Apply
    """`not 0` or `not below 0` of a value, or else the function itself, which asks to be a number."""
    facts: Facts
    """The facts that hold where it is computed."""
    branches: tuple[Apply, ...]
    """Conditions of the branches of `where` that it is in."""
    binders: tuple[str, ...] = ()
    """Indices that it is computed for each value of."""


@lru_cache(maxsize=256)
def asked(form: Form, facts: Facts, looked_at: tuple[str, ...]) -> tuple[_Asked, ...]:
    """Return all that some functions in a form ask for, with what holds where they are computed."""
    return tuple(_asked(form, looked_at, _Asked(Apply("", ()), facts, ())))


def _asked(form: Form, looked_at: tuple[str, ...], at: _Asked) -> Iterator[_Asked]:
    for mono in form:
        chosen = at.branches + tuple(f for f in mono.factors if isinstance(f, Apply) and f.function in BRANCHES)
        for f in mono.factors:
            if isinstance(f, Apply):
                here = replace(at, facts=at.facts | mono.domain, binders=at.binders + mono.binders)
                here = here if f in chosen else replace(here, branches=chosen)
                yield from (replace(here, value=v) for v in _asked_by(f, looked_at))
                for a in f.arguments:
                    inner = replace(here, facts=here.facts | a.domain, binders=here.binders + a.binders)
                    yield from _asked(a.body, looked_at, inner)


def _asked_by(f: Apply, looked_at: Sequence[str]) -> Iterator[Apply]:
    """Yield what a function asks of its arguments, but not what functions in these ask."""
    if f.function not in looked_at:
        return
    if f.function in EXTREMES:
        yield f
        return
    x = f.arguments[0].body
    exponent = number_of(f.arguments[1].body) if f.function == "pow" else None
    if f.function == "pow" and (exponent is None or exponent.denominator > 2):
        yield f
        return
    if f.function in ("log", "sqrt", "rsqrt") or (exponent is not None and exponent.denominator == 2):
        yield from _not_below(x)
    if f.function in ("recip", "log", "rsqrt") or (exponent is not None and exponent < 0):
        yield from _nonzero(x)


def _nonzero(form: Form) -> Iterator[Apply]:
    """Yield what has to be not 0 for a form not to be: each factor of a product, what a root or a quotient is of."""
    factors = one_product(form)
    if not factors:
        yield Apply("not 0", (Scope((), frozenset(), form),))
    for f in factors:
        match f:
            case Apply("sqrt" | "abs", (x,)):
                yield from _nonzero(x.body)
            case Apply("pow", (x, exponent)) if (n := number_of(exponent.body)) is not None:
                yield from _nonzero(x.body) if n > 0 else ()
            case Apply("recip" | "exp"):
                pass
            case _:
                yield Apply("not 0", (Scope((), frozenset(), of_factor(f)),))


def _not_below(form: Form) -> Iterator[Apply]:
    """Yield what has to be 0 or above for a form to be: of 1 / x, x."""
    match one_product(form):
        case (Apply("recip", (x,)),) if form[0].coefficient > 0:
            yield from _not_below(x.body)
        case _:
            yield Apply("not below 0", (Scope((), frozenset(), form),))


def _holds(one: _Asked) -> bool:
    """Return whether what is asked is shown of the value itself."""
    if one.value.function in EXTREMES:
        return any(nonempty(p, lambda c: follows(c, one.facts)) for p in one.value.arguments)
    if one.value.function == "not below 0":
        return not_below_zero(one.value.arguments[0].body, lambda c: follows(c, one.facts))
    return one.value.function == "not 0" and _above_zero(one.value.arguments[0].body, one.facts)


def _at(source: _Asked, target: _Asked) -> Iterator[_Asked]:
    """Yield what is asked in the source at indices of what is in the target: it is asked for each value of its own."""
    used = [b for b in source.binders if b in source.value.free | symbols_of(source.facts)]
    indices = sorted(s for s in symbols_of(target.facts) if "#" in s) if len(used) <= MOST_INDICES else []
    for chosen in permutations(indices, len(used)) if used else [()]:
        values = {b: symbol(s) for b, s in zip(used, chosen, strict=True)}
        try:
            value, *branches = (substituted(f, values) for f in (source.value, *source.branches))
        except Refused:
            continue
        facts = frozenset(c.substitute(values) for c in source.facts)
        made = tuple(b for b in branches if isinstance(b, Apply))
        if isinstance(value, Apply):
            yield _Asked(value, facts, made)


MOST_INDICES = 3
"""Indices of what is asked in the source for which those of the target are tried."""


def _covers(source: _Asked, target: _Asked) -> bool:
    """Return whether what is asked in the target holds wherever what is asked in the source does."""
    facts, one, other = target.facts, source.value, target.value
    if not all(any(same_factors((b,), (c,), facts) for c in target.branches) for b in source.branches):
        return False
    if one.function in EXTREMES and other.function in EXTREMES:
        # Of nothing there is no maximum, whatever the values would be.
        return all(any(same_domain(p, q, facts) for q in other.arguments) for p in one.arguments)
    return same_factors((other,), (one,), facts)


def _above_zero(form: Form, facts: Facts) -> bool:
    """Return whether a value is above 0: a sum of what is not below it, one addend of which is above it."""
    size = as_poly(form)
    if size is not None:
        return follows(Constraint(size - 1), facts)
    return not_below_zero(form, lambda c: follows(c, facts)) and any(
        m.coefficient > 0 and all(_factor_above(f, facts | m.domain) for f in m.factors) and _somewhere(m, facts)
        for m in form
    )


def _factor_above(factor: Factor, facts: Facts) -> bool:
    match factor:
        case Number(poly):
            return follows(Constraint(poly - 1), facts)
        case Apply("exp"):
            return True
        case Apply("max" | "maximum", parts):
            return any(not p.binders and not p.domain and _above_zero(p.body, facts) for p in parts)
        case _:
            return False


def _somewhere(mono: Mono, facts: Facts) -> bool:
    """Return whether a domain is shown to have a point: that where all indices are 0."""
    values = dict.fromkeys(mono.binders, number(0))
    return all(follows(c.substitute(values), facts) for c in mono.domain)
