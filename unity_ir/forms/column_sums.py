"""
Recognise lines that sum the columns of what they compute row by row, as the gradients of biases and of norms' weights:
sums over all rows of a matrix that some other result is computed from, or is.

    out[r, c] = g[r, c] * w[c];  bias[c] = sum[r](g[r, c]);  weight[c] = sum[r](g[r, c] * x[r, c])

A kernel of such a line reads every row once (`kernels/triton/column_sums.py`). Rows and columns may be several
variables each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from unity_ir.forms.addresses import Address, address
from unity_ir.forms.rewrite import reductions, rename
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.gather import gather
from unity_ir.tdl.syntax import (
    Access,
    Bound,
    Cases,
    Expr,
    Opaque,
    Reduce,
    Result,
    Segments,
    Slice,
    Var,
    Window,
    WrittenIndex,
    accesses,
    children,
    index_names,
)

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """
    The form of a line whose results are computed from the same rows: matrices over `rows` and `columns`, and sums of
    such matrices over `rows`. The reductions inside of them are over the columns of one row.
    """

    rows: Names
    """The variables that sums are over, of extents above 1, outermost first."""
    columns: Names
    """The variables of the sums' dims, of extents above 1, outermost first."""
    has_statistics: bool
    """Whether elements depend on reductions of their row, so that a program has to hold whole rows."""


def column_sums(line: Bound) -> ColumnSums | None:
    """
    Match a bound TDL line as one that a single kernel computes row by row: some results are the sum of a matrix over
    its rows, such as the gradient of a bias or of a norm's weight; others may be matrices of the same rows and columns,
    such as the gradient that is summed. Return which index variables are rows and which columns.

    The line must be simplified (`rewrite.simplified`), and its results must share their index variables (see
    `with_common_variables`). Returns None for a line that has no such sum, or only one sum, of elements that need no
    reduction over their row; and where a tensor is read at several addresses for one row, or its columns are not
    contiguous.
    """
    rows: Names | None = None
    columns: Names = ()
    matrices: list[Result] = []
    sums: list[Reduce] = []
    for result in line.results:
        if not _is_plain(result):
            return None
        total = _sum_of(result)
        if total is None:
            matrices.append(result)
            continue
        space = _long(line, total.names), _names(line, result)
        if rows is not None and space != (rows, columns):
            return None
        rows, columns = space
        sums.append(total)
    if rows is None or not rows or not columns:
        return None
    if any(_names(line, r) != (*rows, *columns) for r in matrices):
        return None
    bodies = [*(r.expr for r in matrices), *(total.body for total in sums)]
    inner = {node for body in bodies for node in reductions(body)}
    if len(bodies) == 1 and not inner:
        return None
    if not all(reads_whole_rows(line, body, rows, columns) for body in bodies):
        return None
    if not all(_is_of_a_row(line, node, rows, columns) for node in inner):
        return None
    return ColumnSums(rows, columns, bool(inner)) if _reads_once(line, bodies, matrices, rows, columns) else None


def is_column_sum(result: Result) -> bool:
    """
    Return whether a result is one operand summed over its leading dims, and nothing else: `out[c] = sum[r](x[r, c])`.
    """
    total = _sum_of(result)
    if total is None or not isinstance(total.body, Access):
        return False
    read, summed = total.body.indices, (*total.indices, *result.indices)
    # By names, since rows may be padded.
    is_plain = all(isinstance(i, Var) for i in (*read, *summed))
    return bool(result.indices) and is_plain and [*map(index_names, read)] == [*map(index_names, summed)]


def reads_whole_rows(line: Bound, body: Expr, rows: Names, columns: Names) -> bool:
    """
    Return whether some read of a tensor in `body`, an expression of a bound line, depends on all index variables `rows`
    and `columns`, so that it reads an element for every row and column. `column_sums` requires it, to have a matrix to
    go through.

    A reduction over as many variables as there are columns counts as one over the columns.
    """
    wanted = {*rows, *columns}
    return any(wanted <= {n for i in a.indices for n in index_names(i)} for a in _of_rows(line, body, rows, columns))


