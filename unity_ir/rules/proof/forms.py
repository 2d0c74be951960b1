"""
Forms: the values of tensor elements as sums of monomials, at symbolic indices and sizes.

An element of a tensor is a `Form`, a sum of `Mono`s, each

    coefficient * SUM over binders in domain of PRODUCT of factors

A factor is an element of an input, a size or index as a number, a scalar function about which nothing is assumed, or a
maximum, minimum or product over a domain. Binders are the indices that are summed over. Every expression of TDL except
opaque functions can be written so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import count
from typing import TypeAlias

from unity_ir.rules.poly import Poly, number, symbol

_numbers = count()
"""Numbers of fresh symbols."""

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


@dataclass(frozen=True)
class Constraint:
    """A condition on integers: `poly >= 0`, or, if `equal`, `poly == 0`."""

    poly: Poly
    equal: bool = False

    def __hash__(self) -> int:
        # They are in many sets; a cached property would take a lock.
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((self.poly, self.equal))
        return known

    def substitute(self, values: Mapping[str, Poly]) -> Constraint:
        """
        Return the constraint with symbols replaced by polynomials, as `values` maps them by name; other symbols stay.
        """
        return Constraint(self.poly.substitute(values), self.equal)

    @cached_property
    def negated(self) -> tuple[Constraint, ...]:
        """Constraints of which exactly one holds wherever this one does not, and none where it does."""
        below = Constraint(-self.poly - 1)
        return (below, Constraint(self.poly - 1)) if self.equal else (below,)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{self.poly} {'==' if self.equal else '>='} 0"


@lru_cache(maxsize=4096)
def box(variable: str, size: Poly) -> tuple[Constraint, Constraint]:
    """Return the two constraints `0 <= variable < size` on the symbol named `variable`."""
    return Constraint(symbol(variable)), Constraint(size - 1 - symbol(variable))


@dataclass(frozen=True)
class Read:
    """An element of an input tensor, as a factor of a monomial."""

    tensor: str
    indices: tuple[Poly, ...]


@dataclass(frozen=True)
class SymbolValue:
    """The value of a size, index or attribute, as a factor of a monomial."""

    symbol: str


@dataclass(frozen=True)
class Apply:
    """A scalar function applied to forms. It is uninterpreted, except for the laws that `apply` and `normal` use."""

    function: str
    arguments: tuple[Form, ...]


@dataclass(frozen=True)
class Extreme:
    """The maximum, minimum or product (`reducer`) of all elements of several quantified forms."""

    reducer: str
    parts: tuple[Quantified, ...]


@dataclass(frozen=True)
class Quantified:
    """A set of values: those of the form `body` for all values of `binders` that satisfy `domain`."""

    binders: tuple[str, ...]
    domain: frozenset[Constraint]
    body: Form


MonoFactor: TypeAlias = Read | SymbolValue | Apply | Extreme


@dataclass(frozen=True)
class Mono:
    """
    A monomial: `coefficient * SUM over binders in domain of PRODUCT of factors`.

    `domain` constrains binders and free symbols; where it does not hold, the monomial is 0.
    """

    coefficient: Fraction
    binders: tuple[str, ...] = ()
    domain: frozenset[Constraint] = frozenset()
    factors: tuple[MonoFactor, ...] = ()

    @cached_property
    def free(self) -> frozenset[str]:
        """The symbols that occur in the monomial's factors and domain and that it is not summed over."""
        return frozenset[str]().union(
            *(c.poly.symbols for c in self.domain), *(free_symbols(f) for f in self.factors)
        ) - set(self.binders)


Form: TypeAlias = tuple[Mono, ...]


def free_symbols(factor: MonoFactor) -> frozenset[str]:
    """
    Return the names of the symbols (sizes, indices) that occur in a factor of a monomial and are not bound in it by a
    sum or maximum.
    """
    match factor:
        case Read(_, indices):
            return frozenset[str]().union(*(i.symbols for i in indices))
        case SymbolValue(name):
            return frozenset({name})
        case Apply(_, arguments):
            return frozenset[str]().union(*(m.free for form in arguments for m in form))
        case Extreme(_, parts):
            return frozenset[str]().union(*(_free_in(p) for p in parts))


