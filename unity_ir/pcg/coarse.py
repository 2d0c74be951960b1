"""Planning on a coarser mesh: neighbouring axes that go the same way go together."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from math import inf, prod

from unity_ir.errors import UnityError
from unity_ir.pcg.layout import REPEAT, Layout, Mesh
from unity_ir.pcg.reshard import Move, Price, move_kind, plan

FINE_AXES = 3
"""Meshes of up to so many axes are planned axis by axis. The number of layouts grows exponentially with the axes."""


def plan_coarsely(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, levels: Sequence[int], price: Price
) -> tuple[Move, ...]:
    """
    As `pcg.reshard.plan`, but on a mesh of more than `FINE_AXES` axes, neighbours on one level (`levels` says which
    each axis is of) that go from one role to one other are one axis, and only roles are gone through that are in either
    layout, repeat, or the largest dim of the others.

    Given (0, 0, 0, 0) to (1, 1, COPY, COPY), there are two axes of 4 instead of four of 2.
    """
    if source == target:
        return ()
    if len(mesh.sizes) <= FINE_AXES or min(*source, *target) < REPEAT:
        return plan(source, target, shape, mesh, price)
    runs: list[list[int]] = []
    for axis, way in enumerate(zip(source, target, levels, strict=True)):
        if runs and way == (source[runs[-1][0]], target[runs[-1][0]], levels[runs[-1][0]]):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return _Planner(runs, shape, mesh, price).plan(
        tuple(source[run[0]] for run in runs), tuple(target[run[0]] for run in runs)
    )


class _Planner:
    """
    `pcg.reshard.plan` for a few runs of axes. Sets of runs are bit masks; the lowest bit is the outermost run.
    """

    def __init__(self, runs: Sequence[Sequence[int]], shape: tuple[int, ...], mesh: Mesh, price: Price):
        self.runs = runs
        self.shape = shape
        self.price = price
        self.sizes = [prod(mesh.sizes[axis] for axis in run) for run in runs]
        self.elements = prod(shape)
        self.groups = [prod(s for i, s in enumerate(self.sizes) if mask >> i & 1) for mask in range(1 << len(runs))]
        self.prices: dict[tuple[str, int, int, bool], float] = {}

    def plan(self, source: Layout, target: Layout) -> tuple[Move, ...]:
        useful = {*source, *target, REPEAT}
        # To divide what is copied or summed for a while pays, along any dim that is free.
        free = [dim for dim in range(len(self.shape)) if dim not in useful]
        if free:
            useful.add(max(free, key=lambda dim: self.shape[dim]))
        found = self._search(source, target, sorted(useful))
        if found is None:
            raise UnityError(f"pcg: no way to reshard {list(self.shape)} from {source} to {target}")
        return found

    def _search(self, source: Layout, target: Layout, useful: Sequence[int]) -> tuple[Move, ...] | None:
        """Dijkstra over layouts, as there."""
        best: dict[Layout, float] = {source: 0.0}
        via: dict[Layout, tuple[Layout, int, int, int]] = {}
        queue: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
        tie = 0
        while queue:
            cost, _, layout = heapq.heappop(queue)
            if layout == target:
                return self._path(source, target, via)
            if cost > best[layout]:
                continue
            holders: dict[int, int] = {}
            for i, role in enumerate(layout):
                holders[role] = holders.get(role, 0) | 1 << i
            elements = self.elements // prod(self.groups[mask] for role, mask in holders.items() if role >= 0)
            for old, mask in holders.items():
                for moved in _leaving(mask, old):
                    group = self.groups[moved]
                    for new in useful:
                        if new == old:
                            continue
                        if new >= 0:
                            there = holders.get(new, 0)
                            # Pieces stay contiguous: inside those that divide the dim already.
                            if there > moved & -moved or self.shape[new] // self.groups[there] % group:
                                continue
                        total = cost + self._price(old, new, moved, elements)
                        after = tuple([new if moved >> i & 1 else role for i, role in enumerate(layout)])
                        if total < best.get(after, inf):
                            best[after] = total
                            via[after] = (layout, moved, old, new)
                            tie += 1
                            heapq.heappush(queue, (total, tie, after))
        return None

    def _price(self, old: int, new: int, moved: int, elements: int) -> float:
        kind = move_kind(old, new)
        key = (kind, moved, elements, old >= 0)
        found = self.prices.get(key)
        if found is None:
            # A free move still counts as one, so that of equal plans the shortest is taken.
            found = self.prices[key] = self.price(self._move(old, new, moved, elements)) + 1e-12
        return found

    def _move(self, old: int, new: int, moved: int, elements: int) -> Move:
        axes = tuple(axis for i, run in enumerate(self.runs) if moved >> i & 1 for axis in run)
        return Move(move_kind(old, new), axes, old, new, self.groups[moved], elements)

    def _path(
        self, source: Layout, target: Layout, via: dict[Layout, tuple[Layout, int, int, int]]
    ) -> tuple[Move, ...]:
        out: list[Move] = []
        at = target
        while at != source:
            at, moved, old, new = via[at]
            parts = prod(size for size, role in zip(self.sizes, at, strict=True) if role >= 0)
            out.append(self._move(old, new, moved, self.elements // parts))
        return tuple(out[::-1])


def _leaving(mask: int, role: int) -> Iterable[int]:
    """The sets of runs that can leave a role together: of a dim, only the innermost."""
    moved = mask
    while moved:
        yield moved
        moved = moved & (moved - 1) if role >= 0 else (moved - 1) & mask
