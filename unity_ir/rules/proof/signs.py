"""Shows of values (forms: sums of monomials) that they are above 0, not negative, or a number at all."""

from __future__ import annotations

from collections import Counter

from unity_ir.rules.poly import symbol
from unity_ir.rules.proof.forms import (
    UNIT,
    Apply,
    Constraint,
    Extreme,
    Form,
    Mono,
    MonoFactor,
    Quantified,
    Read,
    SymbolValue,
    as_poly,
)
from unity_ir.rules.proof.solver import Facts
from unity_ir.tdl import functions

CONDITIONS = (*functions.CONDITIONS, "as bool")
"""Functions whose values are 0 and 1."""

NOT_NEGATIVE = ("exp", "sqrt", "abs", "relu", "philox", *CONDITIONS)
"""Functions that are 0 or above wherever they are a number."""

TOTAL = ("exp", "abs", "relu", "tanh", "sin", "cos", "erf", "gelu", "sigmoid", "floor", "philox", *CONDITIONS)
"""Functions that are a number wherever their arguments are."""


def is_total(form: Form, facts: Facts) -> bool:
    """
    Return whether it is shown that a value is a number wherever the inputs are: it has no logarithm, no root but of
    what is not negative, no maximum of nothing, and divides only by what is above 0. A comparison with what is no
    number is 0, whatever is compared. `facts` are constraints that hold.
    """
    return all(_is_total(f, facts.also(m.domain)) for m in form for f in m.factors)


def _is_total(factor: MonoFactor, facts: Facts) -> bool:
    match factor:
        case Read() | SymbolValue():
            return True
        case Apply("sqrt" | "sqrt'", (x,)):
            return is_total(x, facts) and not_negative(x, facts)
        case Apply("recip" | "log", (x,)):
            return is_positive(x, facts)
        case Apply(function, arguments):
            return function.removesuffix("'") in TOTAL and all(is_total(a, facts) for a in arguments)
        case Extreme(_, parts):
            return bool(parts) and all(nonempty(p, facts) and is_total(p.body, facts.also(p.domain)) for p in parts)


def is_positive(form: Form, facts: Facts) -> bool:
    """Return whether it is shown that a value is above 0: a sum of what is not negative, with an addend above 0."""
    return not_negative(form, facts) and is_total(form, facts) and any(_is_positive(m, facts) for m in form)


def _is_positive(mono: Mono, facts: Facts) -> bool:
    if mono.coefficient <= 0 or not nonempty(Quantified(mono.binders, mono.domain, ()), facts):
        return False
    inner = facts.also(mono.domain)
    return all(_factor_positive(f, inner) for f in mono.factors)


def _factor_positive(factor: MonoFactor, facts: Facts) -> bool:
    match factor:
        case Apply("exp", (x,)):
            return is_total(x, facts)
        case Apply("recip" | "sqrt", (x,)):
            return is_positive(x, facts)
        case SymbolValue(name):
            return facts.imply(Constraint(symbol(name) - 1))
        case Extreme("max", parts):
            # A maximum of nothing is below 0: some part has to have a value.
            return any(not p.binders and not p.domain and is_positive(p.body, facts) for p in parts)
        case _:
            return False


def nonempty(part: Quantified, facts: Facts) -> bool:
    """
    Return whether it is shown that there is a value in a set: for each binder, every lower bound is below every upper
    one. `facts` are constraints that hold.
    """
    if not facts.imply_all(c for c in part.domain if c.poly.symbols.isdisjoint(part.binders)):
        return False
    for b in part.binders:
        own = [c for c in part.domain if b in c.poly.symbols]
        factors = [c.poly.coefficient(b).constant for c in own]
        alone = all(c.poly.symbols.isdisjoint(set(part.binders) - {b}) and not c.equal for c in own)
        if not alone or any(f not in (1, -1) for f in factors):
            return False
        lower = [-c.poly.without(b) for c, f in zip(own, factors, strict=True) if f == 1]
        upper = [c.poly.without(b) for c, f in zip(own, factors, strict=True) if f == -1]
        if not all(facts.imply(Constraint(u - low)) for low in lower for u in upper):
            return False
    return True


def not_negative(form: Form, facts: Facts) -> bool:
    """
    Return whether it is shown that a value is 0 or above, or no number: a sum of monomials with coefficients above 0
    and factors that are not negative, or come in pairs. `facts` are constraints that hold.
    """
    if all(m.coefficient > 0 and not signed(m, facts.also(m.domain)) for m in form):
        return True
    size = as_poly(form)
    return size is not None and facts.imply(Constraint(size))


def signed(mono: Mono, facts: Facts) -> list[MonoFactor]:
    """Return the factors of a monomial that may be negative, each once; pairs of equal factors are left out."""
    return [f for f, n in Counter(mono.factors).items() if n % 2 and not factor_not_negative(f, facts)]


def factor_not_negative(factor: MonoFactor, facts: Facts) -> bool:
    """Return whether it is shown that a factor is 0 or above, or no number. `facts` are constraints that hold."""
    match factor:
        case Apply("recip", (x,)):
            return not_negative(x, facts)
        case Apply(function, _):
            return function.removesuffix("'") in NOT_NEGATIVE
        case SymbolValue(name):
            return facts.imply(Constraint(symbol(name)))
        case Extreme("max", parts):
            # A maximum of nothing is below 0: some part has to have a value.
            return any(not p.binders and not p.domain and not_negative(p.body, facts) for p in parts)
        case Extreme("min" | "prod", parts):
            return all(not_negative(p.body, facts.also(p.domain)) for p in parts)
        case _:
            return False


def single(form: Form) -> Mono | None:
    """Return the only monomial of a form, if it is not summed over anything; else None."""
    return form[0] if len(form) == 1 and not form[0].binders else None


def is_turned(form: Form) -> bool:
    """Return whether a form is to be written as the negative of another: its first coefficient is below 0."""
    return bool(form) and min(form, key=lambda m: Mono(UNIT, m.binders, m.domain, m.factors).text).coefficient < 0