def _free_in(bound: Quantified) -> frozenset[str]:
    inner = (*(c.poly.symbols for c in bound.domain), *(m.free for m in bound.body))
    return frozenset[str]().union(*inner) - set(bound.binders)


# --- building --------------------------------------------------------------------------------------------------------


def constant(value: Fraction | int) -> Form:
    """Return the form (sum of monomials) of a constant."""
    return (Mono(Fraction(value)),) if value else ()


def of_poly(poly: Poly) -> Form:
    """Convert a polynomial to a form (a sum of monomials)."""
    return tuple(Mono(Fraction(c), (), frozenset(), tuple(map(SymbolValue, m))) for m, c in poly.terms)


def as_poly(form: Form) -> Poly | None:
    """
    Convert a form (a sum of monomials) to the polynomial of the same value; return None if it is not an integer
    polynomial of sizes and indices.
    """
    out = number(0)
    for m in form:
        if m.binders or m.domain or m.coefficient.denominator != 1:
            return None
        term = number(int(m.coefficient))
        for f in m.factors:
            if not isinstance(f, SymbolValue) or f.symbol.startswith(REAL):
                return None
            term = term * symbol(f.symbol)
        out = out + term
    return out


def scaled(form: Form, by: Fraction | int) -> Form:
    """Multiply a form (a sum of monomials) by a constant."""
    return tuple(Mono(m.coefficient * by, m.binders, m.domain, m.factors) for m in form)


def times(left: Form, right: Form) -> Form:
    """Multiply two forms (sums of monomials) out."""
    out: list[Mono] = []
    for a in left:
        for b in right:
            b = renamed(b)
            out.append(
                Mono(a.coefficient * b.coefficient, a.binders + b.binders, a.domain | b.domain, a.factors + b.factors)
            )
    return tuple(out)


def guarded(form: Form, constraints: Iterable[Constraint]) -> Form:
    """Return the form (sum of monomials) that equals `form` where all constraints hold, and 0 elsewhere."""
    extra = frozenset(constraints)
    return tuple(Mono(m.coefficient, m.binders, m.domain | extra, m.factors) for m in form)


def summed(form: Form, binders: tuple[str, ...], domain: Iterable[Constraint]) -> Form:
    """
    Sum a form (a sum of monomials) over all integer values of the symbols `binders` that satisfy the constraints
    `domain`.
    """
    extra = frozenset(domain)
    return tuple(Mono(m.coefficient, binders + m.binders, m.domain | extra, m.factors) for m in form)


def apply(function: str, arguments: tuple[Form, ...]) -> Form:
    """
    Apply the scalar function called `function` to its arguments; arguments and result are forms (sums of monomials).

    Simplifies by these laws: exp(a + b) = exp(a) exp(b), relu(relu(a)) = relu(a), the reciprocal of a product is the
    product of reciprocals. `maximum` and `minimum` become a factor `Extreme`; any other function becomes a factor
    `Apply`, about which no law is known.
    """
    if function in ("maximum", "minimum"):
        parts = tuple(Quantified((), frozenset(), a) for a in arguments)
        return (Mono(Fraction(1), (), frozenset(), (Extreme(function.removesuffix("imum"), parts),)),)
    if function == "exp":
        return _exp(arguments[0])
    if function == "recip":
        return _recip(arguments[0])
    if function == "relu" and len(arguments[0]) == 1:
        (mono,) = arguments[0]
        inner = mono.factors[0] if len(mono.factors) == 1 and mono.coefficient == 1 else None
        if isinstance(inner, Apply) and inner.function == "relu" and not mono.binders:
            return arguments[0]
    return (Mono(Fraction(1), (), frozenset(), (Apply(function, arguments),)),)


