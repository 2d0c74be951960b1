"""
The parts of a softmax cross-entropy whose class dim can be sharded (Megatron's vocabulary-parallel loss).

    loss = mean(log(sum_exp(x, m)) + m - class_score(x, t))      with m = max of x over the classes

A maximum cannot be a partial sum, so m is computed in two steps: over each shard of the classes, then over the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.binary import MUL, NEG
from unity_ir.ops.operator import Application, Operator, Tensor


def _max_of_parts_gradient(of: Application) -> Sequence[Tensor | None]:
    return (MAX_OF_PARTS_GRAD.one(of.grad, of.operands[0], of.results[0]),)


def _sum_exp_gradient(of: Application) -> Sequence[Tensor | None]:
    x, m = of.operands
    return SUM_EXP_GRAD.one(of.grad, x, m), NEG.one(MUL.one(of.grad, of.results[0]))


def _class_score_gradient(of: Application) -> Sequence[Tensor | None]:
    x, t = of.operands
    return CLASS_SCORE_GRAD.one(of.grad, t, size=x.shape[-1], degrees=(x.degrees[-1],)), None


MAX_OF_PARTS = Operator(
    "max_of_parts(x; parts: int)  m[b.., p] = max[c](x[b.., (p c)])  where size(p) = parts",
    gradient=_max_of_parts_gradient,
)
"""The maximum of each of `parts` equal parts of the last dim."""

MAX_OF_PARTS_GRAD = Operator(
    "max_of_parts_grad(g, x, y)"
    "  let n[b.., p] = maximum(sum[d](where(eq(x[b.., (p d)], y[b.., p]), 1, 0)), 1);"
    "  out[b.., (p c)] = where(eq(x[b.., (p c)], y[b.., p]), g[b.., p] / n[b.., p], 0)"
)

SUM_EXP = Operator("sum_exp(x, m)  out[b..] = sum[c](exp(x[b.., c] - m[b..]))", gradient=_sum_exp_gradient)
"""The sum of the exponentials of a row, scaled by exp(-m) so that they stay in range."""

SUM_EXP_GRAD = Operator("sum_exp_grad(g, x, m)  out[b.., c] = g[b..] * exp(x[b.., c] - m[b..])")

CLASS_SCORE = Operator(
    "class_score(x, t: int)  out[b..] = sum[c](where(eq(c, t[b..]), x[b.., c], 0))", gradient=_class_score_gradient
)
"""The element of each row that its class id names."""

CLASS_SCORE_GRAD = Operator(
    "class_score_grad(g, t: int; size: int, degrees: ints)  out[b.., c] = where(eq(c, t[b..]), g[b..], 0)"
    "  where size(c) = size, degree(c) = degrees"
)

OPERATORS = (MAX_OF_PARTS, MAX_OF_PARTS_GRAD, SUM_EXP, SUM_EXP_GRAD, CLASS_SCORE, CLASS_SCORE_GRAD)
