"""Operators of one operand, element by element."""

from __future__ import annotations

from unity_ir.ops.binary import DIV, MUL, NEG
from unity_ir.ops.operator import Operator

SCALE = Operator(
    "scale(x; by: float)  out[a..] = by * x[a..]",
    gradient=lambda of: (SCALE.one(of.grad, by=of.attributes["by"]),),
)

EXP = Operator("exp(x)  out[a..] = exp(x[a..])", gradient=lambda of: (MUL.one(of.grad, of.results[0]),))

LOG = Operator("log(x)  out[a..] = log(x[a..])", gradient=lambda of: (DIV.one(of.grad, of.operands[0]),))

SQRT = Operator("sqrt(x)  out[a..] = sqrt(x[a..])", gradient=lambda of: (SQRT_GRAD.one(of.grad, of.results[0]),))

SQRT_GRAD = Operator("sqrt_grad(g, y)  out[a..] = 0.5 * g[a..] / y[a..]")

RSQRT = Operator("rsqrt(x)  out[a..] = rsqrt(x[a..])", gradient=lambda of: (RSQRT_GRAD.one(of.grad, of.results[0]),))

RSQRT_GRAD = Operator("rsqrt_grad(g, y)  out[a..] = -0.5 * g[a..] * y[a..] * y[a..] * y[a..]")

ABS = Operator("abs(x)  out[a..] = abs(x[a..])", gradient=lambda of: (ABS_GRAD.one(of.grad, of.operands[0]),))

ABS_GRAD = Operator("abs_grad(g, x)  out[a..] = where(gt(x[a..], 0), g[a..], where(lt(x[a..], 0), -g[a..], 0))")
"""0 at 0, as PyTorch has it."""

SIN = Operator("sin(x)  out[a..] = sin(x[a..])", gradient=lambda of: (MUL.one(of.grad, COS.one(of.operands[0])),))

COS = Operator(
    "cos(x)  out[a..] = cos(x[a..])", gradient=lambda of: (NEG.one(MUL.one(of.grad, SIN.one(of.operands[0]))),)
)

SQUARE = Operator(
    "square(x)  out[a..] = x[a..] * x[a..]", gradient=lambda of: (SQUARE_GRAD.one(of.grad, of.operands[0]),)
)

SQUARE_GRAD = Operator("square_grad(g, x)  out[a..] = 2 * g[a..] * x[a..]")

RECIPROCAL = Operator(
    "reciprocal(x)  out[a..] = 1 / x[a..]", gradient=lambda of: (RECIPROCAL_GRAD.one(of.grad, of.results[0]),)
)

RECIPROCAL_GRAD = Operator("reciprocal_grad(g, y)  out[a..] = -g[a..] * y[a..] * y[a..]")

POW_SCALAR = Operator(
    "pow_scalar(x; exponent: float)  out[a..] = pow(x[a..], exponent)",
    gradient=lambda of: (POW_SCALAR_GRAD.one(of.grad, of.operands[0], exponent=of.float("exponent")),),
)

POW_SCALAR_GRAD = Operator(
    "pow_scalar_grad(g, x; exponent: float)"
    "  out[a..] = where(eq(exponent, 0), 0, g[a..] * exponent * pow(x[a..], exponent - 1))"
)

ERF = Operator("erf(x)  out[a..] = erf(x[a..])", gradient=lambda of: (ERF_GRAD.one(of.grad, of.operands[0]),))

ERF_GRAD = Operator("erf_grad(g, x)  out[a..] = g[a..] * 1.1283791670955126 * exp(-x[a..] * x[a..])")

SHIFT = Operator("shift(x; by: float)  out[a..] = x[a..] + by", gradient=lambda of: (of.grad,))

FLOOR = Operator("floor(x)  out[a..] = floor(x[a..])", gradient=lambda of: (None,))

SIGN = Operator("sign(x)  out[a..] = where(gt(x[a..], 0), 1, where(lt(x[a..], 0), -1, 0))", gradient=lambda of: (None,))

DETACH = Operator("detach(x)  out[a..] = x[a..]", gradient=lambda of: (None,))
"""The value without its gradient."""

OPERATORS = (
    *(SCALE, SHIFT, SQUARE, SQUARE_GRAD, RECIPROCAL, RECIPROCAL_GRAD, POW_SCALAR, POW_SCALAR_GRAD),
    *(EXP, LOG, SQRT, SQRT_GRAD, RSQRT, RSQRT_GRAD, ABS, ABS_GRAD, SIN, COS, ERF, ERF_GRAD, FLOOR, SIGN, DETACH),
)
