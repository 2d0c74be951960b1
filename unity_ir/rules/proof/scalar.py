"""
Laws of scalar functions, by which the prover brings their values (forms: sums of monomials) to a normal form: what is
known of signs and parity, of functions and their inverses, and the definitions of functions by others.

A law holds for all real numbers at which its left side is a number. Where a rule is to be proved exact (equal to the
last bit), functions whose laws round are named apart (`in_exact`), so that only those laws apply which hold for
floating-point numbers, too: of signs, `abs`, `relu`, maxima and comparisons.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

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
    SymbolValue,
    apply,
    constant,
    scaled,
    times,
)
from unity_ir.rules.proof.solver import Facts

CONDITIONS = ("eq", "ne", "gt", "ge", "lt", "le", "and", "or", "not", "as bool")
"""Functions whose values are 0 and 1."""

ODD = ("tanh", "sin", "erf")
"""Functions f with f(-x) = -f(x)."""

EVEN = ("cos",)
"""Functions f with f(-x) = f(x)."""

NOT_NEGATIVE = ("exp", "sqrt", "abs", "relu", "philox", *CONDITIONS)
"""Functions that are 0 or above wherever they are a number."""

ROUNDING = (*ODD, *EVEN, "log", "sqrt", "pow", "sigmoid", "rsqrt", "exp")
"""Functions with a law that holds for real numbers, and not to the last bit for floating-point ones."""

MOST_FACTORS = 4
"""The largest exponent of a power that is written as a product."""


def in_exact(function: str) -> str:
    """
    Return the name under which a scalar function is known where values are to be equal to the last bit: one without
    laws for functions in `ROUNDING`, such as `exp'`; the function's own for others.
    """
    return f"{function}'" if function in ROUNDING else function


def defined(function: str, arguments: tuple[Form, ...]) -> Form:
    """
    Return the value of a scalar function at real arguments (forms, not yet normal), written by other functions where it
    has a definition: sigmoid(x) = (1 + tanh(x / 2)) / 2, rsqrt(x) = 1 / sqrt(x), powers of small constant exponents as
    products, `lt` and `le` by `gt` and `ge`; else as `forms.apply` does.
    """
    match function, arguments:
        case "sigmoid", (x,):
            half = Fraction(1, 2)
            return (*constant(half), *scaled(apply("tanh", (scaled(x, half),)), half))
        case "rsqrt", (x,):
            return apply("recip", (apply("sqrt", (x,)),))
        case "pow", (x, exponent) if (power := _power(x, exponent)) is not None:
            return power
        case (("lt" | "le"), (a, b)):
            return apply("gt" if function == "lt" else "ge", (b, a))
        case _:
            return apply(function, arguments)


def _power(x: Form, exponent: Form) -> Form | None:
    """Return x to the power of a constant: an integer or a half, small; None for others."""
    if not exponent:
        return constant(Fraction(1))
    match exponent:
        case (Mono(value, (), domain, ()),) if not domain and abs(value) <= MOST_FACTORS:
            pass
        case _:
            return None
    if abs(value) == Fraction(1, 2):
        found = apply("sqrt", (x,))
    elif value.denominator == 1:
        found = constant(Fraction(1))
        for _ in range(abs(value.numerator)):
            found = times(found, x)
    else:
        return None
    return found if value > 0 else apply("recip", (found,))


def simplified(function: str, arguments: tuple[Form, ...], facts: Facts) -> Form | None:
    """
    Return the value of a scalar function at arguments in normal form, by the laws of this module; None where none
    applies. `facts` are constraints that hold.
    """
    match function, arguments:
        case "abs", (x,):
            return _absolute(x, facts)
        case "relu", (x,):
            return _rectified(x, facts)
        case "recip", ((Mono(coefficient, (), domain, (Apply("recip", (x,)),)),),) if not domain:
            return scaled(x, 1 / coefficient)
        case "log", (x,):
            return _logarithm(x, facts)
        case "sqrt", (x,):
            return _root(x)
        case "exp", ((Mono(coefficient, (), domain, (Apply("log", (x,)),)),),) if (
            coefficient == 1 and not domain and not_negative(x, facts)
        ):
            return x
        case "not", ((Mono(coefficient, (), domain, (Apply("not", (x,)),)),),) if coefficient == 1 and not domain:
            return x if is_condition(x) else None
        case "and", (a, b) if is_condition(a) and is_condition(b):
            return times(a, b)
        case (("gt" | "ne"), (a, b)) if _same(a, b):
            return ()
        case (("ge" | "eq"), (a, b)) if _same(a, b):
            return constant(1)
        case _ if function in ODD and _is_turned(arguments[0]):
            return scaled(apply(function, (scaled(arguments[0], -1),)), -1)
        case _ if function in EVEN and _is_turned(arguments[0]):
            return apply(function, (scaled(arguments[0], -1),))
        case _:
            return None


def not_negative(form: Form, facts: Facts) -> bool:
    """
    Return whether it is shown that a value is 0 or above, or no number: a sum of monomials with coefficients above 0
    and factors that are not negative, or come in pairs. `facts` are constraints that hold.
    """
    return all(m.coefficient > 0 and not _signed(m, facts.also(m.domain)) for m in form)


def _signed(mono: Mono, facts: Facts) -> list[MonoFactor]:
    """Return the factors of a monomial that may be negative, each once; pairs of equal factors are left out."""
    return [f for f, n in Counter(mono.factors).items() if n % 2 and not _factor_not_negative(f, facts)]


def _factor_not_negative(factor: MonoFactor, facts: Facts) -> bool:
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


def _single(form: Form) -> Mono | None:
    """Return the only monomial of a form, if it is not summed over anything; else None."""
    return form[0] if len(form) == 1 and not form[0].binders else None


def _absolute(x: Form, facts: Facts) -> Form | None:
    """|c a b| = |c| |a| |b|, |a| = a where a is not negative, and |-a| = |a|."""
    if not_negative(x, facts):
        return x
    if (mono := _single(x)) is None:
        return apply("abs", (scaled(x, -1),)) if _is_turned(x) else None
    signed = _signed(mono, facts.also(mono.domain))
    if not signed:
        return (Mono(abs(mono.coefficient), (), mono.domain, mono.factors),)
    if mono.factors == tuple(signed) and len(signed) == 1 and mono.coefficient == 1 and not mono.domain:
        return None
    factors = list(mono.factors)
    for factor in signed:
        factors[factors.index(factor)] = Apply("abs", ((Mono(UNIT, (), frozenset(), (factor,)),),))
    return (Mono(abs(mono.coefficient), (), mono.domain, tuple(factors)),)


def _rectified(x: Form, facts: Facts) -> Form | None:
    """relu(c a b) = c a relu(b) for c above 0 and a not negative; relu(a) = a and relu(-a) = 0 for such a."""
    if not_negative(x, facts):
        return x
    if not_negative(scaled(x, -1), facts):
        return ()
    mono = _single(x)
    if mono is None:
        return None
    inside = facts.also(mono.domain)
    outer = [f for f in mono.factors if _factor_not_negative(f, inside)]
    if not outer and abs(mono.coefficient) == 1 and not mono.domain:
        return None
    rest = tuple(f for f in mono.factors if f not in outer)
    sign = UNIT if mono.coefficient > 0 else Fraction(-1)
    inner = Apply("relu", ((Mono(sign, (), frozenset(), rest),),))
    return (Mono(abs(mono.coefficient), (), mono.domain, (*outer, inner)),)


def _logarithm(x: Form, facts: Facts) -> Form | None:
    """log(exp(a) b / c) = a + log(b) - log(c), for c not negative."""
    mono = _single(x)
    if mono is None or mono.domain:
        return None
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


def _root(x: Form) -> Form | None:
    """sqrt(a a) = |a|."""
    mono = _single(x)
    if mono is None or mono.domain or mono.coefficient != 1 or not mono.factors:
        return None
    counts = Counter(mono.factors)
    if any(n % 2 for n in counts.values()):
        return None
    half = tuple(f for f, n in counts.items() for _ in range(n // 2))
    return apply("abs", ((Mono(UNIT, (), frozenset(), half),),))


def _is_turned(form: Form) -> bool:
    """Return whether a form is to be written as the negative of another: its first coefficient is below 0."""
    return bool(form) and min(form, key=lambda m: Mono(UNIT, m.binders, m.domain, m.factors).text).coefficient < 0


def is_condition(form: Form) -> bool:
    """Return whether a value is 0 or 1: a product of conditions."""
    match form:
        case (Mono(coefficient, (), _, factors),):
            return coefficient == 1 and all(isinstance(f, Apply) and f.function in CONDITIONS for f in factors)
        case _:
            return False


def two_parts(factor: Extreme) -> Form | None:
    """
    Return the value of a maximum or minimum of two values as max(x, 0) = relu(x), min(x, 0) = -relu(-x) or max(x, -x) =
    |x|; of a single value, or of equal ones, that value; None for others.
    """
    if factor.reducer not in ("max", "min") or any(p.binders or p.domain for p in factor.parts):
        return None
    bodies = list({Quantified((), frozenset(), p.body).text: p.body for p in factor.parts}.values())
    if len(bodies) == 1:
        return bodies[0]
    if len(bodies) != 2:
        return None
    sign = 1 if factor.reducer == "max" else -1
    if () in bodies:
        (x,) = [b for b in bodies if b != ()]
        return scaled(apply("relu", (scaled(x, sign),)), sign)
    if _same(bodies[0], scaled(bodies[1], -1)):
        return scaled(apply("abs", (bodies[0],)), sign)
    return None


def _same(a: Form, b: Form) -> bool:
    return Counter(m.text for m in a) == Counter(m.text for m in b)
