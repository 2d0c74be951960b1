"""
Generate kernels of the mean of rows, and of their mean distances to it, in one pass (`forms.moments`).

    for tile of the program's columns:  mean += (x - mean) / tiles so far;  spread += (x - old mean) * (x - mean)
    merge the means and spreads of the tile's columns; those of several programs in a second kernel

Each column of a tile keeps a mean, and a sum of squared distances to it (Welford, 1962); they are merged as by Chan,
Golub & LeVeque (1983). Numbers are taken relative to the first of their row, so that a mean far larger than the
deviation costs no digits. No atomics, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from unity_ir.forms.addresses import Address, address, power_of_two
from unity_ir.forms.moments import Moments
from unity_ir.kernels.triton.launch import KernelLaunch, Stage
from unity_ir.kernels.triton.reduction import RowKernel, in_parts, new_variable
from unity_ir.kernels.triton.tiling import TILE, Tiling, parts_of, tiling_of, warps_of
from unity_ir.tdl.syntax import Access, Reduce

MERGED = 16
"""Most rows whose parts a program merges: neighbours in memory, so that it reads 64 bytes of each part."""


@dataclass(frozen=True, slots=True)
class _Division:
    """How rows of `count` numbers are divided: into tiles, and among `parts` programs, `span` numbers for each."""

    tiling: Tiling
    sizes: tuple[int, ...]
    """Extents of the variables that are summed over."""
    parts: int

    @property
    def count(self) -> int:
        return prod(self.sizes)

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.tiling.columns[self.sizes]

    @property
    def span(self) -> int:
        """Numbers of each part of a row but the last ones, which have fewer, or none."""
        return -(-self.count // (self.parts * self.width)) * self.width


def moments_launches(stages: Sequence[Stage], form: Moments) -> list[KernelLaunch] | None:
    """
    Return the launches that compute the results of a TDL line that was matched as `form`, whose `stages` (results to
    compute) are the mean, the mean distance to it and the mean squared distance, in this order: one launch, or two if
    rows are split over programs.

    Returns None if a row is one tile, which other kernels read once in any case, and if there is one row only.
    """
    extents = stages[0].extents
    sizes = tuple(extents[n] for n in form.columns)
    divided = _Division(tiling_of([stages[0].expr], extents, form.rows, ()), sizes, parts_of(stages[:1]))
    if not form.rows or divided.count <= divided.width:
        return None
    # All three read nothing but `x`, and their kernel is this one.
    stages = [replace(each, result=replace(each.result, expr=stages[0].expr)) for each in stages]
    if divided.parts == 1:
        return [_rows(stages, form, divided)]
    part = new_variable("part", extents)
    first, second = zip(*(in_parts(each, part, divided.parts) for each in stages), strict=True)
    return [_rows(first, form, divided), _merge(second, form, divided)]


def _rows(stages: Sequence[Stage], form: Moments, divided: _Division) -> KernelLaunch:
    """
    Return the launch of the kernel that reads the rows. Where these are split, it stores for each part the first number
    of the row, the mean relative to it, and the sum of squared distances to the mean.
    """
    extents, is_split = stages[0].extents, divided.parts > 1
    body = RowKernel(stages, form.rows, divided.tiling, divided.parts)
    writer, new = body.writer, body.kernel.names.new
    body.rows_of_program()
    where = address(form.x.indices, extents)
    of_row = Address({n: stride for n, stride in where.strides.items() if n in form.rows}, where.offset)
    pointer, mask = writer.pointer(form.x.tensor, of_row)
    first, mean, spread, off, step = map(new, ("first", "mean", "spread", "off", "step"))
    writer.emit(f"{first} = tl.load({pointer}{f', mask={mask}, other=0.0' if mask else ''}).to(tl.float32)")
    width = body.width(divided.sizes)
    for total in (mean, spread):
        writer.emit(f"{total} = tl.zeros(({body.rows}, {width}), tl.float32)")
    begin = f"{body.part} * {divided.span}" if is_split else "0"
    start, head = body.loop(divided.sizes)
    with writer.block(head):
        axis = body.columns(form.columns, divided.sizes, start)
        writer.axes.append(axis)
        writer.emit(f"{off} = {writer.load(form.x)} - {first}")
        writer.emit(f"{step} = {off} - {mean}")
        tiles = f"({start} - {begin}) // {width} + 1" if is_split else f"{start} // {width} + 1"
        weight = writer.define("weight", "weight", f"1.0 / ({tiles})")
        changes = f"{step} * {weight}", f"{step} * ({off} - {mean})"
        for total, change in zip((mean, spread), changes, strict=True):
            writer.emit(f"{total} += " + (f"tl.where({axis.mask}, {change}, 0.0)" if axis.mask else change))
    lanes = f"tl.arange(0, {width})[None, :]"
    length = str(divided.count)
    if is_split:
        # Parts behind the last number have none.
        length = writer.define("length", "length", f"tl.minimum({divided.count} - {begin}, {divided.span})")
    merged = _merged(body, mean, spread, f"tl.maximum({length} + {width} - 1 - {lanes}, 0) // {width}")
    if is_split:
        for number, value in enumerate((first, *merged)):
            out = body.kernel.out(number)
            writer.emit(f"{writer.pointers[out]} += {body.part} * {body.row_count}")
            writer.store(out, address(stages[number].result.indices[1:], extents), value)
    else:
        _store(body, first, *merged, divided.count)
    grid = (-(-body.row_count // divided.tiling.rows), *((divided.parts,) if is_split else ()))
    return body.kernel.launch(stages[0].kernel, grid, warps_of(divided.tiling, 1, 1), kind="rows")


def _merge(stages: Sequence[Stage], form: Moments, divided: _Division) -> KernelLaunch:
    """Return the launch of the kernel that merges the parts of each row, and stores the results."""
    width = power_of_two(divided.parts)
    tiling = Tiling(min(MERGED, max(1, TILE // width)), {(divided.parts,): width})
    body = RowKernel(stages, form.rows, tiling, 1)
    writer = body.writer
    body.rows_of_program()
    parts = [each.expr for each in stages]
    assert isinstance(parts[0], Reduce)
    axis = body.columns(parts[0].names, (divided.parts,), None)
    writer.axes.append(axis)
    reads = [part.body for part in parts if isinstance(part, Reduce)]
    firsts, means, spreads = [writer.load(read) for read in reads if isinstance(read, Access)]
    writer.axes.pop()
    # All parts have the same.
    own = f'tl.where({axis.mask}, {firsts}, -float("inf"))' if axis.mask else firsts
    first = writer.define(firsts, "first", f"tl.max({own}, 1, keep_dims=True)")
    counts = f"tl.minimum(tl.maximum({divided.count} - {axis.index} * {divided.span}, 0), {divided.span})"
    _store(body, first, *_merged(body, means, spreads, counts), divided.count)
    grid = (-(-body.row_count // tiling.rows),)
    return body.kernel.launch(stages[0].kernel, grid, warps_of(tiling, len(stages), 0), kind="rows")


def _merged(body: RowKernel, means: str, spreads: str, counts: str) -> tuple[str, str]:
    """
    Write the statements that merge a tile's columns, given the names of their means and sums of squared distances, and
    an expression of how many numbers each has. Return the names of those of all of them, one for each row.
    """
    define = body.writer.define
    counted = define("counts", "counts", f"({counts}).to(tl.float32)")
    total = define("total", "total", f"tl.maximum(tl.sum({counted}, 1, keep_dims=True), 1.0)")
    mean = define("mean", "mean", f"tl.sum({counted} * {means}, 1, keep_dims=True) / {total}")
    apart = f"{spreads} + {counted} * ({means} - {mean}) * ({means} - {mean})"
    return mean, define("spread", "spread", f"tl.sum({apart}, 1, keep_dims=True)")


def _store(body: RowKernel, first: str, mean: str, spread: str, count: int) -> None:
    """
    Write the stores of the results, given the names of the first number of each row, of the mean relative to it, and of
    the sum of squared distances to the mean. Distances are to the mean as it is stored, rounded.
    """
    writer, outs = body.writer, [body.kernel.out(number) for number in range(3)]
    element = f"{writer.pointers[outs[0]]}.dtype.element_ty"
    center = writer.define("center", "center", f"({first} + {mean}).to({element}).to(tl.float32)")
    shift = writer.define("shift", "shift", f"{first} - {center} + {mean}")
    values = center, shift, f"{spread} / {count} + {shift} * {shift}"
    for out, stage, value in zip(outs, body.stages, values, strict=True):
        writer.store(out, address(stage.result.indices, stage.extents), value)
