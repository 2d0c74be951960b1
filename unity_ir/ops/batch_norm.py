"""
Batch normalisation in two steps, statistics and their use, so that a mean over a divided batch is whole before it is
used.

With `groups` each group of neighbouring samples has statistics of its own, as replicas of data-parallel training do
without synchronisation; groups can be divided, the samples within one cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _batch_norm_gradient(of: Application) -> Sequence[Tensor | None]:
    return BATCH_NORM_GRAD(of.grad, *of.operands[:4], eps=of.float("eps"))


BATCH_STATS = Operator(
    "batch_stats(x; groups: int = 1)"
    "  mean[g, c] = sum[n, s..](x[(g n), c, s..] / size(n, s..));"
    "  square[g, c] = sum[n, s..](x[(g n), c, s..] * x[(g n), c, s..] / size(n, s..))"
    "  where size(g) = groups",
    gradient=lambda of: (BATCH_STATS_GRAD.one(*of.grads, *of.operands),),
)
"""The mean of each channel of `x` [samples, channels, ...] and the mean of its squares, for each group of samples."""

BATCH_STATS_GRAD = Operator(
    "batch_stats_grad(m, q, x)  out[(g n), c, s..] = (m[g, c] + 2 * x[(g n), c, s..] * q[g, c]) / size(n, s..)"
)

_UNIT = (
    "let r[g, c] = rsqrt(square[g, c] - mean[g, c] * mean[g, c] + eps);"
    "  let unit[g, n, c, s..] = (x[(g n), c, s..] - mean[g, c]) * r[g, c];"
)
"""One over the standard deviation, and the samples normalised."""

BATCH_NORM = Operator(
    f"batch_norm(x, mean, square, w, b; eps: float = 1e-05)  {_UNIT}"
    "  out[(g n), c, s..] = unit[g, n, c, s..] * w[c] + b[c]",
    gradient=_batch_norm_gradient,
)
"""`x` normalised by the statistics of `batch_stats`, times `w`, plus `b`."""

BATCH_NORM_GRAD = Operator(
    f"batch_norm_grad(y, x, mean, square, w; eps: float = 1e-05)  {_UNIT}"
    "  let both[g, c] = sum[n, s..](y[(g n), c, s..] * unit[g, n, c, s..]);"
    "  dx[(g n), c, s..] = y[(g n), c, s..] * r[g, c] * w[c];"
    "  dmean[g, c] = w[c] * r[g, c] * (both[g, c] * mean[g, c] * r[g, c] - sum[n, s..](y[(g n), c, s..]));"
    "  dsquare[g, c] = -0.5 * w[c] * r[g, c] * r[g, c] * both[g, c];"
    "  dw[c] = sum[g, n, s..](y[(g n), c, s..] * unit[g, n, c, s..]);"
    "  db[c] = sum[g, n, s..](y[(g n), c, s..])"
)
"""The gradients of all five operands from that of the result, `y`."""

OPERATORS = (BATCH_STATS, BATCH_STATS_GRAD, BATCH_NORM, BATCH_NORM_GRAD)
