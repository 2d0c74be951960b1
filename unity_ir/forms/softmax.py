"""
Recognise softmaxes, which are quotients of exponentials and their sum, in TDL expressions (the elements of a result
over index variables).
"""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.forms.rewrite import canonical
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Binary, Call, Expr, Reduce, Var


def softmax(expr: Expr, extents: Mapping[str, int], starts: Mapping[str, str]) -> tuple[Expr, str] | None:
    """
    Match an expression as a softmax; return (its scores, before a maximum is subtracted; the index variable it
    normalises over), or None for anything else.

    `extents` maps each index variable to its number of positions. `starts` maps each index variable of which a task
    computes only a part to the name of the kernel argument with the global index at which the part begins; the others
    begin at 0. Given `exp(x[i, j] - max[k](x[i, k])) / sum[k](exp(x[i, k] - max[l](x[i, l])))`, returns `x[i, j]` and
    `j`.
    """
    match expr:
        case Binary("/", Call("exp", (scores,)) as above, Reduce("sum", (Var(summed),), below)):
            axis = _same_but(above, below, summed, extents, starts)
        case _:
            return None
    if axis is None:
        return None
    match scores:
        # Subtracting the maximum changes only the range of the numbers.
        case Binary("-", own, Reduce("max", (Var(name),), all)) if _same_but(own, all, name, extents, starts) == axis:
            return own, axis
        case _:
            return scores, axis


def _same_but(
    expr: Expr, other: Expr, variable: str, extents: Mapping[str, int], starts: Mapping[str, str]
) -> str | None:
    """Return the free variable of `expr` that is called `variable` in `other`, if they differ in nothing else."""
    want = canonical(Reduce("sum", (Var(variable),), other), extents, starts)
    for name in sorted(free_variables(expr)):
        if canonical(Reduce("sum", (Var(name),), expr), extents, starts) == want:
            return name
    return None
