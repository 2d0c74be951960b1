"""
Generate kernels of sums of long rows, and of matrices computed from the same elements (`forms.row_sums`).

    for tile of the program's part of a row:  store tiles of matrices;  sums += tile of what is summed
    store sums, of the row or of the part

Of several parts a second kernel adds up the sums. No atomics, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unity_ir.forms.addresses import address
from unity_ir.forms.row_sums import RowSums
from unity_ir.kernels.triton.launch import KernelLaunch, Stage
from unity_ir.kernels.triton.reduction import RowKernel, in_parts, new_variable, reduction_launch, unified
from unity_ir.kernels.triton.tiling import Tiling, parts_of, tiling_of, warps_of
from unity_ir.tdl.syntax import Reduce


def row_sum_launches(stages: Sequence[Stage], form: RowSums) -> list[KernelLaunch] | None:
    """
    Return the launches that compute the results of a TDL line that was matched as `form`; `stages` has a stage (a
    result to compute) for each. There are two if rows are split over programs, else one. Returns None if a row is one
    tile, which other kernels read once in any case, and if there is one row only.
    """
    extents = stages[0].extents
    sums = [each for each in stages if isinstance(each.expr, Reduce)]
    sizes = tuple(extents[n] for n in form.columns)
    tiling = tiling_of([each.expr for each in sums], extents, form.rows, ())
    if prod(extents[n] for n in form.rows) == 1 or prod(sizes) <= tiling.columns[sizes]:
        return None
    parts = parts_of(sums)
    matrices = [each for each in stages if not isinstance(each.expr, Reduce)]
    if parts == 1:
        return [_sums(sums, matrices, form, tiling, parts)]
    part = new_variable("part", extents)
    first, second = zip(*(in_parts(each, part, parts) for each in sums), strict=True)
    return [_sums(first, matrices, form, tiling, parts), reduction_launch(second)]


def _sums(sums: Sequence[Stage], matrices: Sequence[Stage], form: RowSums, tiling: Tiling, parts: int) -> KernelLaunch:
    """
    Return the launch of the kernel that stores matrices and sums, with several `parts` those of a part of each row.
    """
    extents = sums[0].extents
    stages = unified([*sums, *matrices], form.rows, form.columns)
    body = RowKernel(stages, form.rows, tiling, parts)
    writer, sizes = body.writer, tuple(extents[n] for n in form.columns)
    body.rows_of_program()
    nodes = [each.expr for each in stages if isinstance(each.expr, Reduce)]
    writer.share([*(node.body for node in nodes), *(each.expr for each in stages[len(nodes) :])])
    totals = [body.kernel.names.new("sums") for _ in nodes]
    for total in totals:
        writer.emit(f"{total} = tl.zeros(({body.rows}, {body.width(sizes)}), tl.float32)")
    start, head = body.loop(sizes)
    with writer.block(head):
        axis = body.columns(form.columns, sizes, start)
        writer.axes.append(axis)
        for number, each in enumerate(stages[len(nodes) :], len(nodes)):
            writer.store(body.kernel.out(number), address(each.result.indices, extents), writer.value(each.expr).text)
        for node, total in zip(nodes, totals, strict=True):
            writer.emit(f"{total} += {body.masked(node, axis).text}")
    for number, total in enumerate(totals):
        out, indices = body.kernel.out(number), stages[number].result.indices
        if parts > 1:
            writer.emit(f"{writer.pointers[out]} += {body.part} * {body.row_count}")
            indices = indices[1:]
        writer.store(out, address(indices, extents), f"tl.sum({total}, 1, keep_dims=True)")
    grid = (-(-body.row_count // tiling.rows), *((parts,) if parts > 1 else ()))
    return body.kernel.launch(sums[0].kernel, grid, warps_of(tiling, len(stages), 1), kind="rows")
