"""
Each law of the checker refuses what is false: for every side condition there is an equation that does not hold, and
that a checker without the condition accepts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest

from unity_ir.rules.certificate import comparisons, defined, laws, replay, scalars, terms
from unity_ir.rules.certificate.defined import EXTREMES, require_defined
from unity_ir.rules.certificate.replay import Given
from unity_ir.rules.certificate.terms import (
    PARTIAL,
    Apply,
    Constraint,
    Factor,
    Form,
    Mono,
    Number,
    Read,
    Refused,
    Scope,
    box,
    call,
    of_factor,
    scaled,
    substitute,
    times,
)
from unity_ir.rules.certificate.write import said, said_constraint
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
    """What is a number."""


EVERY = {
    "domain, smaller": False_(
        laws,
        "_domain",
        "for c in new - mono.domain",
        "for c in ()",
        without(total("k", BOX, X), total("k", box("k", n - 1), X)),
        [step("domain", to=list(map(said_constraint, box("k", n - 1)))), CANCEL],
    ),
    "domain, larger": False_(
        laws,
        "_domain",
        "for c in mono.domain - new",
        "for c in ()",
        without(total("k", BOX, X), total("k", box("k", n + 1), X)),
        [step("domain", to=list(map(said_constraint, box("k", n + 1)))), CANCEL],
    ),
    "empty": False_(
        laws,
        "_empty",
        "mono.coefficient and not impossible(facts | mono.domain)",
        "False",
        total("k", BOX, X),
        [step("empty")],
    ),
    "split": False_(
        laws,
        "_split",
        "(on, *on.negated())",
        "(on,)",
        without(total("k", BOX, X), total("k", (*BOX, at_least(k, 1)), X)),
        [step("split", on=said_constraint(at_least(k, 1))), CANCEL],
    ),
    "pin, no equation": False_(
        laws,
        "_pin",
        "equation not in mono.domain or",
        "",
        without(total("k", BOX, X), total("", (), read("x", ZERO))),
        [step("pin", binder="k", value=ZERO, factor=ONE), CANCEL],
        (at_least(n, 1),),
    ),
    "pin, by itself": False_(
        laws,
        "_pin",
        "or binder in value.symbols",
        "",
        without(total("k", (*BOX, equals(ZERO)), X), total("", BOX, X)),
        [step("pin", binder="k", value=k, factor=ONE), CANCEL],
    ),
    "pin, times 0": False_(
        laws,
        "_pin",
        "require(Constraint(factor - 1), facts | mono.domain)",
        "pass",
        without(total("k", (*BOX, equals(z * k)), X), total("", (), read("x", ZERO))),
        [step("pin", binder="k", value=ZERO, factor=z), CANCEL],
        (at_least(n, 1),),
    ),
    "pin, not bound": False_(
        laws,
        "_without",
        "binder not in mono.binders",
        "False",
        without(total("", (equals(i),), Y), total("", (), Y)),
        [step("pin", binder="i", value=ZERO, factor=ONE), CANCEL],
    ),
    "capture": False_(
        terms,
        "_seen",
        "if captured:",
        "if False:",
        without(
            total("k", (equals(k, j),), function("exp", total("j", box("j", n), read("x", k, j)))),
            total("", (), function("exp", total("j", box("j", n), read("x", j, j)))),
        ),
        [step("pin", binder="k", value=j, factor=ONE), CANCEL],
    ),
    "rename, to a free index": False_(
        laws,
        "_new",
        "len(set(names)) < len(names) or set(names) & (mono.free | set(mono.binders))",
        "False",
        without(total("k", BOX, read("x", k, j)), total("j", box("j", n), read("x", j, j))),
        [step("rename", binder="k", new="j", sign=1, shift=ZERO), CANCEL],
    ),
    "rename, every other": False_(
        laws,
        "_rename",
        'or said["sign"] not in (1, -1)',
        "",
        without(total("k", BOX, X), total("j", (at_least(j * 2), at_least(n - 1, j * 2)), read("x", j * 2))),
        [step("rename", binder="k", new="j", sign=2, shift=ZERO), CANCEL],
    ),
    "rename, by itself": False_(
        laws,
        "_rename",
        "{binder, new} & shift.symbols or",
        "",
        without(total("k", BOX, X), total("j", (at_least(j * 2), at_least(n - 1, j * 2)), read("x", j * 2))),
        [step("rename", binder="k", new="j", sign=1, shift=j), CANCEL],
    ),
    "facts of another index": False_(
        replay,
        "_only_here",
        "set(binders) & symbols_of(facts)",
        "False",
        without(total("k", BOX, X), total("k", (*BOX, at_least(k, 5)), X)),
        [
            step("rename", binder="k", new="m", sign=1, shift=ZERO),
            step("domain", to=list(map(said_constraint, (*box("m", n), at_least(m, 5))))),
            step("rename", binder="m", new="k", sign=1, shift=ZERO),
            CANCEL,
        ],
        (at_least(m, 5),),
    ),
    "fuse, no box": False_(
        laws,
        "_fuse",
        "or not boxes <= mono.domain",
        "",
        without(
            total("si", (*box("s", d), at_least(i), at_least(n - 1, s * m + i)), read("x", s * m + i)),
            total("k", (*box("k", d * m), at_least(n - 1, k)), X),
        ),
        [step("fuse", outer="s", inner="i", new="k", d=d, m=m), CANCEL],
        (at_least(m, 1),),
    ),
    "fuse, negative": False_(
        laws,
        "_fuse",
        "require(Constraint(m - 1), facts | (mono.domain - boxes))",
        "",
        without(total("si", (*box("s", d), *box("i", m)), read("x", s * m + i)), total("k", box("k", d * m), X)),
        [step("fuse", outer="s", inner="i", new="k", d=d, m=m), CANCEL],
    ),
    "fuse, one alone": False_(
        laws,
        "_fuse",
        "outer in found.free",
        "False",
        without(
            total("si", (*box("s", d), *box("i", m)), read("x", s * m + i), read("v", s)),
            total("k", box("k", d * m), X, read("v", s)),
        ),
        [step("fuse", outer="s", inner="i", new="k", d=d, m=m), CANCEL],
        (at_least(m, 1),),
    ),
    "unfuse, no box": False_(
        laws,
        "_unfuse",
        "not set(box(binder, d * m)) <= mono.domain or",
        "",
        without(total("k", BOX, X), total("k", (*BOX, *box("k", d * m)), X)),
        [
            step("unfuse", binder="k", outer="s", inner="i", d=d, m=m),
            step("fuse", outer="s", inner="i", new="k", d=d, m=m),
            CANCEL,
        ],
        (at_least(m, 1),),
    ),
    "unfuse, negative": False_(
        laws,
        "_unfuse",
        "require(Constraint(m - 1), facts | rest)",
        "",
        without(total("k", box("k", d * m), X), total("si", (*box("s", d), *box("i", m)), read("x", s * m + i))),
        [step("unfuse", binder="k", outer="s", inner="i", d=d, m=m), CANCEL],
    ),
    "radix, below": False_(
        laws,
        "_radix",
        "require(Constraint(m - 1 + low), facts | rest)",
        "",
        without(total("", (equals(i * m + j),), Y), total("", (equals(i), equals(j)), Y)),
        [step("radix", high=i, low=j, m=m), CANCEL],
        (at_least(m - 1, j),),
    ),
    "radix, above": False_(
        laws,
        "_radix",
        "require(Constraint(m - 1 - low), facts | rest)",
        "",
        without(total("", (equals(i * m + j),), Y), total("", (equals(i), equals(j)), Y)),
        [step("radix", high=i, low=j, m=m), CANCEL],
        (at_least(m - 1, -j),),
    ),
    "radix, no equation": False_(
        laws,
        "_radix",
        "equation not in mono.domain",
        "False",
        without(total("", (), Y), total("", (equals(i),), Y)),
        [step("radix", high=i, low=ZERO, m=ONE), CANCEL],
    ),
    "count, mentioned": False_(
        laws,
        "_count",
        "any(binder in f.free for f in mono.factors) or",
        "",
        without(total("k", BOX, X), total("", (), X, Number(n))),
        [step("count", binder="k", low=ZERO, high=n - 1), CANCEL],
        (at_least(n, 1),),
    ),
    "count, too few": False_(
        laws,
        "_count",
        "for c in interval - own",
        "for c in ()",
        without(total("k", BOX, Y), total("", (), Y, Number(n - 1))),
        [step("count", binder="k", low=ZERO, high=n - 2), CANCEL],
        (at_least(n, 1),),
    ),
    "count, too many": False_(
        laws,
        "_count",
        "for c in own - interval",
        "for c in ()",
        without(total("k", (*BOX, at_least(k, 1)), Y), total("", (), Y, Number(n))),
        [
            step("count", binder="k", low=ZERO, high=n - 1),
            CANCEL,
        ],
        (at_least(n, 1),),
    ),
    "count, below none": False_(
        laws,
        "_count",
        "require(Constraint(high - low + 1), facts | rest)",
        "",
        without(total("k", BOX, Y), total("", (), Y, Number(n))),
        [step("count", binder="k", low=ZERO, high=n - 1), CANCEL],
    ),
    "number": False_(
        laws,
        "_number",
        "Fraction(c)",
        "Fraction(1)",
        without(total("", (), Number(n * 2)), total("", (), Number(n))),
        [step("number", factor=0), CANCEL],
    ),
    "guard": False_(
        laws,
        "_guard",
        "COMPARISONS[factor.function]",
        'COMPARISONS["ge"]',
        without(
            total("", (), function("gt", of_factor(Number(i)), of_factor(Number(j)))),
            total("", (at_least(i, j),)),
        ),
        [step("guard", factor=0), CANCEL],
    ),
    "repeat, no condition": False_(
        laws,
        "_repeat",
        "factor.function not in TRUTH",
        "False",
        without(
            total("", (), *[function("exp", total("", (), Y))] * 2), total("", (), function("exp", total("", (), Y)))
        ),
        [step("repeat", factor=0, other=1), CANCEL],
    ),
    "repeat, another": False_(
        laws,
        "_repeat",
        "or not alike",
        "",
        without(
            total("", (), function("gt", total("", (), Y), ()), function("gt", total("", (), read("v")), ())),
            total("", (), function("gt", total("", (), read("v")), ())),
        ),
        [step("repeat", factor=0, other=1), CANCEL],
    ),
    "repeat, itself": False_(
        laws,
        "_repeat",
        'said["factor"] == said["other"]',
        "False",
        without(total("", (), function("gt", total("", (), Y), ())), total("", ())),
        [step("repeat", factor=0, other=0), CANCEL],
    ),
    "cancel, twice": False_(
        laws,
        "cancel",
        'len(set(said["these"])) < len(chosen)',
        "False",
        (*scaled(total("", (), Y), 2), *scaled(total("", (), Y), -1)),
        [cancel(0, 1, 1)],
    ),
    "cancel, other indices": False_(
        laws,
        "cancel",
        "set(renamed.binders) != set(first.binders) or",
        "",
        without(total("k", BOX, Y), total("", BOX, Y)),
        [CANCEL],
    ),
    "cancel, facts of another index": False_(
        laws,
        "cancel",
        "or set(first.binders) & symbols_of(facts)",
        "",
        without(total("k", BOX, Y), total("k", (*BOX, at_least(k, 5)), Y)),
        [CANCEL],
        (at_least(k, 5),),
    ),
    "cancel, other factors": False_(
        laws,
        "cancel",
        "not same_factors(first.factors, renamed.factors, facts | renamed.domain)",
        "False",
        without(total("k", BOX, X), total("k", BOX, read("v", k))),
        [CANCEL],
    ),
    "cancel, other weights": False_(
        laws,
        "cancel",
        "not _unsatisfiable([z3.Sum(held) != 0, *map(_condition, sorted(facts, key=str))])",
        "False",
        (*total("", (), Y), *total("", (), Y)),
        [CANCEL],
    ),
    "cancel, names taken": False_(
        terms,
        "rebound",
        "len(set(new)) < len(new) or set(new) & mono.free",
        "False",
        without(total("j", box("j", n), read("x", j, j)), total("k", BOX, read("x", k, j))),
        [cancel(0, 1, names=[{}, {"k": "j"}])],
    ),
    "cases, one left out": False_(
        replay,
        "_check",
        'len(step["then"]) != len(alternatives)',
        "False",
        total("", (at_least(number(4), n),), Y),
        [step("cases", on=said_constraint(at_least(n, 5)), then=[[step("empty")]])],
    ),
    "digits, no box": False_(
        replay,
        "apply_digits",
        "or not set(box(index, d * m)) <= facts",
        "",
        total("", (at_least(i, d * 2),), Y),
        [step("digits", index="i", outer="s", inner="j", d=d, m=number(2)), step("empty")],
        (*box("i", n), at_least(d, 1)),
    ),
    "digits, not new": False_(
        replay,
        "apply_digits",
        "{outer, inner} & known or",
        "",
        total("", (equals(j, 5),), Y),
        [step("digits", index="i", outer="s", inner="j", d=d, m=number(2)), step("empty")],
        (*box("i", d * 2),),
    ),
    "no number of them": False_(
        terms,
        "one_of",
        "not isinstance(at, int) or not 0 <= at < len(items)",
        "False",
        (*scaled(total("", (), Y), 2), *scaled(total("", (), Y), -1)),
        [cancel(0, 1, -1)],
    ),
    "relu of relu": False_(
        scalars,
        "_relu_relu",
        "if mono.coefficient == 1",
        "",
        without(
            total("", (), function("relu", scaled(call("relu", total("", (), Y)), -1))),
            scaled(call("relu", total("", (), Y)), -1),
        ),
        [step("scalar", factor=0, axiom="relu of relu"), CANCEL],
    ),
    "zero": False_(
        scalars,
        "_zero",
        "of.function not in ZERO_AT_ZERO or",
        "",
        total("", (), function("exp", ())),
        [step("scalar", factor=0, axiom="zero")],
    ),
    "zero, of something": False_(
        scalars,
        "_zero",
        "or of.arguments[0].body",
        "",
        total("", (), function("tanh", total("", (), Y))),
        [step("scalar", factor=0, axiom="zero")],
    ),
    "reciprocal of a sum": False_(
        scalars,
        "_one",
        "or form[0].binders or form[0].domain",
        "",
        without(
            total("", (), function("recip", scaled(total("k", BOX, X), 2))),
            scaled(total("", (), function("recip", total("", (), X))), Fraction(1, 2)),
        ),
        [step("scalar", factor=0, axiom="reciprocal of a product"), CANCEL],
    ),
    "sign of relu": False_(
        scalars,
        "_relu_sign",
        "or of.arguments[1].body",
        "",
        without(
            total("", (), function("gt", call("relu", total("", (), Y)), scaled(total("", ()), -1))),
            total("", (), function("gt", total("", (), Y), ())),
        ),
        [step("scalar", factor=0, axiom="sign of relu"), CANCEL],
    ),
    "maximum of two": False_(
        scalars,
        "_extreme",
        '"minimum": "min"',
        '"minimum": "max"',
        without(
            total("", (), function("minimum", total("", (), Y), total("", (), read("v")))),
            total(
                "",
                (),
                Apply(
                    "max", (Scope((), frozenset(), total("", (), Y)), Scope((), frozenset(), total("", (), read("v"))))
                ),
            ),
        ),
        [step("scalar", factor=0, axiom="maximum of two"), CANCEL],
    ),
    "maximum of minima": False_(
        scalars,
        "_flat",
        "function == of.function and",
        "",
        without(
            total(
                "",
                (),
                maximum("k", BOX, total("", (), maximum("j", box("j", n), total("", (), read("x", k, j)), "min"))),
            ),
            total("", (), maximum("kj", (*BOX, *box("j", n)), total("", (), read("x", k, j)), "min")),
        ),
        [step("scalar", factor=0, axiom="maximum of maxima"), CANCEL],
    ),
    "maximum of maxima, captured": False_(
        scalars,
        "_joined",
        "known & set(inner.binders)",
        "False",
        without(
            total(
                "",
                (),
                maximum("", (at_least(j, 1),), total("", (), maximum("j", box("j", n), total("", (), read("x", j))))),
            ),
            total("", (), maximum("j", (*box("j", n), at_least(j, 1)), total("", (), read("x", j)))),
        ),
        [step("scalar", factor=0, axiom="maximum of maxima"), CANCEL],
    ),
    "maximum of one": False_(
        scalars,
        "_only",
        "or of.arguments[0].binders or of.arguments[0].domain",
        "",
        without(total("", (), maximum("k", BOX, total("", (), X))), total("", (), X)),
        [step("scalar", factor=0, axiom="maximum of one"), CANCEL],
    ),
    "relu of no maximum": False_(
        scalars,
        "_relu_inside",
        "and _some(parts, holds)",
        "",
        without(
            total("", (), function("relu", total("", (), maximum("k", BOX, total("", (), X))))),
            total("", (), maximum("k", BOX, call("relu", total("", (), X)))),
        ),
        [step("scalar", factor=0, axiom="relu of maximum"), CANCEL],
    ),
    "relu of a negated maximum": False_(
        scalars,
        "_relu_inside",
        "mono.coefficient == 1 and",
        "",
        without(
            total("", (), function("relu", scaled(total("", (), maximum("k", BOX, total("", (), X))), -1))),
            total("", (), maximum("k", BOX, call("relu", total("", (), X)))),
        ),
        [step("scalar", factor=0, axiom="relu of maximum"), CANCEL],
        (at_least(n, 1),),
    ),
}


V = read("v")
"""Another number."""


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
EVERY |= {
    "exclude, another": False_(
        laws,
        "_exclude",
        "same_factors((Apply(function, (b, a)),), (equal,), facts | mono.domain)",
        "True",
        total("", (), function("gt", y, ()), function("eq", v, ())),
        [step("exclude", above=0, equal=1)],
    ),
    "square, itself": False_(
        laws,
        "_square",
        'said["factor"] == said["other"] or',
        "",
        without(total("", (), function("abs", y), V, V), total("", (), Y, Y, V)),
        [step("square", factor=0, other=0), CANCEL],
    ),
    "square, another": False_(
        laws,
        "_square",
        "or not alike",
        "",
        without(total("", (), function("abs", y), function("abs", v)), total("", (), V, V)),
        [step("square", factor=1, other=0), CANCEL],
    ),
    "inverse, of another": False_(
        laws,
        "_inverse",
        "inverse = same_factors(one[0][0].factors, one[1][0].factors, here)",
        "inverse = True",
        without(total("", (), function("exp", y), function("exp", v)), total("", ())),
        [step("inverse", factor=0, other=1), CANCEL],
    ),
    "value, captured": False_(
        laws,
        "put",
        "set(m.binders) & (mono.free | set(mono.binders))",
        "False",
        without(
            total("", (), read("v", k), function("if", total("k", BOX, X))),
            total("k", BOX, read("v", k), X),
        ),
        [step("scalar", factor=1, axiom="if"), CANCEL],
    ),
    "exclude, twice the same": False_(
        laws,
        "_exclude",
        "(b, a)),), (equal,)",
        "(a, b)),), (equal,)",
        total("", (), function("gt", y, v), function("gt", y, v)),
        [step("exclude", above=0, equal=1)],
    ),
    "vanish, at least 0": False_(
        laws,
        "_vanish",
        '"eq", (x, y)',
        '"ge", (x, y)',
        total("", (), function("ge", y, ()), Y),
        [step("vanish", factor=0)],
    ),
    "vanish, equal to another": False_(
        laws,
        "_vanish",
        "if not (x.body and y.body)",
        "",
        total("", (), function("eq", y, v), Y),
        [step("vanish", factor=0)],
    ),
    "vanish, another": False_(
        laws,
        "_vanish",
        "zero and not Counter(zero) - Counter(mono.factors)",
        "True",
        total("", (), function("eq", y, ()), V),
        [step("vanish", factor=0)],
    ),
    "vanish, of a sum": False_(
        terms,
        "one_product",
        "and not form[0].binders and not form[0].domain",
        "",
        total("", (), function("eq", total("k", BOX, V), ()), V),
        [step("vanish", factor=0)],
    ),
    "vanish, times 0": False_(
        terms,
        "one_product",
        "and form[0].coefficient != 0",
        "",
        total("", (), function("eq", (Mono(Fraction(0), (), frozenset(), (V,)),), ()), V),
        [step("vanish", factor=0)],
    ),
    "square, over a multiple": False_(
        laws,
        "_square",
        "one == 1 and not domain",
        "True",
        without(total("", (), OVER_TWICE, OVER_TWICE), value("recip", total("", (), Y, Y))),
        [step("square", factor=1, other=0), CANCEL],
    ),
    "square, of a root": False_(
        laws,
        "_squared",
        'if function == "abs"',
        "if function",
        without(total("", (), function("sqrt", y), function("sqrt", y)), total("", (), Y, Y)),
        [step("square", factor=1, other=0), CANCEL],
    ),
    "quotient, of 0": False_(
        defined,
        "quotient",
        "if not _holds(one) and next(found, None) is None:",
        "if False:",
        without(total("", (), Y, function("recip", y)), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
    ),
    "quotient, of an integer that may be 0": False_(
        defined,
        "_above_zero",
        "follows(Constraint(size - 1), facts)",
        "follows(Constraint(size), facts)",
        without(total("", (), Number(n), function("recip", of_factor(Number(n)))), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        (at_least(n),),
    ),
    "quotient, of another": False_(
        defined,
        "quotient",
        'same_factors((Apply("", (Scope((), frozenset(), of_factor(x)),)),), (whole,), here)',
        "True",
        without(total("", (), Number(n), function("recip", v)), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        (at_least(n, 1),),
    ),
    "quotient, over another's absolute value": False_(
        defined,
        "quotient",
        "same_factors((absolute,), (whole,), here)",
        "True",
        without(total("", (), Number(n), function("recip", v)), without(value("gt", N, ()), value("gt", (), N))),
        [step("quotient", factor=0, other=1), cancel(0, 2), CANCEL],
        (at_least(n, 1),),
    ),
    "quotient, times": False_(
        defined,
        "quotient",
        'or over.function != "recip"',
        "",
        without(total("", (), Number(n), function("exp", N)), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        (at_least(n, 1),),
    ),
    "quotient, divided elsewhere": False_(
        defined,
        "quotient",
        "and all(follows(c, here) for c in o.facts)",
        "",
        without(total("", (), Y, function("recip", y)), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        source=total("", (at_least(n, 5),), function("recip", y)),
    ),
    "quotient, divided in another branch": False_(
        defined,
        "_covers",
        "not all(any(same_factors((b,), (c,), facts) for c in target.branches) for b in source.branches)",
        "False",
        without(total("", (), Y, function("recip", y)), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        source=total("", (), function("if", value("gt", v, ())), function("recip", y)),
    ),
    "quotient, another divided": False_(
        defined,
        "_covers",
        "same_factors((other,), (one,), facts)",
        "True",
        without(total("", (), Y, function("recip", y)), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        source=value("recip", v),
    ),
    "quotient, of a floor": False_(
        defined,
        "_nonzero",
        '"sqrt" | "abs"',
        '"sqrt" | "abs" | "floor"',
        without(total("", (), function("floor", y), function("recip", value("floor", y))), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
        source=value("recip", y),
    ),
    "quotient, of a relu": False_(
        defined,
        "_nonzero",
        '"recip" | "exp"',
        '"recip" | "exp" | "relu"',
        without(total("", (), function("relu", y), function("recip", value("relu", y))), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
    ),
    "quotient, of a power": False_(
        defined,
        "_nonzero",
        "if n > 0",
        "if n > 2",
        without(total("", (), function("pow", y, TWO), function("recip", value("pow", y, TWO))), total("", ())),
        [step("quotient", factor=0, other=1), CANCEL],
    ),
    "product equals 1": of(
        "product equals 0",
        comparisons,
        "_no_product",
        "b or",
        "",
        value("eq", total("", (), Y, Y), total("", ())),
        without(scaled(ZERO_Y, 2), times(ZERO_Y, ZERO_Y)),
        (CANCEL, cancel(0, 1, 3), CANCEL),
    ),
    "relu equals 0": of(
        "product equals 0",
        comparisons,
        "_no_product",
        '== "exp"',
        '== "relu"',
        value("eq", value("relu", y), ()),
        (),
        (),
    ),
    "product of no number equals 0": of(
        "product equals 0",
        comparisons,
        "_no_product",
        "_numbers(a)",
        "pass",
        value("eq", total("", (), function("exp", y), function("recip", v)), ()),
        value("eq", value("recip", v), ()),
        (cancel(0, 1), cancel(0, 1)),
    ),
    "below 1": of(
        "below 0", comparisons, "_never_below", "a or", "", value("gt", total("", ()), value("abs", y)), (), ()
    ),
    "below 0, negated": of(
        "below 0",
        terms,
        "not_below_zero",
        "m.coefficient >= 0 and",
        "",
        value("gt", (), scaled(value("abs", y), -1)),
        (),
        (),
    ),
    "below 0, odd": of(
        "below 0", terms, "not_below_zero", "% 2 == 0", "% 2 == 1", value("gt", (), total("", (), Y, Y, Y)), (), ()
    ),
    "below 0, of tanh": of(
        "below 0",
        terms,
        "_never_below_zero",
        "function in NEVER_BELOW_ZERO",
        "True",
        value("gt", (), value("tanh", y)),
        (),
        (),
    ),
    "below 0, of an index": of(
        "below 0", terms, "_never_below_zero", "holds(Constraint(poly))", "True", value("gt", (), N), (), ()
    ),
    "cast, narrower": of(
        "cast of a small number", comparisons, "_small", "of.function not in WIDE or", "", value("as f16", N), N
    ),
    "cast, of a product": of(
        "cast of a small number",
        comparisons,
        "_small",
        "or any(len(m) > 1 or abs(c) > 1 for m, c in size.terms)",
        "",
        value("as f64", of_factor(Number(n * n))),
        of_factor(Number(n * n)),
    ),
    "cast, of a number": of(
        "cast of a small number", comparisons, "_small", "_conditions(x)", "pass", value("as f64", y), y
    ),
    "cast, of a guarded number": of(
        "cast of a small number",
        comparisons,
        "_small",
        "x[0] == Mono(Fraction(1), (), x[0].domain)",
        "x[0].domain",
        value("as f64", total("", (at_least(n, 1),), Y)),
        total("", (at_least(n, 1),), Y),
    ),
    "no cast": of(
        "cast of a small number",
        comparisons,
        "_small",
        'not of.function.startswith(("as ", "wrapped "))',
        "False",
        value("tanh", total("", ())),
        total("", ()),
    ),
    "absolute value of a number": of(
        "absolute value", scalars, "_abs", "not_below_zero(x, holds)", "True", value("abs", y), y
    ),
    "absolute value of a negative": of(
        "absolute value",
        scalars,
        "_abs",
        "abs(mono.coefficient)",
        "mono.coefficient",
        value("abs", scaled(y, -2)),
        scaled(value("abs", y), -2),
    ),
    "minimum by comparison": of(
        "maximum by comparison",
        scalars,
        "_by_comparison",
        'if of.function == "max" else (b, a)',
        "",
        total("", (), extreme("min", y, v)),
        (*total("", (), function("gt", y, v), Y), *v, *scaled(total("", (), function("gt", y, v), V), -1)),
        (cancel(0, 3), cancel(0, 2), CANCEL),
    ),
    "maximum without the larger": of(
        "maximum without less",
        scalars,
        "_exceeded",
        "not_below_zero(scaled(_difference(q.body, p.body), sign), holds)",
        "True",
        total("", (), extreme("max", y, v)),
        total("", (), extreme("max", v)),
    ),
    "minimum without less": of(
        "maximum without less",
        scalars,
        "_exceeded",
        '"min": -1',
        '"min": 1',
        total("", (), extreme("min", (), value("abs", v))),
        total("", (), extreme("min", value("abs", v))),
    ),
    "maximum without a minimum of others": of(
        "maximum without less",
        scalars,
        "_exceeded",
        "and q in parts",
        "",
        total("", (), extreme("max", total("", (), extreme("min", v, (*v, *v))), y)),
        total("", (), extreme("max", y)),
    ),
    "maximum without a maximum": of(
        "maximum without less",
        scalars,
        "_exceeded",
        "function != of.function and",
        "",
        total("", (), extreme("max", total("", (), extreme("max", y, v)), y)),
        total("", (), extreme("max", y)),
    ),
    "maximum without what may be alone": of(
        "maximum without less",
        scalars,
        "_exceeded",
        "if q.binders or q.domain:",
        "if False:",
        total("", (), Apply("max", (Scope((), frozenset(), y), Scope((), frozenset({at_least(n, 5)}), y)))),
        total("", (), Apply("max", (Scope((), frozenset({at_least(n, 5)}), y),))),
    ),
    "maximum of products": of(
        "maximum of minima",
        scalars,
        "_distributed",
        '{function, of.function} == {"max", "min"} and',
        "",
        total("", (), extreme("max", total("", (), extreme("prod", y, v)), ())),
        total("", (), extreme("prod", total("", (), extreme("max", y, ())), total("", (), extreme("max", v, ())))),
    ),
    "logarithm of a multiple of a root": of(
        "logarithm of a root",
        scalars,
        "_log",
        "if mono.coefficient == 1",
        "",
        value("log", scaled(value("sqrt", y), 2)),
        scaled(value("log", y), Fraction(1, 2)),
    ),
    "no condition": of(
        "not",
        comparisons,
        "_conditions",
        "total not in (0, 1)",
        "False",
        value("not", scaled(value("gt", y, ()), 2)),
        without(total("", ()), scaled(value("gt", y, ()), 2)),
        (cancel(0, 2), cancel(0, 1)),
    ),
    "no truth": of(
        "not",
        comparisons,
        "_conditions",
        "or not all(isinstance(f, Apply) and f.function in TRUTH for f in known)",
        "",
        value("not", y),
        without(total("", ()), y),
        (cancel(0, 2), cancel(0, 1)),
    ),
    "no number": of(
        "equals itself",
        comparisons,
        "_numbers",
        'raise Refused(f"{factor} may be no number")',
        "pass",
        value("eq", over, over),
        total("", ()),
    ),
    "another is itself": of(
        "equals itself", comparisons, "_itself", "a != b", "False", value("eq", y, v), total("", ())
    ),
    "another is not above": False_(
        comparisons,
        "_above_itself",
        "a != b",
        "False",
        value("gt", y, v),
        [step("scalar", factor=0, axiom="above itself")],
    ),
    "no truth value": of(
        "equals a truth value",
        comparisons,
        "_of_truth",
        "b not in (constant(1), ())",
        "False",
        value("eq", value("gt", y, ()), v),
        value("gt", y, ()),
    ),
    "multiples below 0": of(
        "compared multiples",
        comparisons,
        "_multiples",
        "abs(m.coefficient)",
        "m.coefficient",
        value("gt", scaled(y, -2), scaled(v, -2)),
        value("gt", y, v),
    ),
    "above a minimum over indices": of(
        "above a maximum",
        comparisons,
        "_above_extreme",
        "any(p.binders or p.domain for p in factor.arguments)",
        "False",
        value(
            "gt",
            total("", (), Apply("min", (Scope((), frozenset(), y), Scope(("k",), frozenset(BOX), total("", (), X))))),
            v,
        ),
        total("", (), function("gt", y, v), function("gt", total("", (), X), v)),
    ),
    "above a negated maximum": of(
        "above a maximum",
        comparisons,
        "_above_extreme",
        "mono.coefficient == 1 and",
        "",
        value("gt", scaled(total("", (), maximum("", (), y)), -1), v),
        value("gt", y, v),
        (cancel(0, 1), cancel(0, 1)),
    ),
    "maximum of values": of(
        "maximum of a constant",
        scalars,
        "_constant_extreme",
        "any(not m.free.isdisjoint(part.binders) for m in part.body) or",
        "",
        total("", (), maximum("k", box("k", number(5)), total("", (), X))),
        total("", (), X),
    ),
    "maximum of nothing": of(
        "maximum of a constant",
        scalars,
        "_constant_extreme",
        "or not nonempty(part, holds)",
        "",
        total("", (), maximum("k", BOX, y)),
        y,
    ),
    "maximum of negatives": of(
        "maximum of multiples",
        scalars,
        "_scaled_extreme",
        "of.function if c > 0 else other",
        "of.function",
        total("", (), maximum("k", BOX, scaled(total("", (), X), -1))),
        scaled(total("", (), maximum("k", BOX, total("", (), X))), -1),
    ),
    "reciprocal of a negated exponential": of(
        "reciprocal of an exponential",
        scalars,
        "_inside",
        "and mono.coefficient == 1",
        "",
        value("recip", scaled(value("exp", y), 2)),
        value("exp", scaled(y, -1)),
    ),
    "logarithm of a multiple": of(
        "logarithm of exponentials",
        scalars,
        "_log_exp",
        "mono.coefficient != 1 or",
        "",
        value("log", scaled(value("exp", y), 2)),
        y,
    ),
    "logarithm of a product": of(
        "logarithm of exponentials",
        scalars,
        "_log_exp",
        "or len(exponents) != len(mono.factors)",
        "",
        value("log", total("", (), function("exp", y), V)),
        y,
    ),
    "power of a multiple": of(
        "power",
        scalars,
        "_power",
        "if mono.coefficient == 1",
        "",
        value("pow", scaled(value("exp", y), 2), v),
        value("exp", total("", (), Y, V)),
    ),
    "power of a fraction": of(
        "power",
        scalars,
        "_power",
        "value.denominator == 1 and",
        "",
        value("pow", y, scaled(total("", ()), Fraction(3, 4))),
        total("", (), Y, Y, Y),
    ),
    "root of no square": of(
        "of a square",
        scalars,
        "_of_square",
        "or any(mono.factors.count(f) % 2 for f in once)",
        "",
        value("sqrt", total("", (), Y, Y, Y)),
        value("abs", y),
    ),
    "root of a multiple": of(
        "of a square",
        scalars,
        "_of_square",
        "mono.coefficient != 1 or",
        "",
        value("sqrt", scaled(total("", (), Y, Y), 2)),
        value("abs", y),
    ),
}


def mutant(of: False_, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a condition out of the checker."""
    old = getattr(of.module, of.function)
    source = inspect.getsource(old)
    assert source.count(of.condition) == 1, source
    namespace = of.module.__dict__
    exec(compile(source.replace(of.condition, of.instead), "mutant", "exec"), namespace)
    new = namespace[of.function]
    setattr(of.module, of.function, old)
    for module in (comparisons, defined, laws, replay, scalars, terms):
        for name, value in list(vars(module).items()):
            if value is old:
                monkeypatch.setattr(module, name, new)
    for table in (laws.MONOMIALS, scalars.SCALARS):
        for name, value in list(table.items()):
            if value is old:
                monkeypatch.setitem(table, name, new)  # pyright: ignore


