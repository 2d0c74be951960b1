"""
Generate kernels of sums of columns and of matrices from the same rows (`forms.column_sums`).

    for tile of the program's rows:  load it once;  store tiles of matrices;  sums += tile of what is summed
    store sums as one row of partial sums

Each program takes many rows, tile after tile, and adds up the columns in registers; a second kernel adds up the
programs' partial sums. No atomics, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from unity_ir.forms.addresses import address, power_of_two
from unity_ir.forms.column_sums import ColumnSums
from unity_ir.forms.rewrite import reductions
from unity_ir.kernels.triton.expression import Axis
from unity_ir.kernels.triton.launch import KernelLaunch, Stage, warps
from unity_ir.kernels.triton.reduction import RowKernel, in_parts, new_variable, reduction_launch, unified
from unity_ir.kernels.triton.tiling import TILE, Tiling
from unity_ir.tdl.counts import free_variables
from unity_ir.tdl.syntax import Expr, Reduce, accesses

FEWEST_ROWS = 512
"""Fewest rows that are worth it: with fewer, programs are too few, or partial sums as large as what is summed."""
LONGEST = 4096
"""
Longest row of which all columns are in one tile, as statistics of rows need, and twice that with a single sum (the
gradient of an RMS norm): longer ones spill registers.
"""
WIDTH = 512
"""Columns of a tile where elements depend on nothing else of their row: 1 kB of bf16 for each row."""
ELEMENTS = 2048
"""Elements of a tile with statistics of rows, by 8 warps: two such programs have the registers of one SM."""
PROGRAMS = 256
"""
Most programs of up to 8 warps, and twice as many as of 16: two for each of the 132 SMs of an H100, which all run at a
time. There is a row of partial sums for each.
"""
FEWEST_OF_A_PROGRAM = 8
"""Fewest rows of a program, where the rows are few: partial sums are half the bytes of a bf16 tensor, or less."""


@dataclass(frozen=True, slots=True)
class _Division:
    """How a matrix is divided among programs of `warps`: into `parts` of `span` rows, each of `blocks` of columns."""

    tiling: Tiling
    span: int
    parts: int
    blocks: int
    warps: int


def column_sum_launches(stages: Sequence[Stage], form: ColumnSums) -> list[KernelLaunch] | None:
    """
    Return the two launches that compute the results of a TDL line that was matched as `form`: matrices, and sums of the
    columns of matrices. `stages` has a stage (a result to compute, with its buffers) for each result. The first kernel
    computes the matrices, and a partial sum of columns for each group of rows; the second adds up the partial sums.

    Returns None if there are fewer than `FEWEST_ROWS` rows, if rows are too long for a tile (see `LONGEST`), or if
    addresses need 64 bits.
    """
    extents = stages[0].extents
    sums = [number for number, each in enumerate(stages) if _is_sum(each, form)]
    divided = _division(stages, form, len(sums))
    if divided is None or stages[0].wide:
        return None
    part = new_variable("part", extents)
    first: list[Stage] = []
    second: list[Stage] = []
    for number, each in enumerate(stages):
        if number not in sums:
            first.append(replace(each, extents={**extents, part: divided.parts}))
            continue
        partial, total = in_parts(each, part, divided.parts)
        assert isinstance(partial.expr, Reduce)
        # What is summed is an element of a tile, like those of the matrices.
        first.append(replace(partial, result=replace(partial.result, expr=partial.expr.body)))
        second.append(total)
    finish = Tiling(*_finishing(divided.parts))
    return [_partial_sums(first, sums, form, divided), reduction_launch(second, 1, finish)]


def _is_sum(stage: Stage, form: ColumnSums) -> bool:
    return isinstance(stage.expr, Reduce) and not {*form.rows}.isdisjoint(stage.expr.names)


def _finishing(parts: int) -> tuple[int, dict[tuple[int, ...], int]]:
    """Return the tile of the second kernel: all partial sums of a few columns, so that there are many programs."""
    width = power_of_two(parts)
    return TILE // width, {(parts,): width}


def _division(stages: Sequence[Stage], form: ColumnSums, sums: int) -> _Division | None:
    """
    Return how programs divide the matrix of a line with `sums` sums of columns; None if it has too few rows, or if they
    are too long.
    """
    columns = tuple(stages[0].extents[n] for n in form.columns)
    count, width = prod(stages[0].extents[n] for n in form.rows), prod(columns)
    if count < FEWEST_ROWS or (form.has_statistics and width > (LONGEST if sums > 1 else 2 * LONGEST)):
        return None
    tile = power_of_two(width) if form.has_statistics else min(WIDTH, power_of_two(width))
    height = max(1, min(power_of_two(count), (ELEMENTS if form.has_statistics else TILE) // tile))
    blocks = -(-width // tile)
    threads = _warps(stages, form, height * tile)
    most = max(1, PROGRAMS // blocks // max(1, threads // 8))
    span = -(-max(FEWEST_OF_A_PROGRAM, -(-count // most)) // height) * height
    return _Division(Tiling(height, {columns: tile}), span, -(-count // span), blocks, threads)


def _warps(stages: Sequence[Stage], form: ColumnSums, elements: int) -> int:
    """
    Return the warps of a tile: 8 elements per thread where rows have statistics, as several are kept of each; else 16.
    """
    if not form.has_statistics:
        return warps(elements)
    read = {a.tensor for each in stages for a in accesses(each.expr) if {*form.rows} & free_variables(a)}
    # The compiler gives each of 16 warps 64 registers, and spills some where three matrices are read in float32.
    is_much = len(read) > 2 and all(stages[0].buffers[name].dtype == "f32" for name in read)
    return min(warps(elements * 2), 8 if is_much else 16)


def _partial_sums(stages: Sequence[Stage], sums: Sequence[int], form: ColumnSums, divided: _Division) -> KernelLaunch:
    """Return the launch of the kernel that stores matrices and partial sums, of the stages with the numbers `sums`."""
    stages = unified(stages, form.rows, form.columns)
    extents = stages[0].extents
    matrices = [number for number in range(len(stages)) if number not in sums]
    sizes = tuple(extents[n] for n in form.columns)
    body = RowKernel(stages, form.rows, divided.tiling, 1)
    writer, new = body.writer, body.kernel.names.new
    exprs = [each.expr for each in stages]
    writer.share(exprs)
    width = body.width(sizes)
    columns = body.single(form.columns, sizes)
    if columns is None:
        columns = body.columns(form.columns, sizes, f"{body.kernel.program(1)} * {width}")
    _load_columns(body, exprs, form, columns)
    totals = {number: new("sums") for number in sums}
    for total in totals.values():
        writer.emit(f"{total} = tl.zeros(({body.rows}, {width}), tl.float32)")
    part, start, end = new("part"), new("start"), new("end")
    writer.emit(f"{part} = {body.kernel.program(0)}")
    # Were its length known, AMD's compiler would unroll the loop completely.
    writer.emit(f"{end} = tl.minimum(({part} + 1) * {divided.span}, {body.row_count})")
    with writer.block(f"for {start} in range({part} * {divided.span}, {end}, {body.rows}):"):
        rows = body.tile_of_rows(start)
        body.reduce_all(list(dict.fromkeys(node for expr in exprs for node in reductions(expr))))
        writer.axes.append(columns)
        body.store_elements(matrices)
        for number, total in totals.items():
            value = writer.number(exprs[number])
            text = f"tl.where({rows.mask}, {value.text}, 0.0)" if rows.mask else value.text
            writer.emit(f"{total} += {text}")
    writer.axes = [columns]
    for number, total in totals.items():
        out = body.kernel.out(number)
        writer.emit(f"{writer.pointers[out]} += {part} * {prod(sizes)}")
        indices = stages[number].result.indices[1:]
        writer.store(out, address(indices, extents), f"tl.sum({total}, 0, keep_dims=True)")
    grid = (divided.parts, divided.blocks) if divided.blocks > 1 else (divided.parts,)
    return body.kernel.launch(stages[sums[0]].kernel, grid, divided.warps, kind="columns")


def _load_columns(body: RowKernel, exprs: Sequence[Expr], form: ColumnSums, columns: Axis) -> None:
    """Write, before the loop, the loads of vectors that are alike for all rows."""
    read = dict.fromkeys(a for expr in exprs for a in accesses(expr))
    body.writer.axes = [columns]
    for access in read:
        names = {n for n in free_variables(access) if body.stage.extents[n] > 1}
        if names and names <= {*form.columns}:
            body.writer.load(access)
    body.writer.axes = []
