"""Arithmetic on two operands, with NumPy's broadcasting: missing leading dims, dims of size 1."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.broadcast import unbroadcast
from unity_ir.ops.operator import Application, Operator, Tensor


def _add_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return unbroadcast(of.grad, x), unbroadcast(of.grad, y)


def _sub_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return unbroadcast(of.grad, x), NEG.one(unbroadcast(of.grad, y))


def _mul_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return unbroadcast(MUL.one(of.grad, y), x), unbroadcast(MUL.one(of.grad, x), y)


def _div_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return unbroadcast(DIV.one(of.grad, y), x), unbroadcast(DIV_GRAD.one(of.grad, x, y), y)


def _maximum_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return (
        unbroadcast(MAXIMUM_GRAD.one(of.grad, x, y), x),
        unbroadcast(MAXIMUM_GRAD.one(of.grad, y, x), y),
    )


def _minimum_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    # The smaller one gets what the larger one would of a maximum.
    return (
        unbroadcast(MAXIMUM_GRAD.one(of.grad, y, x), x),
        unbroadcast(MAXIMUM_GRAD.one(of.grad, x, y), y),
    )


def _pow_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return (
        unbroadcast(POW_GRAD.one(of.grad, x, y), x),
        unbroadcast(POW_EXPONENT_GRAD.one(of.grad, x, y), y),
    )


ADD = Operator("add(x, y)  out[a..] = x[~a..] + y[~a..]", gradient=_add_gradient)

SUB = Operator("sub(x, y)  out[a..] = x[~a..] - y[~a..]", gradient=_sub_gradient)

MUL = Operator("mul(x, y)  out[a..] = x[~a..] * y[~a..]", gradient=_mul_gradient)

DIV = Operator("div(x, y)  out[a..] = x[~a..] / y[~a..]", gradient=_div_gradient)

DIV_GRAD = Operator("div_grad(g, x, y)  out[a..] = -g[a..] * x[~a..] / (y[~a..] * y[~a..])")
"""The gradient of a quotient's divisor, before it is summed over the dims of its broadcast."""

NEG = Operator("neg(x)  out[a..] = -x[a..]", gradient=lambda of: (NEG.one(of.grad),))

MAXIMUM = Operator("maximum(x, y)  out[a..] = maximum(x[~a..], y[~a..])", gradient=_maximum_gradient)

MINIMUM = Operator("minimum(x, y)  out[a..] = minimum(x[~a..], y[~a..])", gradient=_minimum_gradient)

MAXIMUM_GRAD = Operator(
    "maximum_grad(g, x, y)"
    "  out[a..] = where(gt(x[~a..], y[~a..]), g[a..], where(eq(x[~a..], y[~a..]), 0.5 * g[a..], 0))"
)
"""The gradient of `x` in the maximum of `x` and `y`: all of it where `x` is larger, half where they are equal."""

POW = Operator("pow(x, y)  out[a..] = pow(x[~a..], y[~a..])", gradient=_pow_gradient)

POW_GRAD = Operator(
    "pow_grad(g, x, y)  out[a..] = where(eq(y[~a..], 0), 0, g[a..] * y[~a..] * pow(x[~a..], y[~a..] - 1))"
)
"""The gradient of the base, before it is summed over the dims of its broadcast."""

POW_EXPONENT_GRAD = Operator(
    "pow_exponent_grad(g, x, y)"
    "  out[a..] = where(eq(x[~a..], 0), 0, g[a..] * pow(x[~a..], y[~a..]) * log(where(eq(x[~a..], 0), 1, x[~a..])))"
)
"""The gradient of the exponent; 0 at a base of 0, as PyTorch has it for exponents that are not negative."""

OPERATORS = (
    *(ADD, SUB, MUL, DIV, DIV_GRAD, NEG),
    *(MAXIMUM, MINIMUM, MAXIMUM_GRAD, POW, POW_GRAD, POW_EXPONENT_GRAD),
)
