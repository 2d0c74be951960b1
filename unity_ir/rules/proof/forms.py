"""
Forms: the values of tensor elements as sums of monomials, at symbolic indices and sizes.

An element of a tensor is a `Form`, a sum of `Mono`s, each

    coefficient * SUM over binders in domain of PRODUCT of factors

A factor is an element of an input, a size or index as a number, a scalar function about which nothing is assumed, or a
maximum, minimum or product over a domain. Binders are the indices that are summed over. Every expression of TDL except
opaque functions can be written so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import ClassVar, TypeAlias

from unity_ir.rules.poly import ZERO, Poly, lazy, number, symbol

_numbers = count()
"""Numbers of fresh symbols."""

UNIT = Fraction(1)
"""The coefficient of most monomials; what is this very object is not multiplied by."""

REAL = "$"
"""Prefix of symbols of real-valued attributes, which take no part in integer reasoning."""


def fresh(stem: str) -> str:
    """
    Return a new symbol, `STEM#NUMBER` (without what follows a `#` in `stem`); the number goes up by one with each call,
    from 0 at `restart`.
    """
    return f"{stem.split('#')[0]}#{next(_numbers)}"


def restart() -> None:
    """
    Number fresh symbols from 0 again, so that a repeated claim has the same symbols and is found in the solver's cache.

    Never mix forms made before and after this.
    """
    global _numbers
    _numbers = count()


def _hashed(it: object, *fields: object) -> int:
    """
    Return the hash of an object's fields, which is computed once: they are nested deeply and in many sets. (A cached
    property would take a lock.)
    """
    known: int | None = it.__dict__.get("_hash")
    if known is None:
        known = it.__dict__["_hash"] = hash(fields)
    return known


@dataclass(frozen=True)
class Constraint:
    """A condition on integers: `poly >= 0`, or, if `equal`, `poly == 0`."""

    poly: Poly
    equal: bool = False

    def __hash__(self) -> int:
        return _hashed(self, self.poly, self.equal)

    def substitute(self, values: Mapping[str, Poly]) -> Constraint:
        """
        Return the constraint with symbols replaced by polynomials, as `values` maps them by name; other symbols stay.
        """
        poly = self.poly.substitute(values)
        return self if poly is self.poly else Constraint(poly, self.equal)

    @lazy
    def negated(self) -> tuple[Constraint, ...]:
        """
        The opposite, as alternatives: where this constraint does not hold, exactly one of the returned ones does, and
        where it holds, none. There are two if it is an equation: of `p == 0`, `p <= -1` and `p >= 1`.
        """
        below = Constraint(-self.poly - 1)
        return (below, Constraint(self.poly - 1)) if self.equal else (below,)

    def __str__(self) -> str:
        return self._text

    @lazy
    def _text(self) -> str:
        return f"{self.poly} {'==' if self.equal else '>='} 0"


@lru_cache(maxsize=4096)
def box(variable: str, size: Poly) -> tuple[Constraint, Constraint]:
    """Return the two constraints `0 <= variable < size` on the symbol named `variable`."""
    return Constraint(symbol(variable)), Constraint(size - 1 - symbol(variable))


@dataclass(frozen=True)
class Read:
    """An element of an input tensor, at symbolic indices, as a factor of a monomial."""

    tensor: str
    indices: tuple[Poly, ...]

    has_marks: ClassVar = False

    def __hash__(self) -> int:
        return _hashed(self, self.tensor, self.indices)

    @lazy
    def free(self) -> frozenset[str]:
        """The names of the symbols in the indices."""
        return _union([i.symbols for i in self.indices])

    @lazy
    def text(self) -> str:
        """The read as text, `x[i, j]`; equal reads have equal text."""
        return f"{self.tensor}[{', '.join(map(str, self.indices))}]"


@dataclass(frozen=True)
class SymbolValue:
    """The value of a size, index or attribute, as a factor of a monomial."""

    symbol: str

    has_marks: ClassVar = False

    @lazy
    def free(self) -> frozenset[str]:
        """The name of the symbol, in a set."""
        return frozenset({self.symbol})

    @property
    def text(self) -> str:
        """The name of the symbol."""
        return self.symbol


@dataclass(frozen=True)
class Apply:
    """
    A scalar function applied to values (forms: sums of monomials), as a factor of a monomial. Nothing is known of the
    function but the laws that `apply` and `normal` use.
    """

    function: str
    arguments: tuple[Form, ...]

    def __hash__(self) -> int:
        return _hashed(self, self.function, self.arguments)

    @lazy
    def has_marks(self) -> bool:
        """
        Whether this is or contains an `Apply("value", ..)`: the mark that `substitute_factor` puts in the place of a
        symbol, for `multiplied_out` to replace by a sum.
        """
        return self.function == "value" or any([f.has_marks for a in self.arguments for m in a for f in m.factors])

    @lazy
    def free(self) -> frozenset[str]:
        """The names of the symbols in the arguments, without those that a sum or maximum inside of them runs over."""
        return _union([m.free for form in self.arguments for m in form])

    @lazy
    def text(self) -> str:
        """The function and its arguments as text, `exp(..)`; equal applications have equal text."""
        return f"{self.function}({', '.join(map(form_text, self.arguments))})"


@dataclass(frozen=True)
class Extreme:
    """
    The maximum, minimum or product (`reducer`: `max`, `min`, `prod`) of all values in several sets, as a factor of a
    monomial; in proofs that both sides round alike, also a sum (`sum`).
    """

    reducer: str
    parts: tuple[Quantified, ...]

    def __hash__(self) -> int:
        return _hashed(self, self.reducer, self.parts)

    @lazy
    def has_marks(self) -> bool:
        """
        Whether this contains an `Apply("value", ..)`: the mark that `substitute_factor` puts in the place of a symbol,
        for `multiplied_out` to replace by a sum.
        """
        return any([f.has_marks for p in self.parts for m in p.body for f in m.factors])

    @lazy
    def free(self) -> frozenset[str]:
        """
        The names of the symbols in the sets, without those that this, or a sum or maximum inside of it, runs over.
        """
        return _union([p.free for p in self.parts])

    @lazy
    def text(self) -> str:
        """The reduction as text, `max(..; ..)`; equal reductions have equal text."""
        return f"{self.reducer}({'; '.join(sorted([p.text for p in self.parts]))})"


@dataclass(frozen=True)
class Quantified:
    """
    A set of values: those that `body` (a form: a sum of monomials) takes as the symbols `binders` run over all integers
    that satisfy the constraints `domain`.
    """

    binders: tuple[str, ...]
    domain: frozenset[Constraint]
    body: Form

    def __hash__(self) -> int:
        return _hashed(self, self.binders, self.domain, self.body)

    @lazy
    def free(self) -> frozenset[str]:
        """
        The names of the symbols in the domain and body, without `binders` and those that a sum or maximum inside of the
        body runs over.
        """
        return _union([*[c.poly.symbols for c in self.domain], *[m.free for m in self.body]]).difference(self.binders)

    @lazy
    def text(self) -> str:
        """The set as text; equal sets have equal text."""
        return f"{_over(self.binders, self.domain)}{form_text(self.body)}"


MonoFactor: TypeAlias = Read | SymbolValue | Apply | Extreme


@dataclass(frozen=True)
class Mono:
    """
    A monomial, one addend of a form: `coefficient * SUM over binders in domain of PRODUCT of factors`.

    `domain` constrains binders and free symbols; where it does not hold, the monomial is 0.
    """

    coefficient: Fraction
    binders: tuple[str, ...] = ()
    domain: frozenset[Constraint] = frozenset()
    factors: tuple[MonoFactor, ...] = ()

    def __hash__(self) -> int:
        return _hashed(self, self.coefficient, self.binders, self.domain, self.factors)

    @lazy
    def free(self) -> frozenset[str]:
        """
        The names of the symbols in the monomial's factors and domain, without those that it, or a sum or maximum inside
        of it, runs over.
        """
        return _union([*[c.poly.symbols for c in self.domain], *[f.free for f in self.factors]]).difference(
            self.binders
        )

    @lazy
    def is_monomial(self) -> bool:
        """Whether this is a number times sizes and indices alone."""
        return not (self.binders or self.domain) and all(
            [isinstance(f, SymbolValue) and not f.symbol.startswith(REAL) for f in self.factors]
        )

    @lazy
    def text(self) -> str:
        """The monomial as text; equal monomials have equal text."""
        factors = " ".join([f.text for f in self.factors])
        return f"{self.coefficient} {_over(self.binders, self.domain)}{factors}"


Form: TypeAlias = tuple[Mono, ...]


def _union(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    return sets[0] if len(sets) == 1 else frozenset[str]().union(*sets)


# --- building --------------------------------------------------------------------------------------------------------


def constant(value: Fraction | int) -> Form:
    """Return the form (sum of monomials) of a constant; that of 0 is the empty sum."""
    return (Mono(UNIT if value == 1 else Fraction(value)),) if value else ()


def of_poly(poly: Poly) -> Form:
    """Convert a polynomial to a form (a sum of monomials)."""
    return tuple(Mono(Fraction(c), (), frozenset(), tuple(map(SymbolValue, m))) for m, c in poly.terms)


def as_poly(form: Form) -> Poly | None:
    """
    Convert a form (a sum of monomials) to the polynomial of the same value; return None if it is not an integer
    polynomial of sizes and indices.
    """
    # Most are not: that is seen before anything is made.
    if not all([m.is_monomial and m.coefficient.denominator == 1 for m in form]):
        return None
    out = ZERO
    for m in form:
        term = number(int(m.coefficient))
        for f in m.factors:
            assert isinstance(f, SymbolValue)
            term = term * symbol(f.symbol)
        out = out + term
    return out


def scaled(form: Form, by: Fraction | int) -> Form:
    """Multiply a form (a sum of monomials) by a constant."""
    factor = Fraction(by)
    return tuple([Mono(_product(m.coefficient, factor), m.binders, m.domain, m.factors) for m in form])


def _product(left: Fraction, right: Fraction) -> Fraction:
    return left if right is UNIT else right if left is UNIT else left * right


def of_factor(factor: MonoFactor) -> Form:
    """Return the form (a sum of monomials) that is one factor."""
    return (Mono(UNIT, (), frozenset(), (factor,)),)


def divided(form: Form, coefficient: Fraction, factors: Sequence[MonoFactor]) -> Form:
    """Divide a form (a sum of monomials) by a number and by factors that all its monomials have."""
    out: list[Mono] = []
    for mono in form:
        left = list(mono.factors)
        for f in factors:
            left.remove(f)
        out.append(Mono(mono.coefficient / coefficient, mono.binders, mono.domain, tuple(left)))
    return tuple(out)


def added_up(form: Form) -> Form:
    """Add up equal monomials of a form (a sum of monomials); return those that do not cancel, sorted by their text."""
    sums: dict[str, Mono] = {}
    for m in form:
        key = Mono(UNIT, m.binders, m.domain, m.factors).text
        old = sums.get(key)
        sums[key] = Mono(m.coefficient + (old.coefficient if old else 0), m.binders, m.domain, m.factors)
    return tuple(m for _, m in sorted(sums.items()) if m.coefficient)


def times(left: Form, right: Form) -> Form:
    """
    Return the product of two forms (sums of monomials), multiplied out. Symbols that monomials of `right` are summed
    over (binders) get fresh names.
    """
    out: list[Mono] = []
    for a in left:
        for b in right:
            b = with_fresh_binders(b)
            coefficient = _product(a.coefficient, b.coefficient)
            out.append(Mono(coefficient, a.binders + b.binders, a.domain | b.domain, a.factors + b.factors))
    return tuple(out)


def guarded(form: Form, constraints: Iterable[Constraint]) -> Form:
    """Return the form (sum of monomials) that equals `form` where all constraints hold, and 0 elsewhere."""
    extra = frozenset(constraints)
    return tuple([Mono(m.coefficient, m.binders, m.domain | extra, m.factors) for m in form]) if extra else form


def summed(form: Form, binders: tuple[str, ...], domain: Iterable[Constraint]) -> Form:
    """
    Sum a form (a sum of monomials) over all integer values of the symbols `binders` that satisfy the constraints
    `domain`.
    """
    extra = frozenset(domain)
    if not binders and not extra:
        return form
    return tuple([Mono(m.coefficient, binders + m.binders, m.domain | extra, m.factors) for m in form])


def apply(function: str, arguments: tuple[Form, ...]) -> Form:
    """
    Apply the scalar function called `function` to its arguments; arguments and result are forms (sums of monomials).

    Simplifies by these laws: exp(a + b) = exp(a) exp(b), relu(relu(a)) = relu(a), the reciprocal of a product is the
    product of reciprocals. `maximum` and `minimum` become a factor `Extreme`. Any other function, or what these laws do
    not simplify, becomes a factor `Apply`.
    """
    if function in ("maximum", "minimum"):
        parts = tuple(Quantified((), frozenset(), a) for a in arguments)
        return (Mono(UNIT, (), frozenset(), (Extreme(function.removesuffix("imum"), parts),)),)
    if function == "exp":
        return _exp(arguments[0])
    if function == "recip":
        return _recip(arguments[0])
    if function == "relu" and len(arguments[0]) == 1:
        (mono,) = arguments[0]
        inner = mono.factors[0] if len(mono.factors) == 1 and mono.coefficient == 1 else None
        if isinstance(inner, Apply) and inner.function == "relu" and not mono.binders:
            return arguments[0]
    return (Mono(UNIT, (), frozenset(), (Apply(function, arguments),)),)


def _exp(argument: Form) -> Form:
    """Return exp of a form, by the law exp(a + b) = exp(a) exp(b) unless a monomial is guarded."""
    if any(m.domain - _binder_boxes(m) for m in argument):
        return (Mono(UNIT, (), frozenset(), (Apply("exp", (argument,)),)),)
    factors = tuple(Apply("exp", ((m,),)) for m in argument)
    return (Mono(UNIT, (), frozenset(), factors),)


def _binder_boxes(mono: Mono) -> frozenset[Constraint]:
    """Return the constraints of a monomial that are about its binders."""
    return frozenset(c for c in mono.domain if not c.poly.symbols.isdisjoint(mono.binders))


def _recip(argument: Form) -> Form:
    if len(argument) == 1 and not argument[0].binders and not argument[0].domain:
        (mono,) = argument
        factors: list[MonoFactor] = []
        for f in mono.factors:
            match f:
                case Apply("exp", (inner,)):
                    factors.append(Apply("exp", (scaled(inner, -1),)))
                case _:
                    factors.append(Apply("recip", ((Mono(UNIT, (), frozenset(), (f,)),),)))
        return (Mono(1 / mono.coefficient, (), frozenset(), tuple(factors)),)
    return (Mono(UNIT, (), frozenset(), (Apply("recip", (argument,)),)),)


# --- substitution ----------------------------------------------------------------------------------------------------


def with_fresh_binders(mono: Mono) -> Mono:
    """
    Return a monomial with fresh symbols for its binders (the symbols it is summed over); the same monomial if it has
    none.
    """
    if not mono.binders:
        return mono
    names = {b: fresh(b) for b in mono.binders}
    values = {old: symbol(new) for old, new in names.items()}
    return Mono(
        mono.coefficient,
        tuple(names.values()),
        frozenset(c.substitute(values) for c in mono.domain),
        tuple(substitute_factor(f, values) for f in mono.factors),
    )


def renamed_bound(bound: Quantified) -> Quantified:
    """
    Return a quantified form (a set of values) with fresh symbols for its binders (the symbols that run over all
    values).
    """
    names = {b: fresh(b) for b in bound.binders}
    values = {old: symbol(new) for old, new in names.items()}
    domain = frozenset(c.substitute(values) for c in bound.domain)
    return Quantified(tuple(names.values()), domain, substitute(bound.body, values))


def substitute(form: Form, values: Mapping[str, Poly]) -> Form:
    """
    Substitute polynomials for free symbols, given by name in `values`, of a form (a sum of monomials); return the new
    form, not yet multiplied out where a polynomial took the place of a factor (see `multiplied_out`).

    The polynomials must not mention binders of the form: that is not checked.
    """
    return tuple(_substitute_mono(m, values) for m in form)


def _substitute_mono(mono: Mono, values: Mapping[str, Poly]) -> Mono:
    """Substitute polynomials for free symbols, given by name in `values`, of a monomial; see `substitute_factor`."""
    if mono.free.isdisjoint(values):
        return mono
    used = {s: p for s, p in values.items() if s in mono.free}
    return Mono(
        mono.coefficient,
        mono.binders,
        frozenset(c.substitute(used) for c in mono.domain),
        tuple(substitute_factor(f, used) for f in mono.factors),
    )


def substitute_factor(factor: MonoFactor, values: Mapping[str, Poly]) -> MonoFactor:
    """
    Substitute polynomials for free symbols, given by name in `values`, of one factor of a monomial.

    A factor that is the symbol itself, replaced by a polynomial that is no single symbol, is returned as
    `Apply("value", ..)`, which `multiplied_out` turns into a sum of monomials.
    """
    if factor.free.isdisjoint(values):
        return factor
    match factor:
        case Read(tensor, indices):
            return Read(tensor, tuple(i.substitute(values) for i in indices))
        case SymbolValue(name):
            new = values.get(name, symbol(name))
            other = new.terms[0][0] if len(new.terms) == 1 and new.terms[0][1] == 1 else ()
            return SymbolValue(*other) if len(other) == 1 else Apply("value", (of_poly(new),))
        case Apply(function, arguments):
            return Apply(function, tuple(substitute(a, values) for a in arguments))
        case Extreme(reducer, parts):
            return Extreme(reducer, tuple([_substitute_bound(p, values) for p in parts]))


def _substitute_bound(bound: Quantified, values: Mapping[str, Poly]) -> Quantified:
    if bound.free.isdisjoint(values):
        return bound
    used = {s: p for s, p in values.items() if s in bound.free}
    return Quantified(
        bound.binders, frozenset([c.substitute(used) for c in bound.domain]), substitute(bound.body, used)
    )


def multiplied_out(form: Form) -> Form:
    """
    Multiply out a form (a sum of monomials) after a substitution: each factor `Apply("value", (form,))`, which
    `substitute_factor` puts in the place of a symbol, is replaced by the sum that it holds. Given `2 * value(a + b) *
    c`, returns `2ac + 2bc`.
    """
    if not any([f.has_marks for mono in form for f in mono.factors]):
        return form
    out: list[Mono] = []
    for mono in form:
        marks = [f for f in mono.factors if isinstance(f, Apply) and f.function == "value"]
        rest = tuple(_inner(f) for f in mono.factors if f not in marks)
        product: Form = (Mono(mono.coefficient, mono.binders, mono.domain, rest),)
        for mark in marks:
            product = tuple(
                Mono(a.coefficient * b.coefficient, a.binders, a.domain, a.factors + b.factors)
                for a in product
                for b in mark.arguments[0]
            )
        out += product
    return tuple(out)


def _inner(factor: MonoFactor) -> MonoFactor:
    match factor:
        case Apply(function, arguments):
            return Apply(function, tuple(map(multiplied_out, arguments)))
        case Extreme(reducer, parts):
            return Extreme(reducer, tuple(Quantified(p.binders, p.domain, multiplied_out(p.body)) for p in parts))
        case _:
            return factor


# --- text ------------------------------------------------------------------------------------------------------------


def form_text(form: Form) -> str:
    """Return a form (a sum of monomials) as text; equal forms have equal text."""
    return " + ".join(sorted([m.text for m in form])) or "0"


def _over(binders: tuple[str, ...], domain: frozenset[Constraint]) -> str:
    if not binders and not domain:
        return ""
    return f"[{', '.join(binders)} | {', '.join(sorted(map(str, domain)))}] "
