"""
Plan reshards: lead a value from one layout to another by the cheapest sequence of collectives. A layout gives each mesh
axis a role: the number of the dim that it shards, SUM (its devices hold addends), COPY or REPEAT (replicas), or pinned
(only the devices at one coordinate along it hold anything).

What is priced is what is emitted: cost, search and lowering all take their moves from here. A move changes the role of
some mesh axes, all from one role to one other, by one collective in the groups they span. The backward of a move is
the move between the dual layouts, found by the same planner.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, count
from math import prod
from typing import overload

from unity_ir.errors import UnityError
from unity_ir.pcg.collectives import COLLECTIVES, KIND_BETWEEN, RoleKind
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Layout,
    Mesh,
    coordinate_of,
    is_pinned,
    is_shard,
    pinned_at,
    pins_of,
    role_class,
)


@dataclass(frozen=True, slots=True)
class Move:
    """
    One step of a reshard: a collective, or a step on each device by itself, that changes the role of the mesh axes
    `axes` from `source` to `target`.
    """

    kind: str
    """The collective's name (`pcg.collectives`)."""
    axes: tuple[int, ...]
    """Numbers of the mesh axes."""
    source: int
    """
    The role the axes had. Of pinned axes, `pinned_at(i)`, where i is the holder's position in the group (`group_role`).
    """
    target: int
    """The role they get; of pinned axes, as for `source`."""
    group: int
    """Devices in each group."""
    elements: int
    """Elements of the piece before the move, on every device."""
    border: int = 0
    """Elements of a halo, which a device between two others receives; 0 for other moves."""
    pins: tuple[tuple[int, int], ...] = ()
    """Other axes that are pinned meanwhile, and where: only devices there take part."""

    def groups(self, mesh: Mesh) -> int:
        """Return the number of groups of devices that make this move at the same time, each group by itself."""
        return mesh.devices // self.group // prod(mesh.sizes[i] for i, _ in self.pins)

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        """Return the layout of the value after the move, given the `layout` before it."""
        out, role = list(layout), self.target
        if is_pinned(role):
            for axis, pinned in zip(self.axes, _spelled(role, self.axes, mesh), strict=True):
                out[axis] = pinned
        else:
            for axis in self.axes:
                out[axis] = role
        return tuple(out)

    @property
    def elements_after(self) -> int:
        """The number of elements of a device's piece after the move."""
        if self.border:
            return self.elements + (self.border if self.kind == "halo" else -self.border)
        whole = self.elements * (self.group if is_shard(self.source) else 1)
        return whole // (self.group if is_shard(self.target) else 1)

    def traffic(self, mesh: Mesh) -> int:
        """
        Return the number of elements that all devices of all groups receive together, if the collective is done as a
        ring.
        """
        received = COLLECTIVES[self.kind].received
        each = 0 if received is None else received(self.group, self.border or self.elements)
        return each * self.groups(mesh)


@overload
def sum_over(moves: Sequence[tuple[Move, str]], of: Callable[[Move, str], int]) -> int: ...
@overload
def sum_over(moves: Sequence[tuple[Move, str]], of: Callable[[Move, str], float]) -> float: ...
def sum_over(moves: Sequence[tuple[Move, str]], of: Callable[[Move, str], float]) -> float:
    """
    Return the sum of the numbers `of(move, dtype)` over `moves`, pairs of a move and the element type (such as `f32`)
    that it moves. A pair that is there several times as the same object, such as a move of each micro-batch, counts as
    often, but `of` is called for it only once.
    """
    found = {key: of(*pair) for key, pair in {id(pair): pair for pair in moves}.items()}
    return sum(found[id(pair)] for pair in moves)


@cache
def move_kind(source: int, target: int) -> str:
    """
    Return the name of the collective that changes a mesh axis from role `source` to role `target`: given SUM to COPY,
    `all_reduce`. The roles must differ.
    """
    return KIND_BETWEEN[role_kind(source), role_kind(target)]


def role_kind(role: int) -> RoleKind:
    """
    Return the kind of a role, which determines a move's collective: `shard` (of any dim), `partial` (SUM), `pinned`, or
    `replicate` (COPY, REPEAT).
    """
    if is_shard(role):
        return "shard"
    return "partial" if role == SUM else "pinned" if is_pinned(role) else "replicate"


Price = Callable[[Move], float]
"""Seconds of a move."""


