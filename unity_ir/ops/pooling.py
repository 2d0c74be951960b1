"""Pooling of rows and columns, the last two dims."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _max_window(row: str, column: str) -> str:
    return f"stride.0*y + dilation.0*{row} - padding.0, stride.1*z + dilation.1*{column} - padding.1"


def _kernel(*pairs: tuple[str, str]) -> str:
    return ", ".join(f"size({row}) = kernel.0, size({column}) = kernel.1" for row, column in pairs)


def _max_pool2d_gradient(of: Application) -> Sequence[Tensor | None]:
    (x,) = of.operands
    return (MAX_POOL2D_GRAD.one(of.grad, x, sizes=x.shape[-2:], **of.attributes),)


MAX_POOL2D = Operator(
    "max_pool2d(x; kernel: ints, stride: ints, padding: ints, dilation: ints)"
    f"  out[n.., y, z] = max[i, j](x[n.., {_max_window('i', 'j')}])  where {_kernel(('i', 'j'))}",
    gradient=_max_pool2d_gradient,
)
"""Padding is passed over."""

MAX_POOL2D_GRAD = Operator(
    "max_pool2d_grad(g, x; kernel: ints, stride: ints, padding: ints, dilation: ints, sizes: ints)"
    f"  let top[n.., y, z] = max[a, b](x[n.., {_max_window('a', 'b')}]);"
    f"  let first[n.., y, z] = min[c, d](where(eq(x[n.., {_max_window('c', 'd')}], top[n.., y, z]),"
    " c * size(d) + d, size(c, d)));"
    f"  out[n.., {_max_window('i', 'j')}] = where(eq(i * size(j) + j, first[n.., y, z]), g[n.., y, z], 0)"
    f"  where {_kernel(('i', 'j'), ('a', 'b'), ('c', 'd'))},"
    " size(stride.0*y + dilation.0*i - padding.0) = sizes.0, size(stride.1*z + dilation.1*j - padding.1) = sizes.1"
)
"""Gradient of max_pool2d: of several maxima in a window the first one gets it, as in PyTorch."""

_ROW, _COLUMN = "stride.0*y + i - padding.0", "stride.1*z + j - padding.1"


def _avg_pool2d_gradient(of: Application) -> Sequence[Tensor | None]:
    (x,) = of.operands
    # A dim is divided by its windows; where there is only one, by its elements.
    degrees = tuple(d if size == 1 else 1 for d, size in zip(x.degrees[-2:], of.grad.shape[-2:], strict=True))
    return (AVG_POOL2D_GRAD.one(of.grad, sizes=x.shape[-2:], degrees=degrees, **of.attributes),)


AVG_POOL2D = Operator(
    "avg_pool2d(x; kernel: ints, stride: ints, padding: ints)"
    f"  out[n.., y, z] = sum[i, j](x[n.., {_ROW}, {_COLUMN}] / size(i, j))  where {_kernel(('i', 'j'))}",
    gradient=_avg_pool2d_gradient,
)
"""Padding counts as zeros."""

AVG_POOL2D_GRAD = Operator(
    "avg_pool2d_grad(g; kernel: ints, stride: ints, padding: ints, sizes: ints, degrees: ints)"
    f"  out[n.., {_ROW}, {_COLUMN}] = g[n.., y, z] / size(i, j)"
    f"  where {_kernel(('i', 'j'))}, size({_ROW}) = sizes.0, size({_COLUMN}) = sizes.1,"
    " degree(i) = degrees.0, degree(j) = degrees.1"
)

_PARTS = "".join(
    f"let {name}[{y}, {i}] = where(gt(({i} + 1) * size({y}), {y} * size({i})),"
    f" where(gt(({y} + 1) * size({i}), {i} * size({y})), 1, 0), 0);  "
    for name, y, i in (("row", "y", "i"), ("column", "z", "j"))
)
"""1 for the rows i of which row y is the mean, floor(y |i| / |y|) to ceil((y + 1) |i| / |y|), and 0; columns alike."""

ADAPTIVE_AVG_POOL2D = Operator(
    f"adaptive_avg_pool2d(x; sizes: ints)  {_PARTS}"
    "  out[n.., y, z] = sum[i, j](x[n.., i, j] * (row[y, i] * column[z, j]))"
    " / (sum[i](row[y, i]) * sum[j](column[z, j]))"
    "  where size(y) = sizes.0, size(z) = sizes.1",
    gradient=lambda of: (ADAPTIVE_AVG_POOL2D_GRAD.one(of.grad, sizes=of.operands[0].shape[-2:]),),
)
"""Means over `sizes` parts of the rows and columns, which overlap where their numbers do not divide."""

ADAPTIVE_AVG_POOL2D_GRAD = Operator(
    f"adaptive_avg_pool2d_grad(g; sizes: ints)  {_PARTS}"
    "  out[n.., i, j] = sum[y, z](g[n.., y, z] * (row[y, i] * column[z, j])"
    " / (sum[a](row[y, a]) * sum[b](column[z, b])))"
    "  where size(i) = sizes.0, size(a) = sizes.0, size(j) = sizes.1, size(b) = sizes.1"
)

OPERATORS = (
    *(MAX_POOL2D, MAX_POOL2D_GRAD, AVG_POOL2D, AVG_POOL2D_GRAD),
    *(ADAPTIVE_AVG_POOL2D, ADAPTIVE_AVG_POOL2D_GRAD),
)
