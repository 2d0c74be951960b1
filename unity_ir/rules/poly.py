"""Multivariate polynomials with integer coefficients: sizes, degrees and indices in rules and proofs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Self, TypeAlias, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):
    """A `cached_property` without the lock that Python 3.11 takes each time one is computed."""

    def __init__(self, compute: Callable[[Any], T]):
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> T | Self:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


Monomial: TypeAlias = tuple[str, ...]
"""A product of symbols, sorted; the empty one is 1."""

Term: TypeAlias = tuple[Monomial, int]
"""A monomial and its coefficient."""

MOST_INTERNED = 2**16
"""Polynomials that are kept to be found again."""


@dataclass(frozen=True)
class Poly:
    """
    A multivariate polynomial with integer coefficients, in normal form. Made by `number`, `symbol`, arithmetic,
    and `parse.parse_poly` from text.
    """

    terms: tuple[Term, ...]
    """Sorted by monomial, each monomial once, coefficients other than 0."""

    def __hash__(self) -> int:
        # Proofs look up the same ones over and over; a cached property would take a lock.
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash(self.terms)
        return known

    def __add__(self, other: Poly | int) -> Poly:
        more = _poly(other).terms
        return _sum((*self.terms, *more)) if more else self

    def __sub__(self, other: Poly | int) -> Poly:
        less = _poly(other).terms
        return _sum((*self.terms, *[(m, -c) for m, c in less])) if less else self

    def __neg__(self) -> Poly:
        return _made(tuple([(m, -c) for m, c in self.terms]))

    def __mul__(self, other: Poly | int) -> Poly:
        by = _poly(other)
        return self if by is ONE else by if self is ONE else _sum(_products(self.terms, by.terms))

    @lazy
    def symbols(self) -> frozenset[str]:
        """The names of all symbols that occur in the polynomial."""
        return frozenset(s for m, _ in self.terms for s in m)

    @lazy
    def constant(self) -> int | None:
        """The value of the polynomial if it is constant; None if symbols occur."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def coefficient(self, symbol: str) -> Poly:
        """
        Return the coefficient of the first power of `symbol`, a polynomial in the other symbols; terms with higher
        powers of it are left out. 0 if it does not occur.

        Given `s*m + i` and s returns `m`.
        """
        if symbol not in self.symbols:
            return ZERO
        found: list[Term] = []
        for m, c in self.terms:
            if m.count(symbol) == 1:
                at = m.index(symbol)
                found.append(((*m[:at], *m[at + 1 :]), c))
        return _sum(found)

    def without(self, symbol: str) -> Poly:
        """Return the sum of the terms in which `symbol` does not occur."""
        return _made(tuple([t for t in self.terms if symbol not in t[0]])) if symbol in self.symbols else self

    def substitute(self, values: Mapping[str, Poly]) -> Poly:
        """Return the polynomial with symbols replaced by polynomials; symbols not in `values` stay."""
        if self.symbols.isdisjoint(values):
            return self
        out: list[Term] = []
        for term in self.terms:
            m, c = term
            if len(m) == 1:
                value = values.get(m[0])
                out += [term] if value is None else value.terms if c == 1 else [(n, c * d) for n, d in value.terms]
                continue
            terms = [(tuple([s for s in m if s not in values]), c)]
            for s in m:
                if s in values:
                    terms = _products(terms, values[s].terms)
            out += terms
        return _sum(out)

    def at(self, values: Mapping[str, int]) -> int:
        """
        Return the value of the polynomial at integer values of all its symbols. Raises `KeyError` where one has none.
        """
        total = 0
        for m, c in self.terms:
            if len(m) == 1:
                total += c * values[m[0]]
                continue
            for s in m:
                c *= values[s]
            total += c
        return total

    def __str__(self) -> str:
        return self._text

    @lazy
    def _text(self) -> str:
        text = ""
        for m, c in sorted(self.terms, key=lambda t: (-len(t[0]), t)):
            amount = "*".join(m) if m and abs(c) == 1 else "*".join((str(abs(c)), *m))
            text += (" - " if c < 0 else " + ") + amount if text else ("-" if c < 0 else "") + amount
        return text or "0"


def _sum(terms: Iterable[Term]) -> Poly:
    found: dict[Monomial, int] = {}
    for m, c in terms:
        found[m] = found.get(m, 0) + c
    return _made(tuple(sorted([t for t in found.items() if t[1]])))


_interned: dict[tuple[Term, ...], Poly] = {}


def _made(terms: tuple[Term, ...]) -> Poly:
    """
    Return the polynomial of these terms, which are in normal form. Equal ones are mostly one object, so that their
    symbols, hash and text are found once.
    """
    known = _interned.get(terms)
    if known is None:
        if len(_interned) >= MOST_INTERNED:
            _interned.clear()
        known = _interned[terms] = Poly(terms)
    return known


def _products(left: Iterable[Term], right: Sequence[Term]) -> list[Term]:
    """Return the products of every term on the left with every one on the right; equal monomials are not yet added."""
    return [(tuple(sorted(a + b)) if a and b else a or b, c * d) for a, c in left for b, d in right]


def number(value: int) -> Poly:
    """Return the constant polynomial `value`."""
    return _made((((), value),)) if value else ZERO


@lru_cache(maxsize=4096)
def symbol(name: str) -> Poly:
    """Return the polynomial that is one symbol."""
    return _made((((name,), 1),))


def _poly(value: Poly | int) -> Poly:
    return number(value) if isinstance(value, int) else value


ZERO = _made(())
ONE = _made((((), 1),))


def product(polys: Iterable[Poly]) -> Poly:
    """Return the product of polynomials; 1 for none."""
    out = ONE
    for p in polys:
        out = out * p
    return out


def exact_quotient(size: Poly, by: Poly) -> Poly | None:
    """
    Return the quotient `size / by` of two polynomials; None if there is a remainder.

    Given `k*m + l*m` and `k + l` returns `m`.
    """
    if by == ONE:
        return size
    if len(by.terms) != 1:
        return _long_division(size, by)
    ((names, factor),) = by.terms
    out: list[tuple[tuple[str, ...], int]] = []
    for m, c in size.terms:
        left = list(m)
        for n in names:
            if n not in left:
                return None
            left.remove(n)
        if c % factor:
            return None
        out.append((tuple(left), c // factor))
    return Poly(tuple(sorted(out)))


def _long_division(size: Poly, by: Poly) -> Poly | None:
    """Return the quotient of two polynomials, term by term from the highest; None if there is a remainder."""
    quotient, rest = ZERO, size
    highest = max(by.terms, key=_order)
    while rest.terms:
        factor = exact_quotient(Poly((max(rest.terms, key=_order),)), Poly((highest,)))
        if factor is None:
            return None
        quotient, rest = quotient + factor, rest - factor * by
    return quotient


def _order(term: Term) -> tuple[int, tuple[str, ...]]:
    """Return where a term stands in an order that products keep: by degree, then by symbols."""
    names, _ = term
    return len(names), names
