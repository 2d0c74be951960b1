"""Losses, as means over the samples of the whole batch, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _cross_entropy_gradient(of: Application) -> Sequence[Tensor | None]:
    x, t = of.operands
    return CROSS_ENTROPY_GRAD.one(of.grad, x, t), None


def _mse_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return MSE_GRAD.one(of.grad, x, y), MSE_GRAD.one(of.grad, y, x)


CROSS_ENTROPY = Operator(
    "cross_entropy(x, t: int)  out[] = sum[b..]((max[j](x[b.., j]) + log(sum[c](exp(x[b.., c] - max[j](x[b.., j]))))"
    " - sum[c](where(eq(c, t[b..]), x[b.., c], 0))) / size(b..))",
    gradient=_cross_entropy_gradient,
)
"""Softmax cross-entropy of logits `x` [b.., c] against class ids `t` [b..], its mean over b.."""

CROSS_ENTROPY_GRAD = Operator(
    "cross_entropy_grad(g, x, t: int)  out[b.., c] = g[] * (exp(x[b.., c] - max[j](x[b.., j]))"
    " / sum[k](exp(x[b.., k] - max[j](x[b.., j]))) - where(eq(c, t[b..]), 1, 0)) / size(b..)"
)

MSE = Operator(
    "mse(x, y)  out[] = sum[b..]((x[b..] - y[b..]) * (x[b..] - y[b..]) / size(b..))",
    gradient=_mse_gradient,
)
"""Mean squared error over all elements."""

MSE_GRAD = Operator("mse_grad(g, x, y)  out[b..] = g[] * 2 * (x[b..] - y[b..]) / size(b..)")

OPERATORS = (CROSS_ENTROPY, CROSS_ENTROPY_GRAD, MSE, MSE_GRAD)
