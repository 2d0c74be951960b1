"""Laws of products: pairs of absolute values and of roots, and exponentials of multiples of one value."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from unity_ir.rules.proof.conditions import excluded
from unity_ir.rules.proof.forms import UNIT, Apply, Form, Mono, MonoFactor, apply, constant, scaled, times
from unity_ir.rules.proof.signs import is_total, not_negative
from unity_ir.rules.proof.solver import Facts


def with_powers(factors: list[MonoFactor], facts: Facts) -> tuple[list[MonoFactor], list[Form]] | None:
    """
    Return (factors that are left of a product, further factors that are sums), by laws of pairs: |a| |a| = a a,
    sqrt(a) sqrt(a) = a for a that is not negative, cos^2 = 1 - sin^2, exp(a) exp(b) of multiples of one monomial as
    one. Returns None where the product is 0, since two conditions exclude each other: `a > b` and `b > a`, a and
    `a = 0`.
    """
    if len(factors) < 2:
        return factors, []
    left: list[MonoFactor] = []
    sums: list[Form] = []
    exponents: dict[Mono, Fraction] = {}
    counts = Counter(
        f for f in factors if isinstance(f, Apply) and (f.function in ("abs", "sqrt", "cos") or _is_recip_abs(f))
    )
    for f in factors:
        match f:
            case Apply("exp", ((Mono(coefficient, binders, domain, inner),),)):
                key = Mono(UNIT, binders, domain, inner)
                exponents[key] = exponents.get(key, Fraction(0)) + coefficient
            case Apply("gt" | "eq" as function, (a, b)) if excluded(function, a, b, factors, facts):
                return None
            case Apply("recip" | "cos") if counts[f] > 1:
                continue
            case Apply("abs" | "sqrt" as function, (x,)) if counts[f] > 1 and (
                function == "abs" or not_negative(x, facts)
            ):
                continue
            case _:
                left.append(f)
    for f, n in counts.items():
        (x,) = f.arguments
        if f.function == "cos" and n > 1:
            sine = apply("sin", (x,))
            sums += [(*constant(1), *scaled(times(sine, sine), -1))] * (n // 2)
            left += [f] * (n % 2)
        elif f.function == "recip" and n > 1:
            (inner,) = x[0].factors
            assert isinstance(inner, Apply)
            half = apply("recip", inner.arguments)
            sums += [times(half, half)] * (n // 2)
            left += [f] * (n % 2)
        elif n > 1 and (f.function == "abs" or not_negative(x, facts)):
            sums += [times(x, x) if f.function == "abs" else x] * (n // 2)
            left += [f] * (n % 2)
    for key, coefficient in exponents.items():
        of: Form = (key,)
        if not coefficient and not is_total(of, facts):
            # Both stay: what is no number cancels with nothing.
            left += [Apply("exp", (of,)), Apply("exp", (scaled(of, -1),))]
        elif coefficient:
            left.append(Apply("exp", ((Mono(coefficient, key.binders, key.domain, key.factors),),)))
    return left, sums


def _is_recip_abs(factor: Apply) -> bool:
    """Return whether a factor is 1 / |x|."""
    match factor:
        case Apply("recip", ((Mono(coefficient, (), domain, (Apply("abs", _),)),),)):
            return coefficient == 1 and not domain
        case _:
            return False
