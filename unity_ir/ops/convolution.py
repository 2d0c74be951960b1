"""Convolution: values are [samples, channels, rows, columns], weights [out channels, in channels, rows, columns]."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor

_ATTRIBUTES = "stride: ints, padding: ints, dilation: ints, groups: int = 1"
_ROW = "stride.0*y + dilation.0*i - padding.0"
_COLUMN = "stride.1*z + dilation.1*j - padding.1"


def _conv2d_gradient(of: Application) -> Sequence[Tensor | None]:
    x, w = of.operands
    same = {name: of.attributes[name] for name in ("stride", "padding", "dilation", "groups")}
    return (
        CONV2D_DATA_GRAD.one(of.grad, w, sizes=x.shape[2:], **same),
        CONV2D_WEIGHT_GRAD.one(of.grad, x, sizes=w.shape[2:], **same),
    )


def _conv2d_data_grad_gradient(of: Application) -> Sequence[Tensor | None]:
    g, w = of.operands
    same = {name: of.attributes[name] for name in ("stride", "padding", "dilation", "groups")}
    return CONV2D.one(of.grad, w, **same), CONV2D_WEIGHT_GRAD.one(g, of.grad, sizes=w.shape[2:], **same)


CONV2D = Operator(
    f"conv2d(x, w; {_ATTRIBUTES})"
    f"  out[n, (q o), y, z] = sum[c, i, j](x[n, (q c), {_ROW}, {_COLUMN}] * w[(q o), c, i, j])  where size(q) = groups",
    gradient=_conv2d_gradient,
)
"""`groups` of channels are convolved apart; as many as there are channels is a depthwise convolution."""

CONV2D_DATA_GRAD = Operator(
    f"conv2d_data_grad(g, w; {_ATTRIBUTES}, sizes: ints)"
    f"  out[n, (q c), {_ROW}, {_COLUMN}] = sum[o](g[n, (q o), y, z] * w[(q o), c, i, j])"
    f"  where size(q) = groups, size({_ROW}) = sizes.0, size({_COLUMN}) = sizes.1",
    gradient=_conv2d_data_grad_gradient,
)
"""
The gradient of the values: every element of `g` goes to all it was made of. `sizes` are their rows and columns. It is
the transposed convolution, too.
"""

CONV2D_WEIGHT_GRAD = Operator(
    f"conv2d_weight_grad(g, x; {_ATTRIBUTES}, sizes: ints)"
    f"  out[(q o), c, i, j] = sum[n, y, z](g[n, (q o), y, z] * x[n, (q c), {_ROW}, {_COLUMN}])"
    "  where size(q) = groups, size(i) = sizes.0, size(j) = sizes.1"
)

OPERATORS = (CONV2D, CONV2D_DATA_GRAD, CONV2D_WEIGHT_GRAD)
