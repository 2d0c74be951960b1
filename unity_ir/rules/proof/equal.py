"""
Decides whether two forms (values of tensor elements, as sums of monomials) are equal for all sizes and indices.

Guards on free indices (for instance, which operand of a concatenation an element comes from) are split into cases. In
each case monomials are grouped by their factors, and the monomials of a group must cancel: as they stand, or counted at
every point of their domains. A group that does not cancel leaves the question undecided, never answered wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

from unity_ir.rules.poly import symbol
from unity_ir.rules.proof.forms import (
    Apply,
    Constraint,
    Extreme,
    Form,
    Mono,
    MonoFactor,
    Quantified,
    Read,
    SymbolValue,
    renamed_bound,
    scaled,
    substitute_factor,
    with_fresh_binders,
)
from unity_ir.rules.proof.normal import normal
from unity_ir.rules.proof.piecewise import MOST_MONOMIALS, cleared, denominators, nonzero_denominators, taken_apart
from unity_ir.rules.proof.signs import is_positive
from unity_ir.rules.proof.solver import Facts

T = TypeVar("T")

CASES = 64
"""Cases a proof may split into."""

BINDERS = 5
"""Bound indices of one sum all of whose orders are tried."""

COMMUTATIVE = ("+", "*")
"""Functions of two arguments in either order: arithmetic, where it is told how it rounds."""


class Undecided(Exception):
    """Raised where a proof is given up, without a verdict on the rule; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Equality:
    """The answer of `equal`: whether equality is proved, and if not, the reason."""

    proved: bool
    reason: str = ""


def equal(left: Form, right: Form, facts: Facts, where_left: bool = False) -> Equality:
    """
    Try to prove that two forms (values of tensor elements as sums of monomials) are equal for all values of their
    symbols that satisfy the constraints `facts`; return whether that was proved, and otherwise why not.

    With `where_left`, they need not be equal where `left` is no number, since it divides by 0.
    """
    if left == right:
        return Equality(True)
    difference = (*left, *scaled(right, -1))
    try:
        rest = _left(difference, facts, left if where_left else ())
    except Undecided as reason:
        return Equality(False, str(reason))
    return Equality(False, f"these do not cancel: {'; '.join(m.text for m in rest[:4])}") if rest else Equality(True)


def _left(form: Form, facts: Facts, divisor: Form, again: bool = True) -> list[Mono]:
    """
    Return the monomials left, in the first case where there are some, of a form that should be 0 wherever `divisor` is
    a number.
    """
    for case, found in _cases(form, facts):
        rest = _cancelled(found, case)
        if again and any(True for _ in open_guards(tuple(rest), case)):
            # What was summed over an index that is known now has guards on free indices, which were not split yet.
            rest = _left(tuple(rest), case, divisor, again=False)
        if rest and again:
            rest = _on_second_look(rest, case, divisor)
        if rest:
            return rest
    return []


def _on_second_look(rest: list[Mono], facts: Facts, divisor: Form) -> list[Mono]:
    """Return the monomials left of those that normal forms leave, with denominators cleared, and by order of values."""
    positive = [d for d in denominators(tuple(rest)) if is_positive(d, facts)]
    form = cleared(tuple(rest), [*nonzero_denominators(normal(divisor, facts)), *positive])
    if len(form) > MOST_MONOMIALS:
        return rest
    return rest if any(_cancelled(case, facts) for case in taken_apart(form, facts)) else []


def _cases(form: Form, facts: Facts) -> Iterator[tuple[Facts, Form]]:
    """Yield each case: facts that decide every guard on free indices, and the form under these facts."""
    pending = [(facts, form)]
    made = 0
    while pending:
        case, before = pending.pop()
        found = settled(before, case)
        guard = next(open_guards(found, case), None)
        if guard is None:
            yield case, found
            continue
        for constraints in ((guard,), *((c,) for c in guard.negated)):
            if not case.contradict(constraints):
                pending.append((case.also(constraints), found))
                made += 1
        if made > CASES:
            raise Undecided(f"more than {CASES} cases of guards")


