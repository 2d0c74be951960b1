"""
Checks that the target of a rule is a number wherever its source is one: steps cancel what may be no number, such as
1 / 0, as if it were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from unity_ir.rules.certificate.laws import Facts, follows, impossible, same_domain, same_factors, symbols_of
from unity_ir.rules.certificate.scalars import nonempty
from unity_ir.rules.certificate.terms import (
    BRANCHES,
    Apply,
    Constraint,
    Factor,
    Form,
    Mono,
    Number,
    Refused,
    as_poly,
    substituted,
)
from unity_ir.rules.poly import number, symbol

CASES = 6
"""Guards that are looked at case by case."""

EXTREMES = ("max", "min")
"""Functions of sets that are no number where there is nothing in them."""

NEVER_BELOW_ZERO = ("exp", "relu", "abs", "sqrt", "gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not", "philox")
"""Functions that are 0 or above wherever they are a number."""


def require_defined(target: Form, source: Form, facts: Facts, looked_at: Sequence[str], cases: int = CASES) -> None:
    """
    Raise `Refused` unless every function of the target that is in `looked_at` is shown to be a number, or is in the
    source, too, wherever it is in the target. `cases` guards on free indices are looked at case by case.
    """
    known = list(_occurrences(source, facts, looked_at))
    for one in _occurrences(target, facts, looked_at):
        if _is_number(one.applied, one.facts) or impossible(one.facts):
            continue
        alike = [
            [c for c in o.facts if not follows(c, one.facts)] for s in known for o in _at(s, one) if _covers(o, one)
        ]
        if [] in alike:
            continue
        free = [c for missing in alike for c in missing if c.poly.symbols <= symbols_of(facts)]
        if not free or not cases:
            raise Refused(f"the target may be no number where the source is one: {one.applied}")
        on = min(free, key=str)
        for case in (on, *on.negated()):
            require_defined(target, source, facts | {case}, looked_at, cases - 1)
        return


def _is_number(applied: Apply, facts: Facts) -> bool:
    if applied.function in EXTREMES:
        return any(nonempty(p, lambda c: follows(c, facts)) for p in applied.arguments)
    if applied.function == "pow":
        exponent = as_poly(applied.arguments[1].body)
        return exponent is not None and exponent.constant is not None and exponent.constant >= 0
    return _above_zero(applied.arguments[0].body, facts)


@dataclass(frozen=True)
class _Occurrence:
    """A function that may be no number, where it is computed."""

    applied: Apply
    facts: Facts
    """The facts that hold where it is computed."""
    branches: tuple[Apply, ...]
    """Conditions of the branches of `where` that it is in."""
    binders: tuple[str, ...]
    """Indices that it is computed for each value of."""


def _at(source: _Occurrence, target: _Occurrence) -> Iterator[_Occurrence]:
    """Yield an occurrence in the source at indices of one in the target: it is computed for each value of its own."""
    used = [b for b in source.binders if b in source.applied.free | symbols_of(source.facts)]
    indices = sorted(s for s in symbols_of(target.facts) if "#" in s) if len(used) <= MOST_INDICES else []
    for chosen in permutations(indices, len(used)) if used else [()]:
        values = {b: symbol(s) for b, s in zip(used, chosen, strict=True)}
        try:
            applied, *branches = (substituted(f, values) for f in (source.applied, *source.branches))
        except Refused:
            continue
        facts = frozenset(c.substitute(values) for c in source.facts)
        made = tuple(b for b in branches if isinstance(b, Apply))
        if isinstance(applied, Apply):
            yield _Occurrence(applied, facts, made, ())


MOST_INDICES = 3
"""Indices of an occurrence for which those of another are tried."""


def _covers(source: _Occurrence, target: _Occurrence) -> bool:
    """Return whether an occurrence in the source, wherever that in the target is none, is no number either."""
    facts, one, other = target.facts, source.applied, target.applied
    if not all(any(same_factors((b,), (c,), facts) for c in target.branches) for b in source.branches):
        return False
    if one.function in EXTREMES and other.function in EXTREMES:
        # Of nothing there is no maximum, whatever the values would be.
        return all(any(same_domain(p, q, facts) for q in other.arguments) for p in one.arguments)
    return same_factors((other,), (one,), facts)


def _occurrences(
    form: Form,
    facts: Facts,
    looked_at: Sequence[str],
    branches: tuple[Apply, ...] = (),
    binders: tuple[str, ...] = (),
) -> Iterator[_Occurrence]:
    """Yield each of some functions, with what holds where it is computed."""
    for mono in form:
        here = facts | mono.domain
        chosen = branches + tuple(f for f in mono.factors if isinstance(f, Apply) and f.function in BRANCHES)
        for f in mono.factors:
            if isinstance(f, Apply):
                inside = branches if f in chosen else chosen
                if f.function in looked_at:
                    yield _Occurrence(f, here, inside, binders + mono.binders)
                for a in f.arguments:
                    own = binders + mono.binders + a.binders
                    yield from _occurrences(a.body, here | a.domain, looked_at, inside, own)


def _above_zero(form: Form, facts: Facts) -> bool:
    """Return whether a value is above 0: a sum of what is not below it, one addend of which is above it."""
    size = as_poly(form)
    if size is not None:
        return follows(Constraint(size - 1), facts)
    return all(_sign(m, facts, 0) for m in form) and any(_sign(m, facts, 1) and _somewhere(m, facts) for m in form)


def _sign(mono: Mono, facts: Facts, least: int) -> bool:
    """Return whether an addend is at least 0, or, for `least` 1, above 0 wherever its domain holds."""
    return mono.coefficient > 0 and all(_factor_sign(f, facts | mono.domain, least) for f in mono.factors)


def _factor_sign(factor: Factor, facts: Facts, least: int) -> bool:
    match factor:
        case Number(poly):
            return follows(Constraint(poly - least), facts)
        case Apply("exp"):
            return True
        case Apply("max" | "maximum", parts):
            return any(not p.binders and not p.domain and _above_zero(p.body, facts) for p in parts)
        case Apply(function, _):
            return not least and function in NEVER_BELOW_ZERO
        case _:
            return False


def _somewhere(mono: Mono, facts: Facts) -> bool:
    """Return whether a domain is shown to have a point: that where all indices are 0."""
    values = dict.fromkeys(mono.binders, number(0))
    return all(follows(c.substitute(values), facts) for c in mono.domain)
