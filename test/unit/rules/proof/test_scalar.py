"""Laws of scalar functions: true rules that need one are proved, their false neighbours are not."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import count
from random import Random

import numpy as np
import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.equal import equal
from unity_ir.rules.proof.forms import UNIT, Form, Mono, Read, apply, constant, scaled, times
from unity_ir.rules.proof.normal import normal
from unity_ir.rules.proof.prove import prove
from unity_ir.rules.proof.scalar import defined, in_exact
from unity_ir.rules.proof.solver import Facts
from unity_ir.tdl.functions import FUNCTIONS

ATTRIBUTES = {"scale": "by", "shift": "by", "pow_scalar": "exponent"}


def side(text: str) -> str:
    """The body of a rule's side, of an expression such as `abs(scale(x, -1))`; numbers are attributes."""
    lines: list[str] = []
    numbers = count()

    def value(node: ast.expr) -> str:
        match node:
            case ast.Name(name):
                return f"%{name}"
            case ast.Call(ast.Name(op), arguments):
                operands = [value(a) for a in arguments if not isinstance(a, ast.Constant | ast.UnaryOp)]
                given = [ast.unparse(a) for a in arguments if isinstance(a, ast.Constant | ast.UnaryOp)]
                attributes = f" {{{ATTRIBUTES[op]} = {given[0]}}}" if given else ""
                name = f"%v{next(numbers)}"
                lines.append(f"{name} = {op} {', '.join(operands)}{attributes}")
                return name
            case _:
                raise AssertionError(text)

    result = value(ast.parse(text, mode="eval").body)
    return " ".join([*lines, f"yield {result}"])


def rule(text: str, exact: bool = False) -> Substitution:
    source, target = text.split(" -> ")
    inputs = ", ".join(f"%{name}: [a..]" for name in "xy" if name in source.replace("max", "").replace("exp", ""))
    flags = " attributes {exact}" if exact else ""
    (found,) = parse_rules(f'subst.rule "rule" ({inputs}){flags} {{ {side(source)} }} to {{ {side(target)} }}', "here")
    return found


TRUE = [
    "abs(abs(x)) -> abs(x)",
    "abs(relu(x)) -> relu(x)",
    "abs(neg(x)) -> abs(x)",
    "abs(sub(x, y)) -> abs(sub(y, x))",
    "abs(mul(x, y)) -> mul(abs(x), abs(y))",
    "abs(scale(x, -3.0)) -> scale(abs(x), 3.0)",
    "abs(exp(x)) -> exp(x)",
    "abs(square(x)) -> square(x)",
    "sqrt(square(x)) -> abs(x)",
    "relu(abs(x)) -> abs(x)",
    "relu(exp(x)) -> exp(x)",
    "relu(neg(exp(x))) -> scale(exp(x), 0.0)",
    "relu(scale(x, 3.0)) -> scale(relu(x), 3.0)",
    "relu(mul(x, exp(y))) -> mul(relu(x), exp(y))",
    "relu(add(square(x), abs(y))) -> add(square(x), abs(y))",
    "log(exp(x)) -> shift(x, 0.0)",
    "log(mul(exp(x), exp(y))) -> add(x, y)",
    "log(div(exp(x), exp(y))) -> sub(x, y)",
    "reciprocal(reciprocal(x)) -> shift(x, 0.0)",
    "pow_scalar(x, 2.0) -> square(x)",
    "pow_scalar(x, 3.0) -> mul(x, square(x))",
    "pow_scalar(x, 1.0) -> shift(x, 0.0)",
    "pow_scalar(x, -1.0) -> reciprocal(x)",
    "pow_scalar(x, 0.5) -> sqrt(x)",
    "pow_scalar(x, -0.5) -> rsqrt(x)",
    "rsqrt(x) -> reciprocal(sqrt(x))",
    "tanh(neg(x)) -> neg(tanh(x))",
    "sin(sub(x, y)) -> neg(sin(sub(y, x)))",
    "cos(neg(x)) -> cos(x)",
    "erf(neg(x)) -> neg(erf(x))",
    "sigmoid(x) -> scale(shift(tanh(scale(x, 0.5)), 1.0), 0.5)",
    "sigmoid(neg(x)) -> shift(neg(sigmoid(x)), 1.0)",
    "maximum(x, x) -> shift(x, 0.0)",
    "maximum(x, scale(x, 0.0)) -> relu(x)",
    "minimum(x, scale(x, 0.0)) -> neg(relu(neg(x)))",
    "maximum(x, neg(x)) -> abs(x)",
    "maximum(x, y) -> maximum(y, x)",
    "silu(x) -> mul(x, sigmoid(x))",
]

