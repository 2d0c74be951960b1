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


def _scatter_max_gradient(of: Application) -> Sequence[Tensor | None]:
    (x, index, y), (out,) = of.operands, of.results
    dx, dy = SCATTER_MAX_GRAD(of.grad, x, index, y, out, dim=of.int("dim"))
    return dx, None, dy


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
    f"  out[a.., v, b..] = sum[i](where(eq(v, ids[i]), g[a.., i, b..], 0))  {_NEW}",
    gradient=lambda of: (INDEX_SELECT.one(of.grad, of.operands[1], dim=of.int("dim")), None),
)
"""Every slice of `g` added up at the position that `ids` [k] names: torch.index_add of zeros."""

SCATTER_ADD = Operator(
    "scatter_add(x, index: int, y; dim: int)"
    "  out[a.., v, b..] = x[a.., v, b..] + sum[i](where(eq(v, index[a.., i, b..]), y[a.., i, b..], 0))"
    f"  {_DIM}",
    gradient=_scatter_add_gradient,
)
"""torch.scatter_add: every element of `y` added to the place in `x` that `index` names."""

SCATTER_MAX = Operator(
    "scatter_max(x, index: int, y; dim: int)"
    "  out[a.., v, b..] = maximum(x[a.., v, b..], max[i](where(eq(v, index[a.., i, b..]), y[a.., i, b..], -1e30)))"
    f"  {_DIM}",
    gradient=_scatter_max_gradient,
)
"""The maximum of each element of `x` and of those of `y` whose place in `x` `index` names."""

SCATTER_MAX_GRAD = Operator(
    "scatter_max_grad(g, x, index: int, y, m; dim: int)"
    "  let n[a.., v, b..] = maximum(1, where(eq(x[a.., v, b..], m[a.., v, b..]), 1, 0)"
    " + sum[j](where(eq(v, index[a.., j, b..]), where(eq(y[a.., j, b..], m[a.., v, b..]), 1, 0), 0)));"
    "  dx[a.., v, b..] = where(eq(x[a.., v, b..], m[a.., v, b..]), g[a.., v, b..] / n[a.., v, b..], 0);"
    "  dy[a.., i, b..] = sum[v](where(eq(v, index[a.., i, b..]),"
    " where(eq(y[a.., i, b..], m[a.., v, b..]), g[a.., v, b..] / n[a.., v, b..], 0), 0))"
    f"  {_DIM}"
)
"""The gradients of `scatter_max`: in equal shares to all that are the maximum `m`, as PyTorch has it."""

INT_ADD = Operator("int_add(x: int, y: int)  out: int[a..] = x[~a..] + y[~a..]", gradient=lambda of: (None, None))

INT_MUL = Operator("int_mul(x: int, y: int)  out: int[a..] = x[~a..] * y[~a..]", gradient=lambda of: (None, None))
"""Sums and products of integers, as of indices into several dims."""

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
    *(GATHER, GATHER_GRAD, INDEX_SELECT, INDEX_SELECT_GRAD, SCATTER_ADD, SCATTER_MAX, SCATTER_MAX_GRAD),
    *(INT_ADD, INT_MUL, ONE_HOT, TOPK, TOPK_GRAD),
)
