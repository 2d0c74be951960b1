"""The expressions of a result of a TDL line: one, or, for a concatenation, one for each segment of a dim."""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.tdl.syntax import Cases, Composite, Expr, Index, Result, Var, index_names


def segments(result: Result) -> tuple[int, Sequence[tuple[tuple[Index, ...], Expr]]]:
    """
    Return the expressions of a result with the indices of its dims, and the dim along which they follow one another.

    Given `out[a, (i0, i1)] = x0[a, i0], x1[a, i1]`, returns (1, [([a, i0], x0[a, i0]), ([a, i1], x1[a, i1])]); a result
    that is no concatenation has one expression, and dim 0.
    """
    if not isinstance(result.expr, Cases):
        return 0, [(result.indices, result.expr)]
    names = {n for n, _ in result.expr.branches}
    axis = next(i for i, index in enumerate(result.indices) if names <= {*index_names(index)})
    of = result.indices[axis]
    found: list[tuple[tuple[Index, ...], Expr]] = []
    for variable, expr in result.expr.branches:
        branch = Composite(of.names[1:]) if isinstance(of, Composite) else Var(variable)
        found.append(((*result.indices[:axis], branch, *result.indices[axis + 1 :]), expr))
    return axis, found