FALSE = [
    "abs(x) -> shift(x, 0.0)",
    "abs(add(x, y)) -> add(abs(x), abs(y))",
    "abs(shift(x, 1.0)) -> shift(abs(x), 1.0)",
    "abs(log(x)) -> log(x)",
    "sqrt(square(x)) -> shift(x, 0.0)",
    "square(sqrt(x)) -> shift(x, 0.0)",
    "relu(scale(x, -3.0)) -> scale(relu(x), -3.0)",
    "relu(mul(x, y)) -> mul(relu(x), y)",
    "relu(mul(x, y)) -> mul(relu(x), relu(y))",
    "relu(add(x, abs(y))) -> add(relu(x), abs(y))",
    "relu(sub(square(x), abs(y))) -> sub(square(x), abs(y))",
    "relu(tanh(x)) -> tanh(x)",
    "exp(log(x)) -> shift(x, 0.0)",
    "log(mul(x, y)) -> add(log(x), log(y))",
    "log(add(exp(x), exp(y))) -> add(x, y)",
    "log(scale(exp(x), 2.0)) -> shift(x, 0.0)",
    "log(reciprocal(x)) -> log(x)",
    "pow_scalar(x, 0.5) -> rsqrt(x)",
    "pow_scalar(x, 2.0) -> mul(x, square(x))",
    "pow_scalar(x, -2.0) -> square(reciprocal(square(x)))",
    "tanh(neg(x)) -> tanh(x)",
    "cos(neg(x)) -> neg(cos(x))",
    "sin(sub(x, y)) -> sin(sub(y, x))",
    "sigmoid(neg(x)) -> neg(sigmoid(x))",
    "sigmoid(x) -> tanh(x)",
    "maximum(x, scale(x, 0.0)) -> abs(x)",
    "minimum(x, neg(x)) -> abs(x)",
    "minimum(x, scale(x, 0.0)) -> relu(neg(x))",
    "maximum(x, y) -> minimum(x, y)",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", TRUE)
def test_values_are_proved_equal(text: str):
    found = prove(rule(text))
    assert found.forward, found.detail


@pytest.mark.parametrize("text", FALSE)
def test_false_neighbours_are_refuted(text: str):
    found = prove(rule(text))
    assert found.verdict == "refuted", found.detail


ROUNDING = [
    "log(exp(x)) -> shift(x, 0.0)",
    "sqrt(square(x)) -> abs(x)",
    "sigmoid(x) -> scale(shift(tanh(scale(x, 0.5)), 1.0), 0.5)",
    "pow_scalar(x, 3.0) -> mul(x, square(x))",
    "reciprocal(reciprocal(x)) -> shift(x, 0.0)",
    "tanh(neg(x)) -> neg(tanh(x))",
]


@pytest.mark.parametrize("text", ROUNDING)
def test_laws_of_real_numbers_are_not_exact(text: str):
    found = prove(rule(text, exact=True))
    assert not found.forward, found.detail


EXACT = ["abs(neg(x)) -> abs(x)", "relu(abs(x)) -> abs(x)", "abs(exp(x)) -> exp(x)"]


@pytest.mark.parametrize("text", EXACT)
def test_laws_of_signs_are_exact(text: str):
    found = prove(rule(text, exact=True))
    assert found.forward, found.detail


# --- the normal forms of many expressions: those that have one form have the same values ------------------------------

POINTS = [(x, y) for x in (-2.5, -1.0, -0.3, 0.0, 0.4, 1.0, 3.0) for y in (-1.7, 0.0, 0.6, 2.0)]
UNARY = ("abs", "relu", "exp", "log", "sqrt", "recip", "tanh", "sin", "cos", "erf", "sigmoid", "rsqrt")
BINARY = ("maximum", "minimum", "gt", "ge", "eq", "ne")
COMPARISONS = ("gt", "ge", "eq", "ne")
POWERS = (2.0, 3.0, 0.5, -1.0)
NUMBERS = (-1, -3, Fraction(1, 2))

Sample = tuple[str, Form, "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def leaves() -> list[Sample]:
    return [
        (name, (Mono(UNIT, (), frozenset(), (Read(name, ()),)),), np.array([p[i] for p in POINTS]))
        for i, name in enumerate("xy")
    ]


def value(function: str, *arguments: np.ndarray) -> np.ndarray:
    return 1 / arguments[0] if function == "recip" else FUNCTIONS[function].evaluate(*arguments).astype(np.float64)


def of_one(a: Sample, call: Callable[[str, tuple[Form, ...]], Form], exact: bool) -> Iterator[Sample]:
    text, form, at = a
    for function in UNARY:
        if not (exact and function == "recip"):
            yield f"{function}({text})", call(function, (form,)), value(function, at)
    for number in NUMBERS[: 1 if exact else None]:
        yield f"{number} * {text}", scaled(form, number), float(number) * at
    for power in POWERS:
        made = call("pow", (form, constant(Fraction(power))))
        yield f"{text} ** {power}", made, value("pow", at, np.full_like(at, power))


def of_two(a: Sample, b: Sample, call: Callable[[str, tuple[Form, ...]], Form], exact: bool) -> Iterator[Sample]:
    for function in BINARY:
        yield f"{function}({a[0]}, {b[0]})", call(function, (a[1], b[1])), value(function, a[2], b[2])
    if not exact:
        yield f"({a[0]} + {b[0]})", (*a[1], *b[1]), a[2] + b[2]
        yield f"{a[0]} * {b[0]}", times(a[1], b[1]), a[2] * b[2]


def logic(function: str, a: Sample, b: Sample, call: Callable[[str, tuple[Form, ...]], Form]) -> Sample:
    of = (a,) if function == "not" else (a, b)
    made = call(function, tuple(form for _, form, _ in of))
    return f"{function}({', '.join(text for text, _, _ in of)})", made, value(function, *(at > 0 for _, _, at in of))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("exact", [False, True], ids=["real", "exact"])
def test_expressions_of_one_form_have_the_same_values(exact: bool):
    """Compared where both are finite: to 1e-9, or, without the laws that round, to the last bit."""

    def call(function: str, arguments: tuple[Form, ...]) -> Form:
        return apply(in_exact(function), arguments) if exact else defined(function, arguments)

    random, facts = Random(0), Facts(())
    first = leaves()
    second = [e for a in first for e in of_one(a, call, exact)] + [
        e for a in first for b in first for e in of_two(a, b, call, exact)
    ]
    third = [e for a in second for e in of_one(a, call, exact)]
    conditions = [e for e in second if e[0].partition("(")[0] in COMPARISONS]
    third += [logic(f, a, random.choice(conditions), call) for a in conditions for f in ("and", "or", "not")]
    third += [
        e for a in second for b in [random.choice(first), random.choice(second)] for e in of_two(a, b, call, exact)
    ]
    fourth = [e for a in random.sample(third, 200) for e in of_one(a, call, exact)]
    fourth += [e for a in random.sample(third, 200) for e in of_two(a, random.choice(second), call, exact)]
    found: dict[tuple[str, ...], tuple[str, np.ndarray]] = {}
    alike = 0
    for text, form, values in (*first, *second, *third, *fourth):
        other, before = found.setdefault(tuple(sorted(m.text for m in normal(form, facts))), (text, values))
        alike += other != text
        finite = np.isfinite(values) & np.isfinite(before)
        off = np.abs(values - before)[finite]
        limit = 0 if exact else 1e-9 * (1 + np.abs(values[finite]))
        assert (off <= limit).all(), f"{text} and {other} have one form"
    assert alike > 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_expressions_of_different_values_are_not_equal():
    """With denominators cleared and values compared case by case, too; what the left one divides by is not 0."""
    random, facts = Random(1), Facts(())
    first = leaves()
    second = [e for a in first for e in of_one(a, defined, False)]
    second += [e for a in first for b in first for e in of_two(a, b, defined, False)]
    third = [e for a in second for e in of_two(a, random.choice([*first, *second]), defined, False)]
    fourth = [e for a in random.sample(third, 60) for e in of_two(a, random.choice(third), defined, False)]
    proved = 0
    for a, b in zip(random.choices([*third, *fourth], k=250), random.choices([*second, *third], k=250), strict=True):
        name = f"{a[0]} and {b[0]}"
        claims = [(a[1:], b[1:]), ((times(a[1], a[1]), a[2] * a[2]), (times(a[1], b[1]), a[2] * b[2]))]
        for (left, at), (right, other) in claims:
            if equal(left, right, facts, where_left=True).proved:
                proved += 1
                finite = np.isfinite(at) & np.isfinite(other)
                assert (np.abs(at - other)[finite] <= 1e-9 * (1 + np.abs(at[finite]))).all(), name
    assert proved > 4
