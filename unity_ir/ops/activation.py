"""Activations, element by element."""

from __future__ import annotations

from unity_ir.ops.operator import Operator

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

GELU_TANH = Operator(
    "gelu_tanh(x)"
    "  out[a..] = 0.5 * x[a..] * (1 + tanh(0.7978845608028654 * (x[a..] + 0.044715 * x[a..] * x[a..] * x[a..])))",
    gradient=lambda of: (GELU_TANH_GRAD.one(of.grad, of.operands[0]),),
)
"""GELU by its approximation with tanh, as GPT-2 has it."""

GELU_TANH_GRAD = Operator(
    "gelu_tanh_grad(g, x)"
    "  let t[a..] = tanh(0.7978845608028654 * (x[a..] + 0.044715 * x[a..] * x[a..] * x[a..]));"
    "  out[a..] = g[a..] * (0.5 * (1 + t[a..])"
    " + 0.3989422804014327 * x[a..] * (1 - t[a..] * t[a..]) * (1 + 0.134145 * x[a..] * x[a..]))"
)

SOFTPLUS = Operator(
    "softplus(x)  out[a..] = where(gt(x[a..], 20), x[a..], relu(x[a..]) + log(1 + exp(-abs(x[a..]))))",
    gradient=lambda of: (SOFTPLUS_GRAD.one(of.grad, of.operands[0]),),
)

SOFTPLUS_GRAD = Operator("softplus_grad(g, x)  out[a..] = where(gt(x[a..], 20), g[a..], g[a..] * sigmoid(x[a..]))")

LEAKY_RELU = Operator(
    "leaky_relu(x; slope: float)  out[a..] = where(gt(x[a..], 0), x[a..], slope * x[a..])",
    gradient=lambda of: (LEAKY_RELU_GRAD.one(of.grad, of.operands[0], slope=of.float("slope")),),
)

LEAKY_RELU_GRAD = Operator(
    "leaky_relu_grad(g, x; slope: float)  out[a..] = where(gt(x[a..], 0), g[a..], slope * g[a..])"
)

ELU = Operator(
    "elu(x; alpha: float)  out[a..] = where(gt(x[a..], 0), x[a..], alpha * (exp(minimum(x[a..], 0)) - 1))",
    gradient=lambda of: (ELU_GRAD.one(of.grad, of.operands[0], alpha=of.float("alpha")),),
)

ELU_GRAD = Operator(
    "elu_grad(g, x; alpha: float)  out[a..] = where(gt(x[a..], 0), g[a..], alpha * g[a..] * exp(minimum(x[a..], 0)))"
)

CLAMP = Operator(
    "clamp(x; low: float, high: float)  out[a..] = minimum(maximum(x[a..], low), high)",
    gradient=lambda of: (CLAMP_GRAD.one(of.grad, of.operands[0], low=of.float("low"), high=of.float("high")),),
)

CLAMP_GRAD = Operator(
    "clamp_grad(g, x; low: float, high: float)  out[a..] = where(and(ge(x[a..], low), le(x[a..], high)), g[a..], 0)"
)
"""The bounds themselves let the gradient through, as PyTorch's clamp has it."""

INSIDE_GRAD = Operator(
    "inside_grad(g, x; low: float, high: float, slope: float = 1.0)"
    "  out[a..] = where(and(gt(x[a..], low), lt(x[a..], high)), slope * g[a..], 0)"
)
"""The gradient of what is linear between two bounds and constant beyond; none at the bounds."""

HARDTANH = Operator(
    "hardtanh(x)  out[a..] = minimum(maximum(x[a..], -1), 1)",
    gradient=lambda of: (INSIDE_GRAD.one(of.grad, of.operands[0], low=-1.0, high=1.0),),
)

RELU6 = Operator(
    "relu6(x)  out[a..] = minimum(maximum(x[a..], 0), 6)",
    gradient=lambda of: (INSIDE_GRAD.one(of.grad, of.operands[0], low=0.0, high=6.0),),
)

HARDSIGMOID = Operator(
    "hardsigmoid(x)  out[a..] = minimum(maximum(x[a..] + 3, 0), 6) / 6",
    gradient=lambda of: (INSIDE_GRAD.one(of.grad, of.operands[0], low=-3.0, high=3.0, slope=1 / 6),),
)

HARDSWISH = Operator(
    "hardswish(x)  out[a..] = x[a..] * minimum(maximum(x[a..] + 3, 0), 6) / 6",
    gradient=lambda of: (HARDSWISH_GRAD.one(of.grad, of.operands[0]),),
)

HARDSWISH_GRAD = Operator(
    "hardswish_grad(g, x)"
    "  out[a..] = where(le(x[a..], -3), 0, where(lt(x[a..], 3), g[a..] * (x[a..] / 3 + 0.5), g[a..]))"
)

OPERATORS = (
    *(RELU, RELU_GRAD, GELU, GELU_GRAD, GELU_TANH, GELU_TANH_GRAD, SILU, SILU_GRAD, TANH, TANH_GRAD),
    *(SIGMOID, SIGMOID_GRAD, SOFTPLUS, SOFTPLUS_GRAD, LEAKY_RELU, LEAKY_RELU_GRAD, ELU, ELU_GRAD),
    *(CLAMP, CLAMP_GRAD, INSIDE_GRAD, HARDTANH, RELU6, HARDSIGMOID, HARDSWISH, HARDSWISH_GRAD),
)
