"""Softmax, and normalisation over the last dim."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor
from unity_ir.ops.reduction import sum_leading

SOFTMAX = Operator(
    "softmax(x)  let e[a.., i] = exp(x[a.., i] - max[j](x[a.., j]));  out[a.., i] = e[a.., i] / sum[k](e[a.., k])",
    gradient=lambda of: (SOFTMAX_GRAD.one(of.grad, of.results[0]),),
)

SOFTMAX_GRAD = Operator("softmax_grad(g, y)  out[a.., i] = y[a.., i] * (g[a.., i] - sum[k](g[a.., k] * y[a.., k]))")

LOG_SOFTMAX = Operator(
    "log_softmax(x)  let m[a..] = max[j](x[a.., j]);"
    "  out[a.., i] = x[a.., i] - m[a..] - log(sum[k](exp(x[a.., k] - m[a..])))",
    gradient=lambda of: (LOG_SOFTMAX_GRAD.one(of.grad, of.results[0]),),
)

LOG_SOFTMAX_GRAD = Operator("log_softmax_grad(g, y)  out[a.., i] = g[a.., i] - exp(y[a.., i]) * sum[k](g[a.., k])")

_MOMENTS = (
    "let mean[a..] = sum[k](x[a.., k] / size(k));"
    "  let r[a..] = rsqrt(sum[j]((x[a.., j] - mean[a..]) * (x[a.., j] - mean[a..]) / size(j)) + eps);"
    "  let unit[a.., i] = (x[a.., i] - mean[a..]) * r[a..];"
)
"""The mean of a row, one over its standard deviation, and the row normalised."""

_ROOT = "let r[a..] = rsqrt(sum[j](x[a.., j] * x[a.., j] / size(j)) + eps);  let unit[a.., i] = x[a.., i] * r[a..];"
"""One over the root mean square of a row, and the row divided by it."""


def _layer_norm_gradient(of: Application) -> Sequence[Tensor | None]:
    x, w, _ = of.operands
    leading = len(x.shape) - 1
    eps = of.attributes["eps"]
    weight = sum_leading(LAYER_NORM_WEIGHT_GRAD.one(of.grad, x, eps=eps), leading)
    return LAYER_NORM_GRAD.one(of.grad, x, w, eps=eps), weight, sum_leading(of.grad, leading)


LAYER_NORM = Operator(
    f"layer_norm(x, w, b; eps: float = 1e-05)  {_MOMENTS}  out[a.., i] = unit[a.., i] * w[i] + b[i]",
    gradient=_layer_norm_gradient,
)

LAYER_NORM_GRAD = Operator(
    f"layer_norm_grad(g, x, w; eps: float = 1e-05)  {_MOMENTS}"
    "  out[a.., i] = r[a..] * (g[a.., i] * w[i] - sum[l](g[a.., l] * w[l] / size(l))"
    " - unit[a.., i] * sum[m](g[a.., m] * w[m] * unit[a.., m] / size(m)))"
)

LAYER_NORM_WEIGHT_GRAD = Operator(
    f"layer_norm_weight_grad(g, x; eps: float = 1e-05)  {_MOMENTS}  out[a.., i] = g[a.., i] * unit[a.., i]"
)
"""The gradient of the weight, before it is summed over the rows."""


def _rms_norm_gradient(of: Application) -> Sequence[Tensor | None]:
    x, w = of.operands
    eps = of.attributes["eps"]
    weight = sum_leading(RMS_NORM_WEIGHT_GRAD.one(of.grad, x, eps=eps), len(x.shape) - 1)
    return RMS_NORM_GRAD.one(of.grad, x, w, eps=eps), weight


RMS_NORM = Operator(
    f"rms_norm(x, w; eps: float = 1e-05)  {_ROOT}  out[a.., i] = unit[a.., i] * w[i]",
    gradient=_rms_norm_gradient,
)

RMS_NORM_GRAD = Operator(
    f"rms_norm_grad(g, x, w; eps: float = 1e-05)  {_ROOT}"
    "  out[a.., i] = r[a..] * (g[a.., i] * w[i] - unit[a.., i] * sum[m](g[a.., m] * w[m] * unit[a.., m] / size(m)))"
)

RMS_NORM_WEIGHT_GRAD = Operator(
    f"rms_norm_weight_grad(g, x; eps: float = 1e-05)  {_ROOT}  out[a.., i] = g[a.., i] * unit[a.., i]"
)
"""The gradient of the weight, before it is summed over the rows."""

OPERATORS = (
    *(SOFTMAX, SOFTMAX_GRAD, LOG_SOFTMAX, LOG_SOFTMAX_GRAD),
    *(LAYER_NORM, LAYER_NORM_GRAD, LAYER_NORM_WEIGHT_GRAD, RMS_NORM, RMS_NORM_GRAD, RMS_NORM_WEIGHT_GRAD),
)