def open_guards(form: Form, facts: Facts, bound: frozenset[str] = frozenset()) -> Iterator[Constraint]:
    """
    Yield the constraints on free symbols, not in `bound`, in a form (a sum of monomials), at any depth, that `facts` do
    not imply.
    """
    for mono in form:
        yield from _open(mono.domain, facts, bound | set(mono.binders))
        for factor in mono.factors:
            match factor:
                case Apply(_, arguments):
                    for a in arguments:
                        yield from open_guards(a, facts, bound | set(mono.binders))
                case Extreme(_, parts):
                    for p in parts:
                        inner = bound | set(mono.binders) | set(p.binders)
                        yield from _open(p.domain, facts, inner)
                        yield from open_guards(p.body, facts, inner)
                case Read() | SymbolValue():
                    pass


def _open(domain: frozenset[Constraint], facts: Facts, bound: frozenset[str]) -> Iterator[Constraint]:
    about = [c for c in domain if c.poly.symbols.isdisjoint(bound)]
    for c in sorted(about, key=str) if len(about) > 1 else about:
        if not facts.imply(c):
            yield c


def settled(form: Form, facts: Facts) -> Form:
    """
    Return a form (a sum of monomials) without guards that the constraints `facts` imply, and without the monomials
    whose guards fail.
    """
    out: list[Mono] = []
    for mono in form:
        if facts.contradict(mono.domain):
            continue
        inner = facts.also(mono.domain)
        factors = _kept(mono.factors, [_settled_factor(f, inner) for f in mono.factors])
        hold = [c for c in mono.domain if _free_fact(c, mono, facts)]
        if hold or factors is not mono.factors:
            mono = Mono(mono.coefficient, mono.binders, mono.domain.difference(hold), factors)
        out.append(mono)
    return _kept(form, out)


def _kept(before: tuple[T, ...], after: Sequence[T]) -> tuple[T, ...]:
    """Return `after`, as the very tuple `before` if nothing in it is new, so that what is known of it is not lost."""
    same = len(before) == len(after) and all([a is b for a, b in zip(before, after, strict=True)])
    return before if same else tuple(after)


def _free_fact(c: Constraint, mono: Mono, facts: Facts) -> bool:
    return c.poly.symbols.isdisjoint(mono.binders) and facts.imply(c)


def _settled_factor(factor: MonoFactor, facts: Facts) -> MonoFactor:
    match factor:
        case Apply(function, arguments):
            found = _kept(arguments, [settled(a, facts) for a in arguments])
            return factor if found is arguments else Apply(function, found)
        case Extreme(reducer, parts):
            kept = [p for p in parts if not facts.contradict(p.domain)]
            done = (Quantified(p.binders, p.domain, settled(p.body, facts.also(p.domain))) for p in kept)
            return Extreme(reducer, tuple(done))
        case _:
            return factor


def _cancelled(form: Form, facts: Facts) -> list[Mono]:
    """Return the monomials left of a form that should be 0."""
    monos = [m for m in normal(form, facts) if not facts.contradict(m.domain)]
    classes: list[tuple[Mono, list[Mono]]] = []
    for mono in monos:
        for representative, members in classes:
            same = _as(representative, mono, facts)
            if same is not None:
                members.append(same)
                break
        else:
            # With binders nothing else has: other monomials get them, whose own inner binders they must not meet.
            mono = with_fresh_binders(mono)
            classes.append((mono, [mono]))
    left: list[Mono] = []
    for _, members in classes:
        denominator = 1
        for m in members:
            denominator *= m.coefficient.denominator
        weighted = [(int(m.coefficient * denominator), m.domain) for m in members]
        if len({d for _, d in weighted}) == 1 and sum(w for w, _ in weighted) == 0:
            continue
        if not facts.weights_cancel(weighted):
            left += members
    return left


