"""Losses, as means over the samples of the whole batch, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Saving, Tensor


def _cross_entropy_gradient(of: Application) -> Sequence[Tensor | None]:
    x, t = of.operands
    return CROSS_ENTROPY_GRAD.one(of.grad, x, t), None


def _mse_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return MSE_GRAD.one(of.grad, x, y), MSE_GRAD.one(of.grad, y, x)


_LOGSUM = "max[j](x[b.., j]) + log(sum[c](exp(x[b.., c] - max[j](x[b.., j]))))"
_LOSS = f"out[] = sum[b..](({_LOGSUM} - sum[c](where(eq(c, t[b..]), x[b.., c], 0))) / size(b..))"

CROSS_ENTROPY = Operator(f"cross_entropy(x, t: int)  {_LOSS}", gradient=_cross_entropy_gradient)
"""Softmax cross-entropy of logits `x` [b.., c] against class ids `t` [b..], its mean over b.."""

CROSS_ENTROPY_GRAD = Operator(
    "cross_entropy_grad(g, x, t: int)  out[b.., c] = g[] * (exp(x[b.., c] - max[j](x[b.., j]))"
    " / sum[k](exp(x[b.., k] - max[j](x[b.., j]))) - where(eq(c, t[b..]), 1, 0)) / size(b..)"
)

CROSS_ENTROPY_SAVING = Operator(
    f"cross_entropy_saving(x, t: int; sums: dtype = f32)  {_LOSS};  logsum: sums [b..] = {_LOGSUM}"
)
"""`cross_entropy`, and the logarithm of what every sample's exponentials sum to, which a backward can read."""

CROSS_ENTROPY_SAVED_GRAD = Operator(
    "cross_entropy_saved_grad(g, x, t: int, logsum)  out[b.., c] = g[] * (exp(x[b.., c] - logsum[b..])"
    " - where(eq(c, t[b..]), 1, 0)) / size(b..)"
)
"""`cross_entropy_grad` from the logarithms that the forward has saved."""

SAVINGS = (
    Saving(
        *(CROSS_ENTROPY.name, CROSS_ENTROPY_GRAD.name, CROSS_ENTROPY_SAVING.name, CROSS_ENTROPY_SAVED_GRAD.name),
        reads_result=False,
    ),
)

MSE = Operator(
    "mse(x, y)  out[] = sum[b..]((x[b..] - y[b..]) * (x[b..] - y[b..]) / size(b..))",
    gradient=_mse_gradient,
)
"""Mean squared error over all elements."""

MSE_GRAD = Operator("mse_grad(g, x, y)  out[b..] = g[] * 2 * (x[b..] - y[b..]) / size(b..)")


def _bce_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return BCE_GRAD.one(of.grad, x, y), BCE_TARGET_GRAD.one(of.grad, x)


def _bce_with_logits_gradient(of: Application) -> Sequence[Tensor | None]:
    x, y = of.operands
    return BCE_WITH_LOGITS_GRAD.one(of.grad, x, y), BCE_WITH_LOGITS_TARGET_GRAD.one(of.grad, x)


BCE = Operator(
    "bce(x, y)  let yes[b..] = maximum(log(x[b..]), -100);  let no[b..] = maximum(log(1 - x[b..]), -100);"
    "  out[] = sum[b..](-(y[b..] * yes[b..] + (1 - y[b..]) * no[b..]) / size(b..))",
    gradient=_bce_gradient,
)
"""Binary cross-entropy of probabilities `x` against `y`, its mean; logarithms end at -100, as PyTorch has it."""

BCE_GRAD = Operator(
    "bce_grad(g, x, y)  out[b..] = g[] * (x[b..] - y[b..]) / maximum(x[b..] * (1 - x[b..]), 1e-12) / size(b..)"
)

BCE_TARGET_GRAD = Operator(
    "bce_target_grad(g, x)  out[b..] = g[] * (maximum(log(1 - x[b..]), -100) - maximum(log(x[b..]), -100)) / size(b..)"
)

BCE_WITH_LOGITS = Operator(
    "bce_with_logits(x, y)"
    "  out[] = sum[b..]((relu(x[b..]) - x[b..] * y[b..] + log(1 + exp(-abs(x[b..])))) / size(b..))",
    gradient=_bce_with_logits_gradient,
)
"""Binary cross-entropy of the sigmoid of `x` against `y`, its mean."""

BCE_WITH_LOGITS_GRAD = Operator(
    "bce_with_logits_grad(g, x, y)  out[b..] = g[] * (sigmoid(x[b..]) - y[b..]) / size(b..)"
)

BCE_WITH_LOGITS_TARGET_GRAD = Operator("bce_with_logits_target_grad(g, x)  out[b..] = -g[] * x[b..] / size(b..)")

OPERATORS = (
    *(CROSS_ENTROPY, CROSS_ENTROPY_GRAD, CROSS_ENTROPY_SAVING, CROSS_ENTROPY_SAVED_GRAD),
    *(MSE, MSE_GRAD, BCE, BCE_GRAD, BCE_TARGET_GRAD),
    *(BCE_WITH_LOGITS, BCE_WITH_LOGITS_GRAD, BCE_WITH_LOGITS_TARGET_GRAD),
)
