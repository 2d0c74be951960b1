"""
Terms of certificates: elements of tensors, at symbolic indices and sizes, as sums of monomials

    coefficient * SUM over binders in domain of PRODUCT of factors

The checker has terms of its own, so that no code of the prover is trusted. Sums and products are multiplied out as
terms are made, which is all that the laws of commutative rings are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias, TypeVar

from unity_ir.rules.poly import Poly, number, symbol
from unity_ir.tdl.functions import CONDITIONS

T = TypeVar("T")


class Refused(Exception):
    """Raised where a certificate is not accepted; the message says which step and why."""


@dataclass(frozen=True)
class Constraint:
    """A condition on integers: `poly >= 0`, or, if `equal`, `poly == 0`."""

    poly: Poly
    equal: bool = False

    def substitute(self, values: Mapping[str, Poly]) -> Constraint:
        """Return the constraint with symbols replaced by polynomials."""
        return Constraint(self.poly.substitute(values), self.equal)

    def negated(self) -> tuple[Constraint, ...]:
        """Return the opposite as disjoint alternatives: two of an equation, `p <= -1` and `p >= 1`."""
        return (Constraint(-self.poly - 1), Constraint(self.poly - 1))[: 1 + self.equal]

    def __str__(self) -> str:
        return f"{self.poly} {'==' if self.equal else '>='} 0"


def box(name: str, size: Poly) -> tuple[Constraint, Constraint]:
    """Return the constraints `0 <= name < size`."""
    return Constraint(symbol(name)), Constraint(size - 1 - symbol(name))


@dataclass(frozen=True)
class Read:
    """An element of an input, or, without indices, a number that an attribute of the rule stands for."""

    tensor: str
    indices: tuple[Poly, ...]

    @property
    def free(self) -> frozenset[str]:
        """The names of the symbols in it."""
        return frozenset[str]().union(*(i.symbols for i in self.indices))

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(map(str, self.indices))}]"


@dataclass(frozen=True)
class Number:
    """An integer that sizes and indices give, as a value."""

    poly: Poly

    @property
    def free(self) -> frozenset[str]:
        """The names of the symbols in it."""
        return self.poly.symbols

    def __str__(self) -> str:
        return f"({self.poly})"


@dataclass(frozen=True)
class Scope:
    """A body, a sum of monomials, at all values of `binders` at which all constraints of `domain` hold."""

    binders: tuple[str, ...]
    domain: frozenset[Constraint]
    body: Form

    @cached_property
    def free(self) -> frozenset[str]:
        """The names of the symbols in it that are not bound."""
        found = frozenset[str]().union(*(c.poly.symbols for c in self.domain), *(m.free for m in self.body))
        return found.difference(self.binders)

    def __str__(self) -> str:
        return f"{_over(self.binders, self.domain)}{text(self.body)}"


@dataclass(frozen=True)
class Apply:
    """
    A function of values: a scalar function of its arguments, in order, or a maximum, minimum or product (`max`, `min`,
    `prod`) of all values in its arguments. Arguments of scalar functions bind nothing.
    """

    function: str
    arguments: tuple[Scope, ...]

    @cached_property
    def free(self) -> frozenset[str]:
        """The names of the symbols in it that are not bound."""
        return frozenset[str]().union(*(a.free for a in self.arguments))

    def __str__(self) -> str:
        return f"{self.function}({'; '.join(map(str, self.arguments))})"


Factor: TypeAlias = Read | Number | Apply

TRUTH = (*CONDITIONS, "as bool")
"""Functions whose values are 0 and 1."""

REDUCERS = ("max", "min", "prod")
"""Functions of sets of values."""


@dataclass(frozen=True)
class Mono:
    """An addend: `coefficient * SUM over binders in domain of PRODUCT of factors`."""

    coefficient: Fraction
    binders: tuple[str, ...] = ()
    domain: frozenset[Constraint] = frozenset()
    factors: tuple[Factor, ...] = ()

    @cached_property
    def free(self) -> frozenset[str]:
        """The names of the symbols in it that are not bound."""
        found = frozenset[str]().union(*(c.poly.symbols for c in self.domain), *(f.free for f in self.factors))
        return found.difference(self.binders)

    def __str__(self) -> str:
        return f"{self.coefficient} {_over(self.binders, self.domain)}{' '.join(map(str, self.factors))}"


Form: TypeAlias = tuple[Mono, ...]

Holds: TypeAlias = Callable[[Constraint], bool]
"""Whether a constraint on integers holds at some place."""

Axiom: TypeAlias = Callable[[Apply, Holds], Form]
"""From a function's value, and what holds there, to the form that equals it; raises `Refused`."""


