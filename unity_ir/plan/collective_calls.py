"""Collectives of a program as the moves that a machine prices: one call, or a bucket of calls that are done as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.instructions import HaloExchange, ReshardMove, RowMove
from unity_ir.plan.program import Program


def move_of(program: Program, moved: ReshardMove | HaloExchange) -> Move:
    """
    Return a collective or halo exchange of a rank's program as a `pcg.reshard.Move`, the form in which
    `Machine.move_time` prices it: kind, mesh axes, devices per group, and the elements of a device's piece before the
    move; of rows that experts exchange, those of the rows that prices count (`RowMove.live`).
    """
    held = program.tensors[moved.operand]
    local = held.local(program.mesh)
    elements = prod(local)
    group = prod(program.mesh.sizes[axis] for axis in moved.axes)
    others = tuple((axis, at) for axis, at in pins_of(held.layout) if axis not in moved.axes)
    if isinstance(moved, HaloExchange):
        border = elements // local[moved.dim] * (moved.low + moved.high)
        return Move(moved.kind, moved.axes, moved.dim, moved.dim, group, elements, border, others)
    if isinstance(moved, RowMove):
        elements = group if moved.counts is None else moved.live * (elements // local[1])
    return Move(moved.kind, moved.axes, moved.source, moved.target, group, elements, 0, others)


def bucket_move(program: Program, moves: Sequence[ReshardMove | HaloExchange]) -> Move:
    """
    Return the one `pcg.reshard.Move` that stands for several done by a single call (a bucket), to be priced: the first
    of `moves`, with the elements of all of them. `moves` has at least one; all have the same kind and mesh axes.
    """
    found = [move_of(program, move) for move in moves]
    return replace(found[0], elements=sum(move.elements for move in found))
