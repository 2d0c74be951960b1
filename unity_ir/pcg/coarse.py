"""Planning on a coarser mesh: neighbouring axes that go the same way go together."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import gcd, inf, prod

from unity_ir.errors import UnityError
from unity_ir.pcg.layout import COPY, PINNED, REPEAT, Layout, Mesh, pins
from unity_ir.pcg.reshard import Move, Price, group_role, move_kind, plan

FINE_AXES = 3
"""Meshes of up to so many axes are planned axis by axis. The number of layouts grows exponentially with the axes."""


Memo = dict[tuple[int, tuple[int, ...], Layout, Layout], tuple[Move, ...]]
"""Plans by elements, divisors of the dims, source and target, of one machine and element type."""


def plan_coarsely(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    levels: Sequence[int],
    price: Price,
    memo: Memo | None = None,
) -> tuple[Move, ...]:
    """
    As `pcg.reshard.plan`, but on a mesh of more than `FINE_AXES` axes, neighbours on one level (`levels` says which
    each axis is of) that go from one role to one other are one axis, and only roles are gone through that are in either
    layout, repeat, or the largest dim of the others.

    Given (0, 0, 0, 0) to (1, 1, COPY, COPY), there are two axes of 4 instead of four of 2. In `memo` plans are kept
    that are alike but for the dims' order and sizes.
    """
    if source == target:
        return ()
    if len(mesh.sizes) <= FINE_AXES:
        return plan(source, target, shape, mesh, price)
    if pins(source) or pins(target):
        return _plan_pinned(source, target, shape, mesh, levels, price)
    used = list(dict.fromkeys(role for role in (*source, *target) if role >= 0))
    # To divide what is copied or summed for a while pays, along any dim that is free.
    free = max((dim for dim in range(len(shape)) if dim not in used), key=lambda dim: shape[dim], default=None)
    dims = used if free is None else [*used, free]
    number = {dim: i for i, dim in enumerate(dims)}
    begin = tuple(number.get(role, role) for role in source)
    end = tuple(number.get(role, role) for role in target)
    key = (prod(shape), tuple(gcd(shape[dim], mesh.devices) for dim in dims), begin, end)
    found = None if memo is None else memo.get(key)
    if found is None:
        found = _plan_runs(*key, mesh, levels, price)
        if memo is not None:
            memo[key] = found
    back = dict(enumerate(dims))
    return tuple(replace(m, source=back.get(m.source, m.source), target=back.get(m.target, m.target)) for m in found)


def _plan_runs(
    elements: int,
    divisors: tuple[int, ...],
    source: Layout,
    target: Layout,
    mesh: Mesh,
    levels: Sequence[int],
    price: Price,
) -> tuple[Move, ...]:
    runs = _runs(source, target, levels)
    return _Planner(runs, elements, divisors, mesh, price).plan(
        tuple(source[run[0]] for run in runs), tuple(target[run[0]] for run in runs)
    )


def _runs(source: Layout, target: Layout, levels: Sequence[int]) -> list[list[int]]:
    """Neighbouring axes of one level that go the same way; all pinned roles are one."""
    runs: list[list[int]] = []
    ways = [(max(a, PINNED), max(b, PINNED), level) for a, b, level in zip(source, target, levels, strict=True)]
    for axis, way in enumerate(ways):
        if axis and way == ways[axis - 1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _plan_pinned(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, levels: Sequence[int], price: Price
) -> tuple[Move, ...]:
    """The same by the general planner, on the coarser mesh."""
    runs = _runs(source, target, levels)
    coarse = Mesh(tuple(prod(mesh.sizes[axis] for axis in run) for run in runs))

    def fine(move: Move) -> Move:
        """The pin of a run is that of its axes in mixed radix, as a move has it."""
        aside = [(axis, at) for run, pin in move.pins for axis, at in _spelled(runs[run], pin, mesh)]
        return replace(move, axes=tuple(axis for run in move.axes for axis in runs[run]), pins=tuple(aside))

    begin, end = (tuple(group_role(layout, tuple(run), mesh) for run in runs) for layout in (source, target))
    useful = {*(max(role, PINNED) for role in (*source, *target)), PINNED, REPEAT}

    def fine_price(move: Move) -> float:
        return price(fine(move)) if max(move.target, PINNED) in useful else inf

    return tuple(map(fine, plan(begin, end, shape, coarse, fine_price)))


def _spelled(run: Sequence[int], position: int, mesh: Mesh) -> list[tuple[int, int]]:
    """The axes of a run with their coordinates at a position in it."""
    out: list[tuple[int, int]] = []
    for axis in reversed(run):
        position, coordinate = divmod(position, mesh.sizes[axis])
        out.append((axis, coordinate))
    return out[::-1]


class _Planner:
    """
    `pcg.reshard.plan` for a few runs of axes. Sets of runs are bit masks; the lowest bit is the outermost run.
    """

    def __init__(self, runs: Sequence[Sequence[int]], elements: int, divisors: Sequence[int], mesh: Mesh, price: Price):
        self.runs = runs
        self.divisors = divisors
        self.price = price
        self.sizes = [prod(mesh.sizes[axis] for axis in run) for run in runs]
        self.elements = elements
        self.groups = [prod(s for i, s in enumerate(self.sizes) if mask >> i & 1) for mask in range(1 << len(runs))]

    def plan(self, source: Layout, target: Layout) -> tuple[Move, ...]:
        """
        Dijkstra over layouts, as there. A layout is a number: its roles, by their place in `roles`, are the digits.

        What is not wanted in copies at the end does not pass through them: to repeat it is no dearer.
        """
        runs = len(self.runs)
        roles = sorted({*source, *target, REPEAT, *range(len(self.divisors))})
        base = len(roles)
        # What adding 1 to the digits of a set of runs adds to a number.
        ones = [sum(base**i for i in range(runs) if mask >> i & 1) for mask in range(1 << runs)]
        copied = sum(1 << i for i, role in enumerate(target) if role == COPY)
        start, goal = (sum(roles.index(r) * base**i for i, r in enumerate(layout)) for layout in (source, target))
        best = {start: 0.0}
        via: dict[int, tuple[int, Move]] = {}
        queue = [(0.0, 0, start)]
        prices: dict[tuple[int, int, int, int], tuple[float, Move]] = {}
        tie = 0
        while queue:
            cost, _, layout = heapq.heappop(queue)
            if layout == goal:
                return _path(start, goal, via)
            if cost > best[layout]:
                continue
            holders = [0] * base
            rest = layout
            for i in range(runs):
                rest, digit = divmod(rest, base)
                holders[digit] |= 1 << i
            elements = self.elements
            for role, mask in zip(roles, holders, strict=True):
                if role >= 0:
                    elements //= self.groups[mask]
            for i, mask in enumerate(holders):
                for moved in _leaving(mask, roles[i]):
                    group, one, inner = self.groups[moved], ones[moved], moved & -moved
                    for j, new in enumerate(roles):
                        if i == j:
                            continue
                        after = layout + (j - i) * one
                        if best.get(after, inf) <= cost:
                            continue
                        if new >= 0:
                            # Pieces stay contiguous: inside those that divide the dim already.
                            there = holders[j]
                            if there > inner or self.divisors[new] // self.groups[there] % group:
                                continue
                        elif new == COPY and moved & ~copied:
                            continue
                        key = (i, j, moved, elements)
                        priced = prices.get(key)
                        if priced is None:
                            move = self._move(roles[i], new, moved, elements)
                            # A free move still counts as one, so that of equal plans the shortest is taken.
                            priced = prices[key] = (self.price(move) + 1e-12, move)
                        total = cost + priced[0]
                        if total < best.get(after, inf):
                            best[after] = total
                            via[after] = (layout, priced[1])
                            tie += 1
                            heapq.heappush(queue, (total, tie, after))
        raise UnityError(f"pcg: no way to reshard {self.elements} elements from {source} to {target}")

    def _move(self, old: int, new: int, moved: int, elements: int) -> Move:
        axes = tuple(axis for i, run in enumerate(self.runs) if moved >> i & 1 for axis in run)
        return Move(move_kind(old, new), axes, old, new, self.groups[moved], elements)


def _path(start: int, goal: int, via: Mapping[int, tuple[int, Move]]) -> tuple[Move, ...]:
    out: list[Move] = []
    while goal != start:
        goal, move = via[goal]
        out.append(move)
    return tuple(out[::-1])


def _leaving(mask: int, role: int) -> Iterable[int]:
    """The sets of runs that can leave a role together: of a dim, only the innermost."""
    moved = mask
    while moved:
        yield moved
        moved = moved & (moved - 1) if role >= 0 else (moved - 1) & mask