def _over(binders: tuple[str, ...], domain: frozenset[Constraint]) -> str:
    return f"[{', '.join(binders)} | {', '.join(sorted(map(str, domain)))}] " if binders or domain else ""


def text(form: Form) -> str:
    """Return a form as text."""
    return " + ".join(map(str, form)) or "0"


def constant(value: Fraction | int) -> Form:
    """Return the form of a number."""
    return (Mono(Fraction(value)),) if value else ()


def of_factor(factor: Factor) -> Form:
    """Return the form that is one factor."""
    return (Mono(Fraction(1), (), frozenset(), (factor,)),)


def of_poly(poly: Poly) -> Form:
    """Return the form of an integer that sizes and indices give."""
    return constant(poly.constant) if poly.constant is not None else of_factor(Number(poly))


def as_poly(form: Form) -> Poly | None:
    """Return the integer polynomial of sizes and indices that a form is; None if it is none."""
    total = number(0)
    for m in form:
        if m.binders or m.domain or m.coefficient.denominator != 1:
            return None
        term = number(int(m.coefficient))
        for f in m.factors:
            if not isinstance(f, Number):
                return None
            term = term * f.poly
        total = total + term
    return total


def call(function: str, *arguments: Form) -> Form:
    """Return the form of a scalar function of values."""
    return of_factor(Apply(function, tuple(Scope((), frozenset(), a) for a in arguments)))


def scaled(form: Form, by: Fraction | int) -> Form:
    """Return a form times a number."""
    return tuple(replace(m, coefficient=m.coefficient * by) for m in form) if by else ()


def summed(form: Form, binders: Iterable[str], domain: Iterable[Constraint]) -> Form:
    """Return the sum of a form over `binders` in `domain`; without binders, the form where the constraints hold."""
    new, where = tuple(binders), frozenset(domain)
    for m in form:
        if set(new) & set(m.binders):
            raise Refused(f"{new} are bound twice")
    return tuple(Mono(m.coefficient, new + m.binders, m.domain | where, m.factors) for m in form)


def times(left: Form, right: Form) -> Form:
    """Return the product of two forms, multiplied out. Binders of one must not be symbols of the other."""
    out: list[Mono] = []
    for a in left:
        for b in right:
            if set(a.binders) & (b.free | set(b.binders)) or set(b.binders) & a.free:
                raise Refused(f"a product of two sums captures an index: {a} and {b}")
            coefficient, domain = a.coefficient * b.coefficient, a.domain | b.domain
            out.append(Mono(coefficient, a.binders + b.binders, domain, a.factors + b.factors))
    return tuple(out)


def product(left: Form, right: Form) -> Form:
    """
    Return `times`, and what of either factor may be no number, with 0 as its coefficient, where the other is 0 or is in
    a branch of `where`: it is computed all the same.
    """
    others = ((left, right), (right, left))
    return (*times(left, right), *(m for a, b in others if not b or mentions(b, BRANCHES) for m in computed(a)))


def computed(form: Form) -> Form:
    """Return the monomials of a form that may be no number, with 0 as their coefficient."""
    return tuple(replace(m, coefficient=Fraction(0)) for m in form if mentions((m,), PARTIAL))


BRANCHES = ("if", "if not")
"""Functions of a condition: 1 or 0 in the branches of a `where`."""

PARTIAL = ("recip", "log", "sqrt", "rsqrt", "pow")
"""Functions that are no number at some values."""


def mentions(form: Form, functions: Sequence[str]) -> bool:
    """Return whether one of some functions is in a form, at any depth."""
    applied = [f for m in form for f in m.factors if isinstance(f, Apply)]
    return any(f.function in functions or any(mentions(a.body, functions) for a in f.arguments) for f in applied)


