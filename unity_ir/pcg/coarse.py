"""Planning on a coarser mesh: neighbouring axes that go the same way go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from unity_ir.errors import UnityError
from unity_ir.pcg.layout import REPEAT, Layout, Mesh
from unity_ir.pcg.reshard import Move, Price, plan

FINE_AXES = 3
"""Meshes of up to so many axes are planned axis by axis. The number of layouts grows exponentially with the axes."""


def plan_coarsely(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, levels: Sequence[int], price: Price
) -> tuple[Move, ...]:
    """
    As `pcg.reshard.plan`, but on a mesh of more than `FINE_AXES` axes, neighbours on one level (`levels` says which
    each axis is of) that go from one role to one other are one axis.

    Given (0, 0, 0, 0) to (1, 1, COPY, COPY), there are two axes of 4 instead of four of 2.
    """
    if len(mesh.sizes) <= FINE_AXES:
        return plan(source, target, shape, mesh, price)
    runs: list[list[int]] = []
    for axis in range(len(mesh.sizes)):
        way = (source[axis], target[axis], levels[axis])
        # A pinned axis is one by itself.
        if (
            runs
            and min(way[:2]) >= REPEAT
            and way == (source[runs[-1][-1]], target[runs[-1][-1]], levels[runs[-1][-1]])
        ):
            runs[-1].append(axis)
        else:
            runs.append([axis])

    def fine(move: Move) -> Move:
        return replace(move, axes=tuple(axis for run in move.axes for axis in runs[run]))

    coarse = Mesh(tuple(prod(mesh.sizes[axis] for axis in run) for run in runs))
    first = [run[0] for run in runs]
    begin, end = tuple(source[axis] for axis in first), tuple(target[axis] for axis in first)
    # A detour through a role that is neither in the one nor in the other pays only where sizes do not divide.
    useful = {*source, *target, REPEAT}
    try:
        found = plan(begin, end, shape, coarse, lambda m: price(fine(m)) if m.target in useful else inf)
    except UnityError:
        found = plan(begin, end, shape, coarse, lambda m: price(fine(m)))
    return tuple(map(fine, found))