def _exp(argument: Form) -> Form:
    """Return exp of a form, by the law exp(a + b) = exp(a) exp(b) unless a monomial is guarded."""
    if any(m.domain - _binder_boxes(m) for m in argument):
        return (Mono(Fraction(1), (), frozenset(), (Apply("exp", (argument,)),)),)
    factors = tuple(Apply("exp", ((m,),)) for m in argument)
    return (Mono(Fraction(1), (), frozenset(), factors),)


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
                    factors.append(Apply("recip", ((Mono(Fraction(1), (), frozenset(), (f,)),),)))
        return (Mono(1 / mono.coefficient, (), frozenset(), tuple(factors)),)
    return (Mono(Fraction(1), (), frozenset(), (Apply("recip", (argument,)),)),)


# --- substitution ----------------------------------------------------------------------------------------------------


def renamed(mono: Mono) -> Mono:
    """Rename the binders of a monomial (the symbols it is summed over) to fresh symbols."""
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
    Rename the binders of a quantified form (a set of values; binders are the symbols that run over all values) to fresh
    symbols.
    """
    names = {b: fresh(b) for b in bound.binders}
    values = {old: symbol(new) for old, new in names.items()}
    domain = frozenset(c.substitute(values) for c in bound.domain)
    return Quantified(tuple(names.values()), domain, substitute(bound.body, values))


def substitute(form: Form, values: Mapping[str, Poly]) -> Form:
    """
    Substitute polynomials for free symbols, given by name in `values`, of a form (a sum of monomials); return the new
    form, not yet multiplied out where a polynomial took the place of a factor (see `multiplied_out`).
    """
    return tuple(_substitute_mono(m, values) for m in form)


def _substitute_mono(mono: Mono, values: Mapping[str, Poly]) -> Mono:
    """Substitute polynomials for free symbols, given by name in `values`, of a monomial; see `substitute_factor`."""
    used = {s: p for s, p in values.items() if s in mono.free}
    if not used:
        return mono
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
            return Extreme(
                reducer,
                tuple(
                    Quantified(p.binders, frozenset(c.substitute(values) for c in p.domain), substitute(p.body, values))
                    for p in parts
                ),
            )


def multiplied_out(form: Form) -> Form:
    """
    Multiply out a form (a sum of monomials) after a substitution: each factor `Apply("value", (form,))`, which
    `substitute_factor` puts in the place of a symbol, is replaced by the sum that it holds. Given `2 * value(a + b) *
    c`, returns `2ac + 2bc`.
    """
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


def text(factor: MonoFactor) -> str:
    """Return a factor of a monomial as text; equal factors have equal text."""
    match factor:
        case Read(tensor, indices):
            return f"{tensor}[{', '.join(map(str, indices))}]"
        case SymbolValue(name):
            return name
        case Apply(function, arguments):
            return f"{function}({', '.join(map(_form_text, arguments))})"
        case Extreme(reducer, parts):
            return f"{reducer}({'; '.join(sorted(map(bound_text, parts)))})"


def _form_text(form: Form) -> str:
    """Return a form (a sum of monomials) as text; equal forms have equal text."""
    return " + ".join(sorted(map(mono_text, form))) or "0"


def mono_text(mono: Mono) -> str:
    """Return a monomial as text; equal monomials have equal text."""
    factors = " ".join(text(f) for f in mono.factors)
    return f"{mono.coefficient} {_over(mono.binders, mono.domain)}{factors}"


def bound_text(bound: Quantified) -> str:
    """Return a quantified form (a set of values) as text; equal ones have equal text."""
    return f"{_over(bound.binders, bound.domain)}{_form_text(bound.body)}"


def _over(binders: tuple[str, ...], domain: frozenset[Constraint]) -> str:
    if not binders and not domain:
        return ""
    return f"[{', '.join(binders)} | {', '.join(sorted(map(str, domain)))}] "