def one_product(form: Form) -> tuple[Factor, ...]:
    """Return the factors of a form that is a multiple, other than 0, of one product, without sums; else none."""
    alone = len(form) == 1 and form[0].coefficient != 0 and not form[0].binders and not form[0].domain
    return form[0].factors if alone else ()


def not_below_zero(form: Form, holds: Holds) -> bool:
    """Return whether a value is shown to be 0 or above: it has only products of squares and of what is."""
    return all(
        m.coefficient >= 0 and all(m.factors.count(f) % 2 == 0 or _never_below_zero(f, holds) for f in m.factors)
        for m in form
    )


def _never_below_zero(factor: Factor, holds: Holds) -> bool:
    match factor:
        case Number(poly):
            return holds(Constraint(poly))
        case Apply("max" | "maximum", parts):
            return any(not p.binders and not p.domain and not_below_zero(p.body, holds) for p in parts)
        case Apply(function):
            return function in NEVER_BELOW_ZERO
        case _:
            return False


NEVER_BELOW_ZERO = (*TRUTH, "exp", "relu", "abs", "sqrt", "philox")
"""Functions that are 0 or above wherever they are a number."""


def one_of(items: Sequence[T], at: object) -> T:
    """Return the item that a step names by its number, from 0. Raises `Refused` where there is none."""
    if not isinstance(at, int) or not 0 <= at < len(items):
        raise Refused(f"there is no number {at} of {len(items)}")
    return items[at]


def exchanged(items: tuple[T, ...], at: int, new: Iterable[T]) -> tuple[T, ...]:
    """Return items with one of them replaced by any number of others."""
    one_of(items, at)
    return (*items[:at], *new, *items[at + 1 :])


# --- substitution ----------------------------------------------------------------------------------------------------


def substitute(form: Form, values: Mapping[str, Poly]) -> Form:
    """
    Substitute polynomials for free symbols of a form. Raises `Refused` where a symbol of theirs would become bound.
    """
    return tuple(_mono(m, values) for m in form)


def _mono(mono: Mono, values: Mapping[str, Poly]) -> Mono:
    used = _seen(mono.binders, mono.free, values)
    if not used:
        return mono
    return replace(
        mono,
        domain=frozenset(c.substitute(used) for c in mono.domain),
        factors=tuple(substituted(f, used) for f in mono.factors),
    )


def _seen(binders: tuple[str, ...], free: frozenset[str], values: Mapping[str, Poly]) -> dict[str, Poly]:
    used = {s: p for s, p in values.items() if s in free}
    captured = {s for p in used.values() for s in p.symbols}.intersection(binders)
    if captured:
        raise Refused(f"{', '.join(sorted(captured))} would be captured")
    return used


def substituted(factor: Factor, values: Mapping[str, Poly]) -> Factor:
    """Substitute polynomials for free symbols of a factor. Raises `Refused` where one would become bound."""
    match factor:
        case Read(tensor, indices):
            return Read(tensor, tuple(i.substitute(values) for i in indices))
        case Number(poly):
            return Number(poly.substitute(values))
        case Apply(function, arguments):
            return Apply(function, tuple(_scope(a, values) for a in arguments))


def _scope(scope: Scope, values: Mapping[str, Poly]) -> Scope:
    used = _seen(scope.binders, scope.free, values)
    if not used:
        return scope
    return Scope(scope.binders, frozenset(c.substitute(used) for c in scope.domain), substitute(scope.body, used))


def rebound(mono: Mono, names: Mapping[str, str]) -> Mono:
    """Return a monomial with other names for its binders. Raises `Refused` where a name is taken."""
    new = tuple(names.get(b, b) for b in mono.binders)
    if len(set(new)) < len(new) or set(new) & mono.free:
        raise Refused(f"{', '.join(new)} are taken")
    values = {old: symbol(name) for old, name in zip(mono.binders, new, strict=True) if old != name}
    inner = _mono(replace(mono, binders=()), values)
    return replace(inner, binders=new)