def _spelled(role: int, axes: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Return `pinned_at` each axis's own coordinate, given `pinned_at` the position in their group."""
    position, out = coordinate_of(role), list[int]()
    for axis in reversed(axes):
        position, coordinate = divmod(position, mesh.sizes[axis])
        out.append(pinned_at(coordinate))
    return tuple(reversed(out))


def group_role(layout: Layout, axes: tuple[int, ...], mesh: Mesh) -> int:
    """
    Return the role of the mesh axes `axes` (numbers) in a layout, in which they all have the same one.

    For pinned axes it is `pinned_at(i)`, where i is the index, among the devices along `axes`, of the one that holds
    the value.
    """
    if not is_pinned(layout[axes[0]]):
        return layout[axes[0]]
    position = 0
    for axis in axes:
        position = position * mesh.sizes[axis] + coordinate_of(layout[axis])
    return pinned_at(position)


def moves_from(
    layout: Layout, shape: tuple[int, ...], mesh: Mesh, towards: Layout = ()
) -> Iterator[tuple[Move, Layout]]:
    """
    Yield every move that can start from a layout, as (move, layout after it). `shape` is the value's global shape.

    Axes become pinned (the value is gathered or sent to the devices at one coordinate) only if `towards`, the layout to
    reach, pins them, and only at its coordinates; with () none do. Pieces stay contiguous: the innermost axis of a
    sharded dim leaves it first, and a new axis divides the dim inside those that do already.
    """
    pinned, wanted = pins_of(layout), pins_of(towards)
    piece = [s // prod(m for m, r in zip(mesh.sizes, layout, strict=True) if r == d) for d, s in enumerate(shape)]
    elements = prod(piece)
    classes = [role_class(r) for r in layout]
    for held in sorted(set(classes)):
        holders = [i for i, r in enumerate(classes) if r == held]
        for axes in (a for k in range(1, len(holders) + 1) for a in combinations(holders, k)):
            if is_shard(held) and axes != tuple(holders[-len(axes) :]):
                continue
            source = group_role(layout, axes, mesh)
            aside = tuple(pin for pin in pinned if pin[0] not in axes)
            ends = {i for i, _ in wanted}.issuperset(axes)
            group = prod(mesh.sizes[i] for i in axes)
            for target in (*range(len(shape)), COPY, SUM, REPEAT, *([group_role(towards, axes, mesh)] if ends else [])):
                if target == source:
                    continue
                if is_shard(target):
                    inner = max((i for i, r in enumerate(layout) if r == target), default=-1)
                    if piece[target] % group or inner > axes[0]:
                        continue
                move = Move(move_kind(source, target), axes, source, target, group, elements, pins=aside)
                yield move, move.after(layout, mesh)


@lru_cache(maxsize=4096)
def _moves(layout: Layout, shape: tuple[int, ...], mesh: Mesh, towards: Layout) -> tuple[tuple[Move, Layout], ...]:
    """`moves`, remembered: the same layouts are left on the ways between many."""
    return tuple(moves_from(layout, shape, mesh, towards))


def cheapest_moves(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    price: Price,
) -> tuple[Move, ...]:
    """
    Return the moves, in order, that bring a value from layout `source` to layout `target` in the fewest seconds; () if
    the layouts are equal. `price(move)` returns a move's seconds. Of equally fast sequences, the shortest is taken
    (Dijkstra over layouts).

    `shape` is the global shape of the value. Raises `UnityError` if there are none, which is so only if mesh axes do
    not divide the shape.
    """
    if source == target:
        return ()
    tie = count()
    best = {source: 0.0}
    via: dict[Layout, tuple[Layout, Move]] = {}
    queue: list[tuple[float, int, Layout]] = [(0.0, next(tie), source)]
    towards = target if pins_of(target) else ()
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout == target:
            return tuple(_path(source, target, via))
        if cost > best[layout]:
            continue
        for move, after in _moves(layout, shape, mesh, towards):
            # A free move still counts as one, so that of equal plans the shortest is taken.
            total = cost + price(move) + 1e-12
            if total < best.get(after, float("inf")):
                best[after] = total
                via[after] = (layout, move)
                heapq.heappush(queue, (total, next(tie), after))
    raise UnityError(f"pcg: no way to reshard {list(shape)} from {source} to {target}")


def _path(source: Layout, target: Layout, via: dict[Layout, tuple[Layout, Move]]) -> list[Move]:
    path: list[Move] = []
    at = target
    while at != source:
        at, move = via[at]
        path.append(move)
    return path[::-1]