def _shape(factor: MonoFactor) -> tuple[object, ...]:
    match factor:
        case Read(tensor, indices):
            return ("read", tensor, len(indices))
        case SymbolValue():
            return ("value",)
        case Apply(function, arguments):
            return ("apply", function, len(arguments))
        case Extreme(reducer, parts):
            return ("extreme", reducer, len(parts))


def _as(one: Mono, other: Mono, facts: Facts) -> Mono | None:
    """
    Return `other` with the binders of `one`, if its factors then equal those of `one` wherever `one` is not 0; else
    None.
    """
    if len(one.binders) != len(other.binders) or len(one.factors) != len(other.factors):
        return None
    if sorted(map(_shape, one.factors), key=repr) != sorted(map(_shape, other.factors), key=repr):
        return None
    for names in _orders(one.binders):
        values = {old: symbol(new) for old, new in zip(other.binders, names, strict=True)}
        domain = frozenset(c.substitute(values) for c in other.domain)
        factors = [substitute_factor(f, values) for f in other.factors]
        inner = facts.also(domain)
        if _pair_up(list(one.factors), factors, inner):
            return Mono(other.coefficient, one.binders, domain, one.factors)
    return None


def _orders(binders: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """
    Yield the orders of bound indices to try; of many, only the order of their names, which normal forms give by
    occurrence.
    """
    return permutations(binders) if len(binders) <= BINDERS else iter((binders,))


def _pair_up(left: list[MonoFactor], right: list[MonoFactor], facts: Facts) -> bool:
    """Return whether the factors are equal in some order."""
    if not left:
        return True
    first, rest = left[0], left[1:]
    for i, factor in enumerate(right):
        if _same(first, factor, facts) and _pair_up(rest, [*right[:i], *right[i + 1 :]], facts):
            return True
    return False


def _same(one: MonoFactor, other: MonoFactor, facts: Facts) -> bool:
    if _shape(one) != _shape(other):
        return False
    if one.text == other.text:
        return True
    match one, other:
        case Read(_, a), Read(_, b):
            return all(x == y or facts.imply(Constraint(x - y, equal=True)) for x, y in zip(a, b, strict=True))
        case SymbolValue(a), SymbolValue(b):
            return facts.imply(Constraint(symbol(a) - symbol(b), equal=True))
        case Apply(function, a), Apply(_, b):
            orders = (b, b[::-1]) if function in COMMUTATIVE else (b,)
            return any(all(_zero(x, y, facts) for x, y in zip(a, o, strict=True)) for o in orders)
        case Extreme(_, a), Extreme(_, b):
            return _same_extremes(a, b, facts)
        case _:
            return False


def _zero(left: Form, right: Form, facts: Facts) -> bool:
    return not _cancelled((*left, *scaled(right, -1)), facts)


def _same_extremes(left: Sequence[Quantified], right: Sequence[Quantified], facts: Facts) -> bool:
    """Return whether every part on the left has one on the right: the same values over the same domain."""
    if len(left) != len(right):
        return False
    return any(all(_same_bound(a, b, facts) for a, b in zip(left, order, strict=True)) for order in permutations(right))


def _same_bound(one: Quantified, other: Quantified, facts: Facts) -> bool:
    if len(one.binders) != len(other.binders):
        return False
    one = renamed_bound(one)
    for names in _orders(one.binders):
        values = {old: symbol(new) for old, new in zip(other.binders, names, strict=True)}
        domain = frozenset(c.substitute(values) for c in other.domain)
        alike = one.domain == domain or (
            facts.also(one.domain).imply_all(domain) and facts.also(domain).imply_all(one.domain)
        )
        if not alike:
            continue
        body = tuple(
            Mono(
                m.coefficient,
                m.binders,
                frozenset(c.substitute(values) for c in m.domain),
                tuple(substitute_factor(f, values) for f in m.factors),
            )
            for m in other.body
        )
        if _zero(one.body, body, facts.also(one.domain)):
            return True
    return False
