"""
Elements selected along a dim by integers. The indexed dim is an index variable, so it can be sharded.

Each device then selects the elements that lie in its shard, and the results are partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor

_DIM = "where rank(a..) = dim"
_NEW = f"{_DIM}, size(v) = size, degree(v) = degrees"


def _gather_gradient(of: Application) -> Sequence[Tensor | None]:
    (x, index), dim = of.operands, of.int("dim")
    return GATHER_GRAD.one(of.grad, index, dim=dim, size=x.shape[dim], degrees=(x.degrees[dim],)), None


def _index_select_gradient(of: Application) -> Sequence[Tensor | None]:
    (x, ids), dim = of.operands, of.int("dim")
    return INDEX_SELECT_GRAD.one(of.grad, ids, dim=dim, size=x.shape[dim], degrees=(x.degrees[dim],)), None


def _scatter_add_gradient(of: Application) -> Sequence[Tensor | None]:
    return of.grad, None, GATHER.one(of.grad, of.operands[1], dim=of.int("dim"))


def _topk_gradient(of: Application) -> Sequence[Tensor | None]:
    return (TOPK_GRAD.one(of.grad, of.results[1], size=of.operands[0].shape[-1]),)


GATHER = Operator(
    "gather(x, index: int; dim: int)"
    f"  out[a.., i, b..] = sum[v](where(eq(v, index[a.., i, b..]), x[a.., v, b..], 0))  {_DIM}",
    gradient=_gather_gradient,
)
"""torch.gather; `index` has the sizes of `x` along all other dims."""

GATHER_GRAD = Operator(
    "gather_grad(g, index: int; dim: int, size: int, degrees: ints)"
    f"  out[a.., v, b..] = sum[i](where(eq(v, index[a.., i, b..]), g[a.., i, b..], 0))  {_NEW}"
)

INDEX_SELECT = Operator(
    f"index_select(x, ids: int; dim: int)  out[a.., i, b..] = sum[v](where(eq(v, ids[i]), x[a.., v, b..], 0))  {_DIM}",
    gradient=_index_select_gradient,
)
"""torch.index_select: the slices that `ids` [k] name."""

INDEX_SELECT_GRAD = Operator(
    "index_select_grad(g, ids: int; dim: int, size: int, degrees: ints)"
    f"  out[a.., v, b..] = sum[i](where(eq(v, ids[i]), g[a.., i, b..], 0))  {_NEW}"
)

SCATTER_ADD = Operator(
    "scatter_add(x, index: int, y; dim: int)"
    "  out[a.., v, b..] = x[a.., v, b..] + sum[i](where(eq(v, index[a.., i, b..]), y[a.., i, b..], 0))"
    f"  {_DIM}",
    gradient=_scatter_add_gradient,
)
"""torch.scatter_add: every element of `y` added to the place in `x` that `index` names."""

ONE_HOT = Operator(
    "one_hot(ids: int; classes: int)  out: int[b.., c] = where(eq(c, ids[b..]), 1, 0)  where size(c) = classes",
    gradient=lambda of: (None,),
)

TOPK = Operator(
    "topk(x; k: int)"
    "  values[a.., i] = opaque topk_values[i; j](x[a.., j]);"
    "  indices: int[a.., i] = opaque topk_indices[i; j](x[a.., j])"
    "  where size(i) = k",
    gradient=_topk_gradient,
)
"""The k largest of the last dim, largest first, and where they are; of equal ones the first."""

TOPK_GRAD = Operator(
    "topk_grad(g, indices: int; size: int)"
    "  out[a.., j] = sum[i](where(eq(j, indices[a.., i]), g[a.., i], 0))  where size(j) = size"
)

OPERATORS = (
    *(GATHER, GATHER_GRAD, INDEX_SELECT, INDEX_SELECT_GRAD, SCATTER_ADD),
    *(ONE_HOT, TOPK, TOPK_GRAD),
)
