"""
Matrix products in which each row selects its weight by an integer: the experts of a mixture.

The weights' dim is an index variable, so experts can be sharded: each device computes the rows routed to its experts
and 0 for all others, and the results are partial sums. Rows may have several dims, `t..`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.operator import Application, Operator, Tensor


def _gradient(of: Application) -> Sequence[Tensor | None]:
    x, w, e = of.operands
    return ROUTED_MATMUL_NT.one(of.grad, w, e), _weight_gradient(x, of.grad, e, w), None


def _gradient_nt(of: Application) -> Sequence[Tensor | None]:
    x, w, e = of.operands
    return ROUTED_MATMUL.one(of.grad, w, e), _weight_gradient(of.grad, x, e, w), None


def _weight_gradient(x: Tensor, y: Tensor, e: Tensor, w: Tensor) -> Tensor:
    return ROUTED_MATMUL_TN.one(x, y, e, size=w.shape[0], degrees=(w.degrees[0],))


ROWS_LINE = "out[t.., n] = sum[v](where(eq(v, e[t..]), sum[k](x[t.., k] * w[v, k, n]), 0))"
ROWS_NT_LINE = "out[t.., n] = sum[v](where(eq(v, e[t..]), sum[k](x[t.., k] * w[v, n, k]), 0))"
WEIGHTS_LINE = (
    "out[v, k, n] = sum[t..](where(eq(v, e[t..]), x[t.., k] * y[t.., n], 0))  where size(v) = size, degree(v) = degrees"
)

ROUTED_MATMUL = Operator(f"routed_matmul(x, w, e: int)  {ROWS_LINE}", gradient=_gradient)
"""Every row of `x` [t.., k] times the one of the weights `w` [v, k, n] that `e` [t..] names."""

ROUTED_MATMUL_NT = Operator(f"routed_matmul_nt(x, w, e: int)  {ROWS_NT_LINE}", gradient=_gradient_nt)
"""The weights transposed: the gradient of the rows."""

ROUTED_MATMUL_TN = Operator(f"routed_matmul_tn(x, y, e: int; size: int, degrees: ints)  {WEIGHTS_LINE}")
"""The gradient of the weights: for each of them the product of the rows of `x` and of `y` that go to it."""

OPERATORS = (ROUTED_MATMUL, ROUTED_MATMUL_NT, ROUTED_MATMUL_TN)
