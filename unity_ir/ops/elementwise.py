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


def _sub_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return of.grad, NEG.one(sum_leading(of.grad, len(x.shape) - len(y.shape)))


def _div_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return DIV.one(of.grad, y), sum_leading(DIV_GRAD.one(of.grad, x, y), len(x.shape) - len(y.shape))


SUB = Operator("sub(x, y)  out[a.., b..] = x[a.., b..] - y[b..]", gradient=_sub_gradient)

DIV = Operator("div(x, y)  out[a.., b..] = x[a.., b..] / y[b..]", gradient=_div_gradient)

DIV_GRAD = Operator("div_grad(g, x, y)  out[a.., b..] = -g[a.., b..] * x[a.., b..] / (y[b..] * y[b..])")
"""The gradient of a quotient's divisor, before it is summed over the dims of its broadcast."""

NEG = Operator("neg(x)  out[a..] = -x[a..]", gradient=lambda of: (NEG.one(of.grad),))

SCALE = Operator(
    "scale(x; by: float)  out[a..] = by * x[a..]",
    gradient=lambda of: (SCALE.one(of.grad, by=of.attributes["by"]),),
)

EXP = Operator("exp(x)  out[a..] = exp(x[a..])", gradient=lambda of: (MUL.one(of.grad, of.results[0]),))

LOG = Operator("log(x)  out[a..] = log(x[a..])", gradient=lambda of: (DIV.one(of.grad, of.operands[0]),))

SQRT = Operator("sqrt(x)  out[a..] = sqrt(x[a..])", gradient=lambda of: (SQRT_GRAD.one(of.grad, of.results[0]),))

SQRT_GRAD = Operator("sqrt_grad(g, y)  out[a..] = 0.5 * g[a..] / y[a..]")

RSQRT = Operator("rsqrt(x)  out[a..] = rsqrt(x[a..])", gradient=lambda of: (RSQRT_GRAD.one(of.grad, of.results[0]),))

RSQRT_GRAD = Operator("rsqrt_grad(g, y)  out[a..] = -0.5 * g[a..] * y[a..] * y[a..] * y[a..]")

TANH = Operator("tanh(x)  out[a..] = tanh(x[a..])", gradient=lambda of: (TANH_GRAD.one(of.grad, of.results[0]),))

TANH_GRAD = Operator("tanh_grad(g, y)  out[a..] = g[a..] * (1 - y[a..] * y[a..])")

SIGMOID = Operator(
    "sigmoid(x)  out[a..] = sigmoid(x[a..])",
    gradient=lambda of: (SIGMOID_GRAD.one(of.grad, of.results[0]),),
)

SIGMOID_GRAD = Operator("sigmoid_grad(g, y)  out[a..] = g[a..] * y[a..] * (1 - y[a..])")

SILU = Operator(
    "silu(x)  out[a..] = x[a..] * sigmoid(x[a..])",
    gradient=lambda of: (SILU_GRAD.one(of.grad, of.operands[0]),),
)

SILU_GRAD = Operator(
    "silu_grad(g, x)  out[a..] = g[a..] * sigmoid(x[a..]) * (1 + x[a..] * (1 - sigmoid(x[a..])))",
)

ABS = Operator("abs(x)  out[a..] = abs(x[a..])", gradient=lambda of: (ABS_GRAD.one(of.grad, of.operands[0]),))

ABS_GRAD = Operator("abs_grad(g, x)  out[a..] = where(gt(x[a..], 0), g[a..], where(lt(x[a..], 0), -g[a..], 0))")
"""0 at 0, as PyTorch has it."""

SIN = Operator("sin(x)  out[a..] = sin(x[a..])", gradient=lambda of: (MUL.one(of.grad, COS.one(of.operands[0])),))

COS = Operator(
    "cos(x)  out[a..] = cos(x[a..])", gradient=lambda of: (NEG.one(MUL.one(of.grad, SIN.one(of.operands[0]))),)
)

OPERATORS = (
    *(ADD, SUB, MUL, DIV, DIV_GRAD, NEG, SCALE),
    *(RELU, RELU_GRAD, GELU, GELU_GRAD, SILU, SILU_GRAD, TANH, TANH_GRAD, SIGMOID, SIGMOID_GRAD),
    *(EXP, LOG, SQRT, SQRT_GRAD, RSQRT, RSQRT_GRAD, ABS, ABS_GRAD, SIN, COS),
)
