"""Cumulative sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Application, Operator, Shapes, Tensor
from unity_ir.tdl.syntax import AttrValue


def _cumsum_line(shapes: Shapes, attributes: Mapping[str, AttrValue]) -> str:
    """
    Return the line for one size of the dim, which it must state, as operand and result have different indices there.
    """
    (shape,), dim = shapes, attributes["dim"]
    assert isinstance(dim, int)
    if not 0 <= dim < len(shape):
        raise UnityError(f"pcg.cumsum: attribute dim is {dim}, but x has rank {len(shape)}")
    return (
        "cumsum(x)  out[a.., i, b..] = sum[j](where(gt(j, i), 0, x[a.., j, b..]))"
        f"  where rank(a..) = {dim}, size(i) = {shape[dim]}"
    )


def _cumsum_gradient(of: Application) -> Sequence[Tensor | None]:
    dim, (x,) = of.int("dim"), of.operands
    return (CUMSUM_GRAD.one(of.grad, dim=dim, size=x.shape[dim], degrees=(x.degrees[dim],)),)


CUMSUM = Operator(_cumsum_line, signature="cumsum(x; dim: int)", gradient=_cumsum_gradient)
"""The sum of all up to each position along a dim, with itself."""

CUMSUM_GRAD = Operator(
    "cumsum_grad(g; dim: int, size: int, degrees: ints)"
    "  out[a.., j, b..] = sum[i](where(gt(j, i), 0, g[a.., i, b..]))"
    "  where rank(a..) = dim, size(j) = size, degree(j) = degrees"
)
"""The sum of all from each position on."""

OPERATORS = (CUMSUM, CUMSUM_GRAD)
