"""Comparisons, logic, selection between two values, and conversion of element types."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.ops.broadcast import unbroadcast
from unity_ir.ops.operator import Application, Operator, Tensor
from unity_ir.tdl.syntax import NOT_FLOATING


def _nothing(of: Application) -> Sequence[Tensor | None]:
    return (None,) * len(of.operands)


def _comparison(name: str) -> Operator:
    return Operator(f"{name}(x: any, y: any)  out: bool[a..] = {name}(x[~a..], y[~a..])", gradient=_nothing)


EQ, NE, LT, LE, GT, GE = map(_comparison, ("eq", "ne", "lt", "le", "gt", "ge"))

LOGICAL_AND = Operator(
    "logical_and(x: bool, y: bool)  out: bool[a..] = and(x[~a..], y[~a..])",
    gradient=_nothing,
)

LOGICAL_OR = Operator("logical_or(x: bool, y: bool)  out: bool[a..] = or(x[~a..], y[~a..])", gradient=_nothing)

LOGICAL_NOT = Operator("logical_not(x: bool)  out: bool[a..] = not(x[a..])", gradient=_nothing)


def _select_gradient(of: Application) -> Sequence[Tensor | None]:
    c, x, y = of.operands
    return (
        None,
        unbroadcast(SELECT_GRAD.one(of.grad, c, chosen=1), x),
        unbroadcast(SELECT_GRAD.one(of.grad, c, chosen=0), y),
    )


SELECT = Operator(
    "select(c: bool, x: any, y: any)  out[a..] = where(c[~a..], x[~a..], y[~a..])", gradient=_select_gradient
)
"""`x` where `c` holds, and `y` elsewhere: torch.where."""

SELECT_GRAD = Operator("select_grad(g, c: bool; chosen: int)  out[a..] = where(eq(c[~a..], chosen), g[a..], 0)")
"""The gradient where the condition is `chosen` (1 or 0), before it is summed over the dims of a broadcast."""


def _cast_gradient(of: Application) -> Sequence[Tensor | None]:
    (x,) = of.operands
    return (None if x.dtype in NOT_FLOATING else CAST.one(of.grad, to=x.dtype),)


CAST = Operator("cast(x: any; to: dtype)  out: to[a..] = x[a..]", gradient=_cast_gradient)
"""Another element type. Of addends, each is converted by itself."""

OPERATORS = (EQ, NE, LT, LE, GT, GE, LOGICAL_AND, LOGICAL_OR, LOGICAL_NOT, SELECT, SELECT_GRAD, CAST)
