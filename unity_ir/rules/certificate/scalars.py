"""
Axioms of scalar functions, as the checker knows them. Each takes a function's value and `holds`, which answers whether
a constraint on integers holds there, and returns the form that equals it, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeAlias

from unity_ir.rules.certificate.terms import (
    REDUCERS,
    Apply,
    Constraint,
    Form,
    Mono,
    Number,
    Refused,
    Scope,
    call,
    constant,
    of_factor,
    scaled,
)
from unity_ir.rules.poly import Poly, symbol

Holds: TypeAlias = Callable[[Constraint], bool]
Axiom: TypeAlias = Callable[[Apply, Holds], Form]


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
    return (Mono(1 / mono.coefficient, (), frozenset(), tuple(_over(f) for f in mono.factors)),)


def _over(factor: Apply | Number | object) -> Apply:
    (mono,) = call("recip", of_factor(factor))  # pyright: ignore[reportArgumentType]
    (made,) = mono.factors
    assert isinstance(made, Apply)
    return made


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
}
"""Axioms by name."""
