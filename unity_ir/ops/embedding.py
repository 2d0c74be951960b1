"""Rows of a table, selected by integer ids. The vocabulary is an index variable, so it can be sharded."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _embedding_gradient(of: Application) -> Sequence[Tensor | None]:
    ids, table = of.operands
    return None, EMBEDDING_GRAD.one(of.grad, ids, size=table.shape[0], degrees=(table.degrees[0],))


EMBEDDING = Operator(
    "embedding(ids: int, t)  out[b.., e] = sum[v](where(eq(v, ids[b..]), t[v, e], 0))",
    gradient=_embedding_gradient,
)

EMBEDDING_GRAD = Operator(
    "embedding_grad(g, ids: int; size: int, degrees: ints)  out[v, e] = sum[b..](where(eq(v, ids[b..]), g[b.., e], 0))"
    "  where size(v) = size, degree(v) = degrees"
)
"""The table's gradient, dense: every row of `g` added to the row of the table it came from."""


def _embedding_bag_gradient(of: Application) -> Sequence[Tensor | None]:
    ids, table = of.operands
    return None, EMBEDDING_BAG_GRAD.one(of.grad, ids, size=table.shape[0], degrees=(table.degrees[0],))


EMBEDDING_BAG = Operator(
    "embedding_bag(ids: int, t)  out[b.., e] = sum[l](sum[v](where(eq(v, ids[b.., l]), t[v, e], 0)))",
    gradient=_embedding_bag_gradient,
)
"""The sum of the rows that each bag of ids [b.., l] names."""

EMBEDDING_BAG_GRAD = Operator(
    "embedding_bag_grad(g, ids: int; size: int, degrees: ints)"
    "  out[v, e] = sum[b.., l](where(eq(v, ids[b.., l]), g[b.., e], 0))  where size(v) = size, degree(v) = degrees"
)

OPERATORS = (EMBEDDING, EMBEDDING_GRAD, EMBEDDING_BAG, EMBEDDING_BAG_GRAD)
