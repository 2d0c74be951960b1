"""
Batch normalisation in steps, statistics and their use, so that a mean over a sharded batch is complete before its use.

Sums are of distances to a center near the mean, since those to 0 cancel (the corrected two-pass algorithm, Chan, Golub
& LeVeque, 1983): shift and square are sums over the batch, computed in parts on each device and independently of each
other. Any center gives the same mean, `center + shift`, and variance, `square - shift^2`, so the center carries no
gradient. The mean is never rounded to one number: samples are normalised as `(x - center) - shift`.

With `groups`, each group of consecutive samples has its own statistics, as replicas of data-parallel training have
without synchronisation; the groups dim can be sharded, the samples within a group cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _batch_norm_gradient(of: Application) -> Sequence[Tensor | None]:
    x, shift, square, center, w, _ = of.operands
    dx, dshift, dsquare, dw, db = BATCH_NORM_GRAD(of.grad, x, shift, square, center, w, eps=of.float("eps"))
    return dx, dshift, dsquare, None, dw, db


BATCH_MEAN = Operator(
    "batch_mean(x; groups: int = 1)  mean[g, c] = sum[n, s..](x[(g n), c, s..] / size(n, s..))  where size(g) = groups",
    gradient=lambda of: (None,),
)
"""The mean of each channel of `x` [samples, channels, ...] for each group of samples, as a center: without gradient."""

BATCH_STATS = Operator(
    "batch_stats(x, center)"
    "  let off[g, n, c, s..] = x[(g n), c, s..] - center[g, c];"
    "  shift[g, c] = sum[n, s..](off[g, n, c, s..] / size(n, s..));"
    "  square[g, c] = sum[n, s..](off[g, n, c, s..] * off[g, n, c, s..] / size(n, s..))",
    gradient=lambda of: (BATCH_STATS_GRAD.one(*of.grads, *of.operands), None),
)
"""The mean distance of each channel of `x` to `center`, and the mean squared one, for each group of samples."""

BATCH_STATS_GRAD = Operator(
    "batch_stats_grad(m, q, x, center)"
    "  out[(g n), c, s..] = (m[g, c] + 2 * (x[(g n), c, s..] - center[g, c]) * q[g, c]) / size(n, s..)"
)

_UNIT = (
    "let r[g, c] = rsqrt(square[g, c] - shift[g, c] * shift[g, c] + eps);"
    "  let unit[g, n, c, s..] = (x[(g n), c, s..] - center[g, c] - shift[g, c]) * r[g, c];"
)
"""One over the standard deviation, and the samples normalised."""

BATCH_NORM = Operator(
    f"batch_norm(x, shift, square, center, w, b; eps: float = 1e-05)  {_UNIT}"
    "  out[(g n), c, s..] = unit[g, n, c, s..] * w[c] + b[c]",
    gradient=_batch_norm_gradient,
)
"""
`x` normalised by the statistics of `batch_stats`, times `w`, plus `b`; where `shift` is 0, `center` is the mean
and `square` the variance.
"""

BATCH_NORM_GRAD = Operator(
    f"batch_norm_grad(y, x, shift, square, center, w; eps: float = 1e-05)  {_UNIT}"
    "  let both[g, c] = sum[n, s..](y[(g n), c, s..] * unit[g, n, c, s..]);"
    "  dx[(g n), c, s..] = y[(g n), c, s..] * r[g, c] * w[c];"
    "  dshift[g, c] = w[c] * r[g, c] * (both[g, c] * shift[g, c] * r[g, c] - sum[n, s..](y[(g n), c, s..]));"
    "  dsquare[g, c] = -0.5 * w[c] * r[g, c] * r[g, c] * both[g, c];"
    "  dw[c] = sum[g, n, s..](y[(g n), c, s..] * unit[g, n, c, s..]);"
    "  db[c] = sum[g, n, s..](y[(g n), c, s..])"
)
"""The gradients of all operands but the center from that of the result, `y`."""

BATCH_NORM_WEIGHT_GRAD = Operator(
    f"batch_norm_weight_grad(y, x, shift, square, center; eps: float = 1e-05)  {_UNIT}"
    "  dw[c] = sum[g, n, s..](y[(g n), c, s..] * unit[g, n, c, s..]);"
    "  db[c] = sum[g, n, s..](y[(g n), c, s..])"
)
"""The gradients of the weight and the bias of a batch norm, from that of its result, `y`."""

BATCH_NORM_DATA_GRAD = Operator(
    f"batch_norm_data_grad(y, x, shift, square, center, w, dw, db; eps: float = 1e-05)  {_UNIT}"
    "  out[(g n), c, s..] = r[g, c] * w[c] * (y[(g n), c, s..] - (db[c] + unit[g, n, c, s..] * dw[c]) / size(n, s..))"
)
"""
Given the gradients of weight and bias, and samples of one group, their whole gradient, through the statistics, too: the
sum of `dx` of `batch_norm_grad` and of `batch_stats_grad` (`plan.batch_norms`).
"""

RUNNING_STATS = Operator(
    "running_stats(mean, var, shift, square, center; count: int, momentum: float = 0.1)"
    "  let of_batch[c] = sum[g]((center[g, c] + shift[g, c]) / size(g));"
    "  let square_of_batch[c] = sum[g]((square[g, c] - shift[g, c] * shift[g, c]) / size(g));"
    "  new_mean[c] = (1 - momentum) * mean[c] + momentum * of_batch[c];"
    "  new_var[c] = (1 - momentum) * var[c] + momentum * square_of_batch[c] * count / (count - 1)"
)
"""
The running `mean` and `var` of a batch norm after a step: exponential averages, with the weight `momentum`, of the
statistics of its batches; of the variance without bias, given the `count` of values of a channel in a group (more than
1), as PyTorch keeps it. Of several groups it is the mean of theirs.

