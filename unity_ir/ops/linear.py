"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.activation import GELU_GRAD, RELU_GRAD
from unity_ir.ops.operator import Application, Operator, Tensor


def _matmul_gradient(of: Application) -> Sequence[Tensor | None]:
    x, w = of.operands
    grad = of.grad
    match of.attributes["act"]:
        case "relu":
            grad = RELU_GRAD.one(grad, of.results[0])
        case "gelu":
            # The fused kernel keeps only its result, from which gelu's argument cannot be had: compute it again.
            grad = GELU_GRAD.one(grad, MATMUL.one(x, w, act="identity"))
        case _:
            pass
    return MATMUL_NT.one(grad, w), MATMUL_TN.one(x, grad)


MATMUL = Operator(
    "matmul(x, w; act: name = identity)  out[m.., n] = act(sum[k](x[m.., k] * w[k, n]))",
    gradient=_matmul_gradient,
)

MATMUL_NT = Operator(
    "matmul_nt(x, w)  out[m.., n] = sum[k](x[m.., k] * w[n, k])",
    gradient=lambda of: (MATMUL.one(of.grad, of.operands[1]), MATMUL_TN.one(of.grad, of.operands[0])),
)
"""The second operand transposed, as BLAS names it: the gradient of a matmul's first operand."""

MATMUL_TN = Operator("matmul_tn(x, y)  out[k, n] = sum[m..](x[m.., k] * y[m.., n])")
"""The first operand transposed, all leading dims contracted: the gradient of a matmul's weight."""


def _float8_gradient(of: Application) -> Sequence[Tensor | None]:
    x, w = of.operands
    product = FLOAT8_MATMUL_TN if of.attributes["all"] else MATMUL_TN
    return FLOAT8_MATMUL_NT.one(of.grad, w, all=of.attributes["all"]), product.one(x, of.grad)


def _float8_nt_gradient(of: Application) -> Sequence[Tensor | None]:
    x, w = of.operands
    product = FLOAT8_MATMUL_TN if of.attributes["all"] else MATMUL_TN
    return FLOAT8_MATMUL.one(of.grad, w, all=of.attributes["all"]), product.one(of.grad, x)


FLOAT8_MATMUL = Operator(
    "float8_matmul(x, w; all: int = 0)  out[m.., n] = sum[k](float8(x[m.., k]) * float8(w[k, n]))",
    gradient=_float8_gradient,
)
"""
A matmul of operands in 8 bits (`forms.float8`). The gradient of the second operand, a product over all samples, is in 8
bits if `all` is 1 (torchao's recipe `rowwise`), else not (`rowwise_with_gw_hp`).
"""

FLOAT8_MATMUL_NT = Operator(
    "float8_matmul_nt(x, w; all: int = 0)  out[m.., n] = sum[k](float8(x[m.., k]) * float8(w[n, k]))",
    gradient=_float8_nt_gradient,
)

FLOAT8_MATMUL_TN = Operator("float8_matmul_tn(x, y)  out[k, n] = sum[m..](float8(x[m.., k]) * float8(y[m.., n]))")

BATCH_MATMUL = Operator(
    "batch_matmul(x, y)  out[b.., m, n] = sum[k](x[b.., m, k] * y[b.., k, n])",
    gradient=lambda of: (
        BATCH_MATMUL_NT.one(of.grad, of.operands[1]),
        BATCH_MATMUL_TN.one(of.operands[0], of.grad),
    ),
)

BATCH_MATMUL_NT = Operator(
    "batch_matmul_nt(x, y)  out[b.., m, n] = sum[k](x[b.., m, k] * y[b.., n, k])",
    gradient=lambda of: (BATCH_MATMUL.one(of.grad, of.operands[1]), BATCH_MATMUL_TN.one(of.grad, of.operands[0])),
)

BATCH_MATMUL_TN = Operator(
    "batch_matmul_tn(x, y)  out[b.., m, n] = sum[k](x[b.., k, m] * y[b.., k, n])",
    gradient=lambda of: (BATCH_MATMUL_NT.one(of.operands[1], of.grad), BATCH_MATMUL.one(of.operands[0], of.grad)),
)

OPERATORS = (
    *(MATMUL, MATMUL_NT, MATMUL_TN, FLOAT8_MATMUL, FLOAT8_MATMUL_NT, FLOAT8_MATMUL_TN),
    *(BATCH_MATMUL, BATCH_MATMUL_NT, BATCH_MATMUL_TN),
)
