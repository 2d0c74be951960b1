"""
Axioms of scalar functions, as the checker knows them. Each takes a function's value and `holds`, which answers whether
a constraint on integers holds there, and returns the form that equals it, or refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from unity_ir.rules.certificate.comparisons import COMPARED
from unity_ir.rules.certificate.terms import (
    REDUCERS,
    Apply,
    Axiom,
    Constraint,
    Factor,
    Form,
    Holds,
    Mono,
    Refused,
    Scope,
    as_poly,
    call,
    constant,
    not_below_zero,
    of_factor,
    of_poly,
    scaled,
    times,
)
from unity_ir.rules.poly import Poly, symbol


def _argument(of: Apply, function: str) -> Form:
    if of.function != function or len(of.arguments) != 1:
        raise Refused(f"{of} is no {function}")
    return of.arguments[0].body


def _one(form: Form) -> Mono:
    if len(form) != 1 or form[0].binders or form[0].domain:
        raise Refused("not one product")
    return form[0]


def _sigmoid(of: Apply, holds: Holds) -> Form:
    """sigmoid(x) = (1 + tanh(x / 2)) / 2."""
    half = Fraction(1, 2)
    return (*constant(half), *scaled(call("tanh", scaled(_argument(of, "sigmoid"), half)), half))


def _if(of: Apply, holds: Holds) -> Form:
    """A condition is 1 where it holds, else 0."""
    return _argument(of, "if")


def _if_not(of: Apply, holds: Holds) -> Form:
    """The opposite of a condition is 1 minus it."""
    return (*constant(1), *scaled(_argument(of, "if not"), -1))


def _relu_relu(of: Apply, holds: Holds) -> Form:
    """relu(relu(x)) = relu(x)."""
    inner = _argument(of, "relu")
    mono = _one(inner)
    match mono.factors:
        case (Apply("relu"),) if mono.coefficient == 1:
            return inner
        case _:
            raise Refused(f"{of} is no relu of a relu")


def _zero(of: Apply, holds: Holds) -> Form:
    """f(0) = 0 for f that is 0 at 0."""
    if of.function not in ZERO_AT_ZERO or of.arguments[0].body:
        raise Refused(f"{of} is not shown to be 0")
    return ()


ZERO_AT_ZERO = ("relu", "gelu", "erf", "sqrt", "tanh", "sin", "abs", "floor")
"""Functions that are 0 at 0."""


def _recip(of: Apply, holds: Holds) -> Form:
    """1 / (c a b) = 1/c * 1/a * 1/b for a number c other than 0."""
    mono = _one(_argument(of, "recip"))
    if not mono.coefficient:
        raise Refused("0 has no reciprocal")
    return (Mono(1 / mono.coefficient, (), frozenset(), tuple(_applied("recip", f) for f in mono.factors)),)


def _applied(function: str, factor: Factor) -> Apply:
    return Apply(function, (Scope((), frozenset(), of_factor(factor)),))


def _relu_sign(of: Apply, holds: Holds) -> Form:
    """relu(x) > 0 is x > 0."""
    if of.function != "gt" or of.arguments[1].body:
        raise Refused(f"{of} is not whether something is above 0")
    mono = _one(of.arguments[0].body)
    if mono.coefficient != 1 or len(mono.factors) != 1 or not isinstance(mono.factors[0], Apply):
        raise Refused(f"{of} is not whether a relu is above 0")
    return call("gt", _argument(mono.factors[0], "relu"), ())


def _extreme(of: Apply, holds: Holds) -> Form:
    """maximum(a, b) is the maximum of the values a and b."""
    reducer = {"maximum": "max", "minimum": "min"}.get(of.function)
    if reducer is None:
        raise Refused(f"{of} is no maximum of two")
    return of_factor(Apply(reducer, of.arguments))


def _flat(of: Apply, holds: Holds) -> Form:
    """A maximum of maxima is that of all their values; so are minima and products."""
    for n, outer in enumerate(of.arguments if of.function in REDUCERS else ()):
        match outer.body:
            case (Mono(one, (), domain, (Apply(function, inner),)),) if (
                function == of.function and one == 1 and not domain
            ):
                parts = tuple(_joined(outer, i) for i in inner)
                return of_factor(Apply(function, (*of.arguments[:n], *parts, *of.arguments[n + 1 :])))
            case _:
                pass
    raise Refused(f"{of} has no values of its own kind")


def _joined(outer: Scope, inner: Scope) -> Scope:
    known = frozenset(outer.binders).union(*(c.poly.symbols for c in outer.domain))
    if known & set(inner.binders):
        raise Refused(f"{', '.join(inner.binders)} would be captured")
    return Scope(outer.binders + inner.binders, outer.domain | inner.domain, inner.body)


def _only(of: Apply, holds: Holds) -> Form:
    """A maximum, minimum or product of one value is that value."""
    if of.function not in REDUCERS or len(of.arguments) != 1 or of.arguments[0].binders or of.arguments[0].domain:
        raise Refused(f"{of} is not of one value")
    return of.arguments[0].body


def _relu_inside(of: Apply, holds: Holds) -> Form:
    """relu(max of values) = max of relu(values), if there are any: it is monotone. So for a minimum."""
    mono = _one(_argument(of, "relu"))
    match mono.factors:
        case (Apply("max" | "min" as reducer, parts),) if mono.coefficient == 1 and _some(parts, holds):
            return of_factor(Apply(reducer, tuple(Scope(p.binders, p.domain, call("relu", p.body)) for p in parts)))
        case _:
            raise Refused(f"{of} is no relu of a maximum of something")


def _some(parts: tuple[Scope, ...], holds: Holds) -> bool:
    return any(nonempty(p, holds) for p in parts)


def nonempty(part: Scope, holds: Holds) -> bool:
    """Return whether a set has values: of each index, every lower bound is at most every upper one."""
    bounds: dict[str, tuple[list[Poly], list[Poly]]] = {b: ([], []) for b in part.binders}
    for c in part.domain:
        own = [b for b in part.binders if b in c.poly.symbols]
        if not own:
            if not holds(c):
                return False
            continue
        factor, rest = c.poly.coefficient(own[0]), c.poly.without(own[0])
        if len(own) > 1 or c.equal or factor.constant not in (1, -1) or rest + factor * symbol(own[0]) != c.poly:
            return False
        bounds[own[0]][factor.constant == -1].append(rest if factor.constant == -1 else -rest)
    return all(holds(Constraint(high - low)) for lows, highs in bounds.values() for low in lows for high in highs)


def _constant_extreme(of: Apply, holds: Holds) -> Form:
    """A maximum of one value, as often as there are indices, is that value, if there are any."""
    if of.function not in ("max", "min") or len(of.arguments) != 1:
        raise Refused(f"{of} is no maximum over one set")
    (part,) = of.arguments
    if any(not m.free.isdisjoint(part.binders) for m in part.body) or not nonempty(part, holds):
        raise Refused(f"{of} is of several values, or of none")
    return part.body


def _repeated(of: Apply, holds: Holds) -> Form:
    """A maximum does not ask how often a value is among those it is of."""
    parts = tuple(dict.fromkeys(of.arguments))
    if of.function not in ("max", "min") or len(parts) == len(of.arguments):
        raise Refused(f"{of} is of no set twice")
    return of_factor(Apply(of.function, parts))


def _scaled_extreme(of: Apply, holds: Holds) -> Form:
    """The maximum of c x is c times that of x for c above 0, and c times the minimum of x for c below 0."""
    other = {"max": "min", "min": "max"}.get(of.function)
    by = {m.coefficient for p in of.arguments for m in p.body}
    if other is None or len(by) != 1 or any(len(p.body) != 1 for p in of.arguments) or 0 in by:
        raise Refused(f"{of} is of no multiples")
    (c,) = by
    parts = tuple(Scope(p.binders, p.domain, scaled(p.body, 1 / c)) for p in of.arguments)
    return scaled(of_factor(Apply(of.function if c > 0 else other, parts)), c)


def _exp_sum(of: Apply, holds: Holds) -> Form:
    """exp(a + b) = exp(a) exp(b), and exp(0) = 1."""
    found = constant(1)
    for mono in _argument(of, "exp"):
        found = times(found, call("exp", (mono,)))
    return found


def _inside(of: Apply, outer: str, inner: str) -> Form:
    """Return the x of `outer(inner(x))`."""
    mono = _one(_argument(of, outer))
    match mono.factors:
        case (Apply(function, (x,)),) if function == inner and mono.coefficient == 1:
            return x.body
        case _:
            raise Refused(f"{of} is no {outer} of a {inner}")


def _over_exp(of: Apply, holds: Holds) -> Form:
    """1 / exp(x) = exp(-x)."""
    return call("exp", scaled(_inside(of, "recip", "exp"), -1))


def _over_over(of: Apply, holds: Holds) -> Form:
    """1 / (1 / x) = x, wherever that is a number."""
    return _inside(of, "recip", "recip")


def _log_exp(of: Apply, holds: Holds) -> Form:
    """log(exp(x) exp(y)) = x + y."""
    mono = _one(_argument(of, "log"))
    exponents = [f.arguments[0].body for f in mono.factors if isinstance(f, Apply) and f.function == "exp"]
    if mono.coefficient != 1 or len(exponents) != len(mono.factors):
        raise Refused(f"{of} is no logarithm of exponentials")
    return tuple(m for x in exponents for m in x)


def _power(of: Apply, holds: Holds) -> Form:
    """Powers of small integers are products, or 1 over them; exp(x) to the power of y is exp(x y)."""
    if of.function != "pow":
        raise Refused(f"{of} is no power")
    x, exponent = (a.body for a in of.arguments)
    value = number_of(exponent)
    if value is None:
        mono = _one(x)
        match mono.factors:
            case (Apply("exp", (inner,)),) if mono.coefficient == 1:
                return call("exp", times(inner.body, exponent))
            case _:
                raise Refused(f"{of} is no power of a small integer")
    if abs(value) == Fraction(1, 2):
        found = call("sqrt", x)
    elif value.denominator == 1 and abs(value) <= MOST_FACTORS:
        found = constant(1)
        for _ in range(abs(value.numerator)):
            found = times(found, x)
    else:
        raise Refused(f"{of} is no power of a small integer")
    return found if value >= 0 else call("recip", found)


MOST_FACTORS = 4
"""The largest exponent that is written out."""


def number_of(form: Form) -> Fraction | None:
    """Return the number that a form is; None if it is none."""
    if any(m.factors or m.binders or m.domain for m in form):
        return None
    return sum((m.coefficient for m in form), Fraction(0))


def _rsqrt(of: Apply, holds: Holds) -> Form:
    """rsqrt(x) = 1 / sqrt(x)."""
    return call("recip", call("sqrt", _argument(of, "rsqrt")))


def _of_square(of: Apply, holds: Holds) -> Form:
    """sqrt(x x) = abs(x)."""
    mono = _one(_argument(of, "sqrt"))
    once = list(dict.fromkeys(mono.factors))
    if mono.coefficient != 1 or any(mono.factors.count(f) % 2 for f in once):
        raise Refused(f"{of} is not of a square")
    half = tuple(f for f in once for _ in range(mono.factors.count(f) // 2))
    return (Mono(Fraction(1), (), frozenset(), tuple(_applied("abs", f) for f in half)),)


def _abs(of: Apply, holds: Holds) -> Form:
    """abs(x) = x for x that is 0 or above; abs(c a b) = abs(c) abs(a) abs(b), and abs(1 / x) = 1 / abs(x)."""
    x = _argument(of, "abs")
    if not_below_zero(x, holds):
        return x
    mono = _one(x)
    factors: list[Factor] = []
    for f in mono.factors:
        match f:
            case Apply("recip", (y,)):
                factors.append(Apply("recip", (Scope((), frozenset(), call("abs", y.body)),)))
            case _:
                factors.append(_applied("abs", f))
    return (replace(mono, coefficient=abs(mono.coefficient), factors=tuple(factors)),)


def _by_sign(of: Apply, holds: Holds) -> Form:
    """abs(x) = x where x > 0, and -x where 0 > x."""
    x = _argument(of, "abs")
    return times(x, sign_of(x))


def sign_of(x: Form) -> Form:
    """Return 1 where x > 0, -1 where 0 > x, else 0."""
    return (*call("gt", x, ()), *scaled(call("gt", (), x), -1))


def _by_comparison(of: Apply, holds: Holds) -> Form:
    """max(a, b) = a where a > b, else b; min(a, b) = b where a > b, else a."""
    a, b = _values(of)
    a, b = (a, b) if of.function == "max" else (b, a)
    above = call("gt", *_values(of))
    return (*times(above, a), *b, *scaled(times(above, b), -1))


def _values(of: Apply) -> tuple[Form, ...]:
    """Return the values of which an extreme is taken, if it is of two."""
    if of.function not in ("max", "min") or len(of.arguments) != 2 or any(p.binders or p.domain for p in of.arguments):
        raise Refused(f"{of} is not of two values")
    return tuple(p.body for p in of.arguments)


def _exceeded(of: Apply, holds: Holds) -> Form:
    """A maximum is that without a value that another one is at least; the least of maxima without one of more."""
    sign = {"max": 1, "min": -1}.get(of.function, 0)
    for n, p in enumerate(of.arguments):
        rest = of.arguments[:n] + of.arguments[n + 1 :]
        for q in rest if sign and not p.binders and not p.domain else ():
            if q.binders or q.domain:
                continue
            more = not_below_zero(scaled(_difference(q.body, p.body), sign), holds)
            match p.body:
                case (Mono(one, (), domain, (Apply(function, parts),)),) if one == 1 and not domain:
                    more = more or (function in ("max", "min") and function != of.function and q in parts)
                case _:
                    pass
            if more:
                return of_factor(Apply(of.function, rest))
    raise Refused(f"{of} has no value that another one exceeds")


def _difference(one: Form, other: Form) -> Form:
    """Return what is left of one form without another, less the addends that both have."""
    left, right = list(one), list[Mono]()
    for m in other:
        if m in left:
            left.remove(m)
        else:
            right.append(m)
    found = (*left, *scaled(tuple(right), -1))
    size = as_poly(found)
    return found if size is None else of_poly(size)


def _distributed(of: Apply, holds: Holds) -> Form:
    """max(min(a, b), c) = min(max(a, c), max(b, c)), and the other way about."""
    for n, p in enumerate(of.arguments if not any(a.binders or a.domain for a in of.arguments) else ()):
        match p.body:
            case (Mono(one, (), domain, (Apply(function, parts),)),) if one == 1 and not domain:
                if {function, of.function} == {"max", "min"} and not any(a.binders or a.domain for a in parts):
                    rest = of.arguments[:n] + of.arguments[n + 1 :]
                    inner = (of_factor(Apply(of.function, (q, *rest))) for q in parts)
                    return of_factor(Apply(function, tuple(Scope((), frozenset(), x) for x in inner)))
            case _:
                pass
    raise Refused(f"{of} is of no {'minimum' if of.function == 'max' else 'maximum'}")


def _log(of: Apply, holds: Holds) -> Form:
    """log(sqrt(x)) = log(x) / 2, and log(1 / x) = -log(x)."""
    mono = _one(_argument(of, "log"))
    match mono.factors:
        case (Apply("sqrt" | "recip" as function, (x,)),) if mono.coefficient == 1:
            return scaled(call("log", x.body), Fraction(1, 2) if function == "sqrt" else -1)
        case _:
            raise Refused(f"{of} is no logarithm of a root")


SCALARS: Mapping[str, Axiom] = {
    "if": _if,
    "if not": _if_not,
    "sigmoid": _sigmoid,
    "relu of relu": _relu_relu,
    "zero": _zero,
    "reciprocal of a product": _recip,
    "sign of relu": _relu_sign,
    "maximum of two": _extreme,
    "maximum of maxima": _flat,
    "maximum of one": _only,
    "relu of maximum": _relu_inside,
    "maximum of a constant": _constant_extreme,
    "maximum of repeated values": _repeated,
    "maximum of multiples": _scaled_extreme,
    "exponential of a sum": _exp_sum,
    "reciprocal of an exponential": _over_exp,
    "reciprocal of a reciprocal": _over_over,
    "logarithm of exponentials": _log_exp,
    "power": _power,
    "rsqrt": _rsqrt,
    "of a square": _of_square,
    "absolute value": _abs,
    "absolute value by sign": _by_sign,
    "maximum by comparison": _by_comparison,
    "maximum without less": _exceeded,
    "maximum of minima": _distributed,
    "logarithm of a root": _log,
    **COMPARED,
}
"""Axioms by name."""
