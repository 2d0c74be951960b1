"""
Recognise lines of a matrix and of sums of its rows, or of others computed from the same elements, as where the gradient
of an activation is summed per channel for a batch norm's weight and bias.

    out[r, c] = f(g[r, c]);  bias[r] = sum[c](f(g[r, c]));  weight[r] = sum[c](f(g[r, c]) * x[r, c])

A kernel of such a line reads every element once, however many programs a row is split over
(`kernels/triton/row_sums.py`). Rows and columns may be several variables each, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from unity_ir.forms.addresses import address
from unity_ir.forms.rewrite import reductions, rename
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    Access,
    Bound,
    Composite,
    Expr,
    PaddedVar,
    Reduce,
    Result,
    Var,
    accesses,
    index_names,
)

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowSums:
    """
    The form of a line of matrices over `rows` and `columns`, and of sums over `columns`, without reductions inside.
    """

    rows: Names
    """The variables of the sums' dims, of extents above 1, outermost first."""
    columns: Names
    """The variables that are summed over, of extents above 1, outermost first."""


def row_sums(line: Bound) -> RowSums | None:
    """
    Match a bound TDL line as matrices and as sums of rows, at least one of each, that are computed from the same
    elements. The line must be simplified (`rewrite.simplified`), and its results must share their index variables (see
    `with_row_variables`). Returns None for any other line, and where a tensor of all variables is read at two
    addresses.
    """
    sums = [r for r in line.results if _sum_of(r) is not None]
    matrices = [r for r in line.results if r not in sums]
    if not sums or not matrices or not all(_is_plain(r) for r in line.results):
        return None
    spaces = {(_long(line, _names(r)), _long(line, total.names)) for r in sums if (total := _sum_of(r)) is not None}
    if len(spaces) > 1:
        return None
    ((rows, columns),) = spaces
    if not rows or not columns or any({*_long(line, _names(r))} != {*rows, *columns} for r in matrices):
        return None
    read: dict[str, object] = {}
    for access in (a for r in line.results for a in accesses(r.expr)):
        where = address(access.indices, line.extents)
        if {*where.strides} >= {*rows, *columns} and read.setdefault(access.tensor, where) != where:
            return None
    return RowSums(rows, columns) if read else None


def with_row_variables(
    line: Bound, axes: Mapping[str, tuple[int, ...]]
) -> tuple[Bound, Mapping[str, tuple[int, ...]]] | None:
    """
    Rename the index variables of a bound line's sums so that they read a tensor as its first matrix does. Return (the
    line; for each of its variables that is used as a value, the numbers of the mesh axes that divide it).

        out[a, b] = f(g[a, b]);  bias[c] = sum[n](f(g[n, c]))  ->  out[a, b] = f(g[a, b]);  bias[b] = sum[a](f(g[a, b]))

    `axes` has these numbers for the variables as they are named before. Returns None for a line without matrices or
    without sums, if a sum reads nothing that the matrix reads, and if different mesh axes divide variables that would
    become one.
    """
    matrix = next((r for r in line.results if _sum_of(r) is None), None)
    if matrix is None or not all(map(_is_plain, line.results)):
        return None
    results: list[Result] = []
    mesh_axes = dict(axes)
    for result in line.results:
        total = _sum_of(result)
        names = dict[str, str]() if total is None else _read_alike(line, matrix, result)
        if names is None or (total is None and {*_long(line, _names(result))} != {*_long(line, _names(matrix))}):
            return None
        for old, new in names.items():
            if axes.get(old, ()) != axes.get(new, ()):
                return None
            mesh_axes.pop(old, None)
        results.append(_renamed(result, names))
    used = {n for r in results for n in (*_names(r), *free_variables(r.expr), *_bound(r.expr))}
    extents = {n: size for n, size in line.extents.items() if n in used}
    whole = replace(line, results=tuple(results), extents=MappingProxyType(extents))
    return (whole, mesh_axes) if len(results) > len([r for r in results if _sum_of(r) is None]) else None


def _read_alike(line: Bound, matrix: Result, result: Result) -> Mapping[str, str] | None:
    """Return the matrix's variable for each of a sum's, by a tensor that both read; None if there is none."""
    total = _sum_of(result)
    assert total is not None
    wanted = {*_long(line, (*total.names, *_names(result)))}
    for read in accesses(total.body):
        for other in accesses(matrix.expr):
            if read.tensor == other.tensor:
                names = _matched(line, read, other)
                if names is not None and wanted <= {*names} and {*names.values()} == {*_long(line, _names(matrix))}:
                    return names
    return None


def _matched(line: Bound, read: Access, other: Access) -> Mapping[str, str] | None:
    """Return the variable of `other` for each variable of `read`, index by index; None if sizes differ."""
    found: dict[str, str] = {}
    for index, at in zip(read.indices, other.indices, strict=True):
        mine, those = (_long(line, index_names(i)) for i in (index, at))
        if [line.extents[n] for n in mine] != [line.extents[n] for n in those]:
            return None
        found.update(zip(mine, those, strict=True))
    return found


def _renamed(result: Result, names: Mapping[str, str]) -> Result:
    def bind(node: Reduce, _: Mapping[str, str]) -> Mapping[str, str]:
        return {n: names.get(n, n) for n in node.names}

    (at,) = accesses(rename(Access("", result.indices), names))
    return replace(result, indices=at.indices, expr=rename(result.expr, names, bind))


def _sum_of(result: Result) -> Reduce | None:
    """Return the sum that a result is, if it is one."""
    return result.expr if isinstance(result.expr, Reduce) and result.expr.reducer == "sum" else None


def _is_plain(result: Result) -> bool:
    """Return whether a result has plain indices, and no reductions but the sum that it is."""
    indices = [*result.indices, *(i for a in accesses(result.expr) for i in a.indices)]
    inner = [node for node in reductions(result.expr) if node != _sum_of(result)]
    is_gather = isinstance(result.expr, Reduce) and gather(result.expr) is not None
    plain = all(isinstance(i, Var | Composite) and not isinstance(i, PaddedVar) for i in indices)
    return plain and not inner and not is_gather


def _long(line: Bound, names: Sequence[str]) -> Names:
    return tuple(n for n in names if line.extents[n] > 1)


def _names(result: Result) -> Names:
    return tuple(n for i in result.indices for n in index_names(i))


def _bound(expr: Expr) -> Names:
    return expr.names if isinstance(expr, Reduce) else ()
