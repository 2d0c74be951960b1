"""
What false equations are written with: forms, steps of certificates, and the condition that refuses an equation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

from unity_ir.rules.certificate.terms import (
    Apply,
    Constraint,
    Factor,
    Form,
    Mono,
    Number,
    Read,
    Scope,
    box,
    call,
    of_factor,
    scaled,
)
from unity_ir.rules.certificate.write import said
from unity_ir.rules.poly import Poly, number, symbol

d, i, j, k, m, n, s, z = map(symbol, "dijkmnsz")
ZERO, ONE = number(0), number(1)
Steps = list[dict[str, Any]]


def at_least(p: Poly, low: Poly | int = 0) -> Constraint:
    return Constraint(p - low)


def equals(p: Poly, q: Poly | int = 0) -> Constraint:
    return Constraint(p - q, equal=True)


def read(tensor: str, *indices: Poly) -> Factor:
    return Read(tensor, indices)


def total(binders: str, domain: Iterable[Constraint], *factors: Factor) -> Form:
    """The sum of a product over indices in a domain."""
    return (Mono(Fraction(1), tuple(binders), frozenset(domain), factors),)


def without(form: Form, other: Form) -> Form:
    return (*form, *scaled(other, -1))


def function(name: str, *arguments: Form) -> Factor:
    (mono,) = call(name, *arguments)
    return mono.factors[0]


def maximum(binders: str, domain: Iterable[Constraint], body: Form, reducer: str = "max") -> Factor:
    return Apply(reducer, (Scope(tuple(binders), frozenset(domain), body),))


def step(law: str, at: int | list[int] = 0, **what: Any) -> dict[str, Any]:
    plain = {name: said(of) if isinstance(of, Poly) else of for name, of in what.items()}
    return {"law": law, "at": at if isinstance(at, list) else [at], **plain}


def cancel(*these: int, names: Iterable[dict[str, str]] = ()) -> dict[str, Any]:
    return step("cancel", [], these=list(these), names=list(names) or [{}] * len(these))


CANCEL = cancel(0, 1)
Y = read("y")
X = read("x", k)
BOX = box("k", n)


@dataclass(frozen=True)
class False_:
    """A false equation (`form` is not 0), steps to it, and the condition without which they are accepted."""

    module: ModuleType
    function: str
    condition: str
    instead: str
    form: Form
    steps: Steps
    facts: tuple[Constraint, ...] = ()
    source: Form = ()
    """The source of the goal, which is a number (`replay.Given`)."""


V = read("v")
"""A tensor without dims, besides `y`."""


def value(name: str, *arguments: Form) -> Form:
    return total("", (), function(name, *arguments))


def of(
    axiom: str,
    module: ModuleType,
    name: str,
    condition: str,
    instead: str,
    left: Form,
    right: Form,
    then: Iterable[dict[str, Any]] = (CANCEL,),
) -> False_:
    """A false equation by an axiom of scalar functions."""
    return False_(
        module, name, condition, instead, without(left, right), [step("scalar", factor=0, axiom=axiom), *then]
    )


def extreme(reducer: str, *values: Form) -> Factor:
    return Apply(reducer, tuple(Scope((), frozenset(), x) for x in values))


y, v = total("", (), Y), total("", (), V)
ZERO_Y = value("eq", y, ())
OVER_TWICE = function("recip", scaled(value("abs", y), 2))
N, TWO = of_factor(Number(n)), scaled(total("", ()), 2)
over = value("recip", y)