def accepted(of: False_) -> bool:
    try:
        facts = frozenset(of.facts)
        replay._check(of.form, facts, of.steps, Given(of.source, facts))
    except Refused:
        return False
    return True


@pytest.mark.parametrize("name", EVERY)
def test_a_false_equation_is_refused_for_its_condition_only(name: str, monkeypatch: pytest.MonkeyPatch):
    assert not accepted(EVERY[name])
    mutant(EVERY[name], monkeypatch)
    assert accepted(EVERY[name])


def test_every_law_is_among_them():
    names = {step["law"] for of in EVERY.values() for step in of.steps}
    axioms = {step["axiom"] for of in EVERY.values() for step in of.steps if step["law"] == "scalar"}
    assert names == {*laws.MONOMIALS, "quotient", "cancel", "cases", "digits"}
    # The others ask for nothing.
    free = {"sigmoid", "if", "if not", "rsqrt", "exponential of a sum", "reciprocal of a reciprocal"}
    free |= {"maximum of repeated values", "less", "at most", "at least", "unequal", "trichotomy", "and", "or"}
    free |= {"absolute value by sign"}
    assert axioms | free == scalars.SCALARS.keys()


def test_what_may_be_no_number_has_to_be_in_the_source():
    over = total("", (), function("recip", total("", (), Y)))
    with pytest.raises(Refused, match="no number"):
        require_defined((*over, *scaled(over, -1)), (), frozenset(), PARTIAL)
    require_defined(over, over, frozenset(), PARTIAL)
    guarded = total("", (at_least(n, 5),), function("recip", total("", (), Y)))
    with pytest.raises(Refused, match="no number"):
        require_defined(over, guarded, frozenset(), PARTIAL)
    require_defined(guarded, over, frozenset(), PARTIAL)
    require_defined(total("", (), function("recip", of_factor(Number(n)))), (), frozenset({at_least(n, 1)}), PARTIAL)
    nothing = total("", (), maximum("k", BOX, total("", (), X)))
    with pytest.raises(Refused, match="no number"):
        require_defined(nothing, (), frozenset(), EXTREMES)
    require_defined(nothing, (), frozenset({at_least(n, 1)}), EXTREMES)


def test_substitution_leaves_what_is_bound():
    form = total("k", BOX, X, read("v", j))
    assert substitute(form, {"k": i}) == form
    with pytest.raises(Refused, match="captured"):
        substitute(form, {"j": k})
