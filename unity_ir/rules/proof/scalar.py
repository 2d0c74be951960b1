"""
Laws of scalar functions, by which the prover brings their values (forms: sums of monomials) to a normal form: what is
known of signs and parity, of functions and their inverses, and the definitions of functions by others.

A law holds for all real numbers at which its left side is a number. Where a rule is to be proved exact (equal to the
last bit), functions whose laws round are named apart (`in_exact`), so that only those laws apply which hold for
floating-point numbers, too: of signs, `abs`, `relu`, maxima and comparisons.
"""

from __future__ import annotations

from fractions import Fraction

from unity_ir.rules.proof.conditions import complement, is_condition
from unity_ir.rules.proof.forms import UNIT, Apply, Form, Mono, apply, constant, scaled, times
from unity_ir.rules.proof.quotients import logarithm, reciprocal, root
from unity_ir.rules.proof.signs import factor_not_negative, is_turned, not_negative, signed, single
from unity_ir.rules.proof.solver import Facts

ODD = ("tanh", "sin", "erf")
"""Functions f with f(-x) = -f(x)."""

EVEN = ("cos",)
"""Functions f with f(-x) = f(x)."""

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
        case "recip", ((Mono(coefficient, (), domain, (Apply("pow", (x, exponent)),)),),) if not domain:
            return scaled(apply("pow", (x, scaled(exponent, -1))), 1 / coefficient)
        case "recip", (x,):
            return reciprocal(x)
        case "log", (x,):
            return logarithm(x, facts)
        case "sqrt", (x,):
            return root(x, facts)
        case "exp", ((Mono(coefficient, (), domain, (Apply("log", (x,)),)),),) if not domain and not_negative(x, facts):
            return _power(x, constant(coefficient))
        case "pow", (x, exponent):
            return _powered(x, exponent)
        case "and", (a, b) if is_condition(a) and is_condition(b):
            return times(a, b)
        case "or", (a, b) if is_condition(a) and is_condition(b):
            return (*a, *b, *scaled(times(a, b), -1))
        case "not", (x,) if is_condition(x):
            return complement(x)
        case _ if function in ODD and is_turned(arguments[0]):
            return scaled(apply(function, (scaled(arguments[0], -1),)), -1)
        case _ if function in EVEN and is_turned(arguments[0]):
            return apply(function, (scaled(arguments[0], -1),))
        case _:
            return None


def _powered(x: Form, exponent: Form) -> Form | None:
    """exp(a) to the power of b = exp(a b); constant exponents as `_power` does."""
    if (power := _power(x, exponent)) is not None:
        return power
    match x:
        case (Mono(coefficient, (), domain, factors),) if coefficient == 1 and not domain and factors:
            exponentials = [f for f in factors if isinstance(f, Apply) and f.function == "exp"]
            if len(exponentials) < len(factors):
                return None
            return apply("exp", (times(tuple(m for f in exponentials for m in f.arguments[0]), exponent),))
        case _:
            return None


def _absolute(x: Form, facts: Facts) -> Form | None:
    """|c a b| = |c| |a| |b|, |a| = a where a is not negative, and |-a| = |a|."""
    if not_negative(x, facts):
        return x
    if (mono := single(x)) is None:
        return apply("abs", (scaled(x, -1),)) if is_turned(x) else None
    turning = signed(mono, facts.also(mono.domain))
    if not turning:
        return (Mono(abs(mono.coefficient), (), mono.domain, mono.factors),)
    alone = mono.factors == tuple(turning) and len(turning) == 1 and mono.coefficient == 1 and not mono.domain
    if alone and not (isinstance(turning[0], Apply) and turning[0].function == "recip"):
        return None
    factors = list(mono.factors)
    for factor in turning:
        match factor:
            case Apply("recip", inner):
                value = Apply("recip", (apply("abs", inner),))
            case _:
                value = Apply("abs", ((Mono(UNIT, (), frozenset(), (factor,)),),))
        factors[factors.index(factor)] = value
    return (Mono(abs(mono.coefficient), (), mono.domain, tuple(factors)),)


def _rectified(x: Form, facts: Facts) -> Form | None:
    """relu(c a b) = c a relu(b) for c above 0 and a not negative; relu(a) = a and relu(-a) = 0 for such a."""
    if not_negative(x, facts):
        return x
    if not_negative(scaled(x, -1), facts):
        return ()
    mono = single(x)
    if mono is None:
        return None
    inside = facts.also(mono.domain)
    outer = [f for f in mono.factors if factor_not_negative(f, inside)]
    if not outer and abs(mono.coefficient) == 1 and not mono.domain:
        return None
    rest = tuple(f for f in mono.factors if f not in outer)
    sign = UNIT if mono.coefficient > 0 else Fraction(-1)
    inner = Apply("relu", ((Mono(sign, (), frozenset(), rest),),))
    return (Mono(abs(mono.coefficient), (), mono.domain, (*outer, inner)),)
