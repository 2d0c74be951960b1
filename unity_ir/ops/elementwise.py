"""Elementwise operators; the second operand of a binary one may lack leading dims, over which it is broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor
from unity_ir.ops.reduction import sum_leading


def _add_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return of.grad, sum_leading(of.grad, len(x.shape) - len(y.shape))


def _mul_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return MUL.one(of.grad, y), sum_leading(MUL.one(of.grad, x), len(x.shape) - len(y.shape))


ADD = Operator("add(x, y)  out[a.., b..] = x[a.., b..] + y[b..]", gradient=_add_gradient)

MUL = Operator("mul(x, y)  out[a.., b..] = x[a.., b..] * y[b..]", gradient=_mul_gradient)

RELU = Operator(
    "relu(x)  out[a..] = relu(x[a..])",
    gradient=lambda of: (RELU_GRAD.one(of.grad, of.results[0]),),
)

RELU_GRAD = Operator("relu_grad(g, y)  out[a..] = where(gt(y[a..], 0), g[a..], 0)")
"""`y` is the result of the relu, so that nothing but it need be kept."""

GELU = Operator(
    "gelu(x)  out[a..] = gelu(x[a..])",
    gradient=lambda of: (GELU_GRAD.one(of.grad, of.operands[0]),),
)

GELU_GRAD = Operator(
    "gelu_grad(g, x)  out[a..] = g[a..] * (0.5 * (1 + erf(x[a..] * 0.7071067811865476))"
    " + 0.3989422804014327 * x[a..] * exp(-0.5 * x[a..] * x[a..]))"
)
"""d gelu(x)/dx = Phi(x) + x phi(x), with the normal distribution's Phi and phi."""

OPERATORS = (ADD, MUL, RELU, RELU_GRAD, GELU, GELU_GRAD)