As an output of a graph a result replaces the input that its own operand is; see `plan.program.Program.replaced`.
"""

_RUNNING_UNIT = "let r[c] = rsqrt(var[c] + eps);  let unit[n, c, s..] = (x[n, c, s..] - mean[c]) * r[c];"

RUNNING_BATCH_NORM = Operator(
    f"running_batch_norm(x, mean, var, w, b; eps: float = 1e-05)  {_RUNNING_UNIT}"
    "  out[n, c, s..] = unit[n, c, s..] * w[c] + b[c]",
    gradient=lambda of: RUNNING_BATCH_NORM_GRAD(of.grad, *of.operands[:-1], eps=of.float("eps")),
)
"""
`x` normalised by running statistics: a batch norm in evaluation (`plan.forward`), or one that is frozen in training.
"""

RUNNING_BATCH_NORM_GRAD = Operator(
    f"running_batch_norm_grad(y, x, mean, var, w; eps: float = 1e-05)  {_RUNNING_UNIT}"
    "  let both[c] = sum[n, s..](y[n, c, s..] * unit[n, c, s..]);"
    "  dx[n, c, s..] = y[n, c, s..] * r[c] * w[c];"
    "  dmean[c] = -1 * w[c] * r[c] * sum[n, s..](y[n, c, s..]);"
    "  dvar[c] = -0.5 * w[c] * r[c] * r[c] * both[c];"
    "  dw[c] = sum[n, s..](y[n, c, s..] * unit[n, c, s..]);"
    "  db[c] = sum[n, s..](y[n, c, s..])"
)
"""The gradients of all operands from that of the result, `y`."""

OPERATORS = (
    *(BATCH_MEAN, BATCH_STATS, BATCH_STATS_GRAD, BATCH_NORM, BATCH_NORM_GRAD),
    *(BATCH_NORM_WEIGHT_GRAD, BATCH_NORM_DATA_GRAD),
    *(RUNNING_STATS, RUNNING_BATCH_NORM, RUNNING_BATCH_NORM_GRAD),
)