def with_common_variables(
    line: Bound, axes: Mapping[str, tuple[int, ...]]
) -> tuple[Bound, Mapping[str, tuple[int, ...]]] | None:
    """
    Rename the index variables of a bound line so that all results have those of the first one. Return (the line; for
    each of its variables that is used as a value, the numbers of the mesh axes that divide it).

        out[r, c] = f(g[r, c]);  bias[e] = sum[k](g[k, e])  ->  out[r, c] = f(g[r, c]);  bias[c] = sum[r](g[r, c])

    `axes` has these numbers for the variables as they are named before. All results must have the same sizes; for a
    sum, these are the sizes of its rows (summed over), then of its columns. Returns None if sizes differ, if different
    mesh axes divide variables that would become one, and for segments, windows, gathers and opaque functions.
    """
    common: Names | None = None
    results: list[Result] = []
    mesh_axes: dict[str, tuple[int, ...]] = {}
    for result in line.results:
        if not _is_plain(result):
            return None
        total = _sum_of(result)
        own = _names(line, result)
        own = own if total is None else (*_long(line, total.names), *own)
        common = own if common is None else common
        if [line.extents[n] for n in own] != [line.extents[n] for n in common]:
            return None
        names = dict(zip(own, common, strict=True))
        for old, new in names.items():
            if old in axes and mesh_axes.setdefault(new, axes[old]) != axes[old]:
                return None
        results.append(_renamed(result, names))
    used = {n for r in results for n in (*_all_names(r), *_bound(r.expr))}
    mesh_axes |= {n: a for n, a in axes.items() if n in used}
    extents = {n: size for n, size in line.extents.items() if n in used}
    return replace(line, results=tuple(results), extents=MappingProxyType(extents)), mesh_axes


def _renamed(result: Result, names: Mapping[str, str]) -> Result:
    def bind(node: Reduce, _: Mapping[str, str]) -> Mapping[str, str]:
        return {n: names.get(n, n) for n in node.names}

    (at,) = accesses(rename(Access("", result.indices), names))
    return replace(result, indices=at.indices, expr=rename(result.expr, names, bind))


def _is_plain(result: Result) -> bool:
    """Return whether a result has no segments, slices, windows, gathers or opaque functions."""
    indices: list[WrittenIndex] = [*result.indices, *(i for a in accesses(result.expr) for i in a.indices)]
    return not any(isinstance(i, Segments | Slice | Window) for i in indices) and not _is_special(result.expr)


def _is_special(expr: Expr) -> bool:
    if isinstance(expr, Cases | Opaque) or (isinstance(expr, Reduce) and gather(expr) is not None):
        return True
    return any(map(_is_special, children(expr)))


def _sum_of(result: Result) -> Reduce | None:
    """Return the sum that a result is, if it is one."""
    return result.expr if isinstance(result.expr, Reduce) and result.expr.reducer == "sum" else None


def _long(line: Bound, names: Names) -> Names:
    return tuple(n for n in names if line.extents[n] > 1)


def _names(line: Bound, result: Result) -> Names:
    """Return the variables of a result with an extent above 1, in order."""
    return _long(line, tuple(n for i in result.indices for n in index_names(i)))


def _all_names(result: Result) -> set[str]:
    return {n for i in result.indices for n in index_names(i)} | free_variables(result.expr)


def _bound(expr: Expr) -> set[str]:
    own = {*expr.names} if isinstance(expr, Reduce) else set[str]()
    return own.union(*map(_bound, children(expr)))


def _is_of_a_row(line: Bound, node: Reduce, rows: Names, columns: Names) -> bool:
    """Return whether a reduction is over all columns of a row."""
    free = {n for n in free_variables(node) if line.extents[n] > 1}
    sizes = [line.extents[n] for n in _long(line, node.names)]
    return free <= {*rows} and sizes == [line.extents[n] for n in columns]


def _reads_once(line: Bound, bodies: list[Expr], matrices: list[Result], rows: Names, columns: Names) -> bool:
    """Return whether each tensor of rows is read at one address only, and columns are neighbours in memory."""
    read: dict[str, Address] = {}
    written = [Access(f"result {k}", r.indices) for k, r in enumerate(matrices)]
    for access in (*written, *(a for body in bodies for a in _of_rows(line, body, rows, columns))):
        where = address(access.indices, line.extents)
        if where.strides.keys().isdisjoint(rows):
            continue
        if read.setdefault(access.tensor, where) != where:
            return False
        if where.strides.get(columns[-1], 1) != 1:
            return False
    return True


def _of_rows(line: Bound, expr: Expr, rows: Names, columns: Names) -> list[Access]:
    """Return what an expression reads, with the variables of reductions over a row named as its columns."""

    def bind(node: Reduce, _: Mapping[str, str]) -> Mapping[str, str]:
        own = _long(line, node.names)
        return {n: n for n in node.names} | (dict(zip(own, columns, strict=True)) if len(own) == len(columns) else {})

    return [*accesses(rename(expr, {}, bind))]
