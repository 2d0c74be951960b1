"""
Kernels of sums that add every element to the one place which an operand of integers names.

The positions are sorted by those places before, so that one program adds up all that belongs to a place. Without
atomics, so that results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from unity_ir.lowering.kernels.expression import SUM, Axis
from unity_ir.lowering.kernels.layout import address, power_of_two
from unity_ir.lowering.kernels.rewrite import reductions
from unity_ir.lowering.kernels.step import Argument, Kernel, Stage, Step, warps
from unity_ir.tdl.gather import Pick, scatter
from unity_ir.tdl.syntax import Access, Reduce, Segments, index_names

BLOCK = 1024
"""Elements per program, of those that belong to one place."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """`out[v, e] = sum[b](where(eq(v, at[b]), body[b, e], 0))`."""

    pick: Pick
    positions: tuple[str, ...]
    """The variables that are summed, in the order of the integers' dims."""


def scattered(stage: Stage) -> Scatter | None:
    """The result as elements added to places; None where the integers are not read in order, each once."""
    found = scatter(stage.expr)
    if found is None or not isinstance(stage.expr, Reduce) or reductions(found.body):
        return None
    if any(isinstance(i, Segments) for i in found.at.indices):
        return None
    positions = tuple(n for i in found.at.indices for n in index_names(i))
    places = [n for i in stage.result.indices for n in index_names(i)]
    if sorted(positions) != sorted(stage.expr.names) or found.variable not in places:
        return None
    return Scatter(found, positions)


def scatter_step(stage: Stage, of: Scatter) -> Step:
    """The launch that computes it, after the lines that sort the positions."""
    place, extents = of.pick.variable, stage.extents
    places = tuple(n for i in stage.result.indices for n in index_names(i))
    columns = tuple(n for n in places if n != place)
    size = prod(extents[n] for n in columns)
    block = min(power_of_two(size), BLOCK)
    kernel = Kernel(replace(stage, result=replace(stage.result, expr=of.pick.body)))
    writer = kernel.writer
    order, begins = kernel.names.new("order_ptr"), kernel.names.new("begins_ptr")
    made = {
        order: stage.names.new(f"{stage.output.name}_order"),
        begins: stage.names.new(f"{stage.output.name}_begins"),
    }
    kernel.arguments = {**{p: Argument(text, "*i64") for p, text in made.items()}, **kernel.arguments}

    row = kernel.names.new("row")
    writer.emit(f"{row} = {kernel.program(0)}")
    writer.axes = [Axis(row, (place,))]
    shape = "()"
    if size > 1:
        width = kernel.constant("COLUMNS", block)
        column = kernel.names.new("column")
        writer.emit(f"{column} = {kernel.program(1)} * {width} + tl.arange(0, {width})")
        mask = None
        if size % block:
            mask = kernel.names.new("column_mask")
            writer.emit(f"{mask} = {column} < {size}")
        writer.axes.append(Axis(column, columns, mask))
        shape = f"({width},)"
    where = address(stage.result.indices, extents)
    # What the loop needs of this, too, is computed before it.
    writer.pointer(Kernel.OUT, where)
    total, number, position = (kernel.names.new(n) for n in ("total", "number", "position"))
    begin, end = kernel.names.new("begin"), kernel.names.new("end")
    writer.emit(f"{begin} = tl.load({begins} + {row})")
    writer.emit(f"{end} = tl.load({begins} + {row} + 1)")
    writer.emit(f"{total} = tl.zeros({shape}, tl.float32)")
    with writer.block(f"for {number} in range({begin}, {end}):"):
        writer.emit(f"{position} = tl.load({order} + {number})")
        writer.axes.append(Axis(position, of.positions))
        writer.emit(f"{total} += {writer.number(of.pick.body).at(SUM)}")
    writer.store(Kernel.OUT, where, total)
    step = kernel.step(stage.kernel, (extents[place], -(-size // block)), warps(block))
    return replace(step, before=sorting(stage, place, of.pick.at, made[order], made[begins]))


def sorting(stage: Stage, place: str, at: Access, order: str, begins: str) -> tuple[str, ...]:
    """The lines that make positions in order of their places, and where in that order each place begins."""
    ids = stage.buffers[at.tensor].name
    start, count = stage.starts.get(place), stage.extents[place]
    limits = f"{count + 1}" if start is None else f"{start}, {start} + {count + 1}"
    return (
        f"{order} = torch.argsort({ids}.flatten(), stable=True)",
        f"{begins} = torch.arange({limits}, dtype={ids}.dtype, device={ids}.device)",
        f"{begins} = torch.searchsorted({ids}.flatten()[{order}], {begins})",
    )
