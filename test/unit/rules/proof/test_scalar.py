"""Laws of scalar functions: true rules that need one are proved, their false neighbours are not."""

from __future__ import annotations

import ast
from itertools import count

import pytest

from unity_ir.rules.parse import parse_rules
from unity_ir.rules.pattern import Substitution
from unity_ir.rules.proof.prove import prove

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
