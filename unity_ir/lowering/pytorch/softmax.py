"""Softmaxes, and how they are told from other quotients."""

from __future__ import annotations

from unity_ir.forms.rewrite import canonical
from unity_ir.lowering.pytorch.value import Value
from unity_ir.lowering.pytorch.writer import Writer
from unity_ir.lowering.text import Text
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Binary, Call, Expr, Reduce, Var


def softmax_axis(writer: Writer, quotient: Binary) -> str | None:
    """The variable over which a quotient is a softmax; None if it is none."""
    match quotient:
        case Binary("/", Call("exp") as above, Reduce("sum", (Var(summed),), below)):
            return _same_but(writer, above, below, summed)
        case _:
            return None


def _same_but(writer: Writer, expr: Expr, other: Expr, variable: str) -> str | None:
    """The free variable of `expr` that is called `variable` in `other`, if that is all they differ in."""
    want = canonical(Reduce("sum", (Var(variable),), other), writer.extents, writer.starts)
    for name in free_variables(expr):
        if canonical(Reduce("sum", (Var(name),), expr), writer.extents, writer.starts) == want:
            return name
    return None


def softmax(writer: Writer, expr: Expr, axis: str) -> Value:
    """The softmax of what is raised to e, over a variable."""
    match expr:
        case Binary("-", above, Reduce("max", (Var(name),), below)) if _same_but(writer, above, below, name) == axis:
            # That the maximum is subtracted changes nothing but the range of numbers, which PyTorch sees to.
            expr = above
        case _:
            pass
    value = writer.floating(writer.value(expr))
    return Value(Text(f"torch.softmax({value.text.text}, {value.dims.index(axis)})"), value.dims)
