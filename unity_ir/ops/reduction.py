"""Reductions over dims, and the gradient of a sum, which expands a value along dims."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _reduce_sum_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, count = of.int("dim"), of.int("count")
    (x,) = of.operands
    dims = slice(dim, dim + count)
    return (EXPAND.one(of.grad, dim=dim, sizes=x.shape[dims], degrees=x.degrees[dims]),)


REDUCE_SUM = Operator(
    "reduce_sum(x; dim: int, count: int = 1)  out[a.., b..] = sum[k..](x[a.., k.., b..])"
    "  where rank(a..) = dim, rank(k..) = count",
    gradient=_reduce_sum_gradient,
)
"""Sums `count` dims from `dim` on."""

EXPAND = Operator(
    "expand(x: any; dim: int, sizes: ints, degrees: ints)  out[a.., k.., b..] = x[a.., b..]"
    "  where rank(a..) = dim, size(k..) = sizes, degree(k..) = degrees",
    gradient=lambda of: (REDUCE_SUM.one(of.grad, dim=of.int("dim"), count=len(of.ints("sizes"))),),
)
"""
New dims before `dim`, along which the value is the same. No operand mentions them, so their degrees are attributes.
"""


def sum_leading(x: Tensor, count: int) -> Tensor:
    """Return `x` summed over its first `count` dims, which the result does not have."""
    return x if count == 0 else REDUCE_SUM.one(x, dim=0, count=count)


_DIMS = "where rank(a..) = dim, rank(k..) = count"


def _reduce_mean_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, count = of.int("dim"), of.int("count")
    (x,) = of.operands
    dims = slice(dim, dim + count)
    return (REDUCE_MEAN_GRAD.one(of.grad, dim=dim, sizes=x.shape[dims], degrees=x.degrees[dims]),)


def _extreme_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, count = of.int("dim"), of.int("count")
    if count == 0:
        return (of.grad,)
    return (REDUCE_EXTREME_GRAD.one(of.grad, of.operands[0], of.results[0], dim=dim, count=count),)


def _reduce_prod_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, (x,) = of.int("dim"), of.operands
    if of.int("count") == 0:
        return (of.grad,)
    return (REDUCE_PROD_GRAD.one(of.grad, x, dim=dim, sizes=x.shape[dim : dim + of.int("count")]),)


REDUCE_MEAN = Operator(
    f"reduce_mean(x; dim: int, count: int = 1)  out[a.., b..] = sum[k..](x[a.., k.., b..] / size(k..))  {_DIMS}",
    gradient=_reduce_mean_gradient,
)

REDUCE_MEAN_GRAD = Operator(
    "reduce_mean_grad(g; dim: int, sizes: ints, degrees: ints)  out[a.., k.., b..] = g[a.., b..] / size(k..)"
    "  where rank(a..) = dim, size(k..) = sizes, degree(k..) = degrees"
)

REDUCE_MAX = Operator(
    f"reduce_max(x; dim: int, count: int = 1)  out[a.., b..] = max[k..](x[a.., k.., b..])  {_DIMS}",
    gradient=_extreme_gradient,
)

REDUCE_MIN = Operator(
    f"reduce_min(x; dim: int, count: int = 1)  out[a.., b..] = min[k..](x[a.., k.., b..])  {_DIMS}",
    gradient=_extreme_gradient,
)

REDUCE_EXTREME_GRAD = Operator(
    "reduce_extreme_grad(g, x, y; dim: int, count: int = 1)"
    "  let n[a.., b..] = maximum(sum[j..](where(eq(x[a.., j.., b..], y[a.., b..]), 1, 0)), 1);"
    "  out[a.., k.., b..] = where(eq(x[a.., k.., b..], y[a.., b..]), g[a.., b..] / n[a.., b..], 0)"
    "  where rank(a..) = dim, rank(k..) = count, rank(j..) = count"
)
"""The gradient of a maximum or minimum `y`: in equal shares to all that are it, as PyTorch's amax has it."""

REDUCE_PROD = Operator(
    f"reduce_prod(x; dim: int, count: int = 1)  out[a.., b..] = prod[k..](x[a.., k.., b..])  {_DIMS}",
    gradient=_reduce_prod_gradient,
)

REDUCE_PROD_GRAD = Operator(
    "reduce_prod_grad(g, x; dim: int, sizes: ints)  out[a.., k.., b..] = g[a.., b..]"
    " * prod[j..](where(eq(position(j..), position(k..)), 1, x[a.., j.., b..]))"
    "  where rank(a..) = dim, size(k..) = sizes, size(j..) = sizes"
)
"""The product of all the others, so that it holds at zeros."""

OPERATORS = (
    *(REDUCE_SUM, EXPAND, REDUCE_MEAN, REDUCE_MEAN_GRAD),
    *(REDUCE_MAX, REDUCE_MIN, REDUCE_EXTREME_GRAD, REDUCE_PROD, REDUCE_PROD_GRAD),
)
