"""Sums over dims, and their gradient, which spreads a value over dims."""

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
    "expand(x; dim: int, sizes: ints, degrees: ints)  out[a.., k.., b..] = x[a.., b..]"
    "  where rank(a..) = dim, size(k..) = sizes, degree(k..) = degrees",
    gradient=lambda of: (REDUCE_SUM.one(of.grad, dim=of.int("dim"), count=len(of.ints("sizes"))),),
)
"""
New dims before `dim`, along which the value is the same. No operand mentions them, so their degrees are attributes.
"""


def sum_leading(x: Tensor, count: int) -> Tensor:
    """`x` summed over its first `count` dims: the gradient of a broadcast."""
    return x if count == 0 else REDUCE_SUM.one(x, dim=0, count=count)


OPERATORS = (REDUCE_SUM, EXPAND)
