"""
Plans reshards on a coarser mesh: neighbouring axes whose roles change alike move together, as one *run*. A role is what
a mesh axis does in a layout: shard a dim, or hold addends (SUM) or replicas (COPY, REPEAT).

The cost of a plan depends only on the sizes of the runs, their roles (up to a renaming of dims) and the number of
elements; not on COPY versus REPEAT, between which moves are free, and of pinned axes only on whether they are where
they should be. So reshards are reduced to canonical problems, solved once each; problems with the same start share one
incremental Dijkstra search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, inf, prod

from unity_ir.errors import UnityError
from unity_ir.pcg.reshard import Move, Price, group_role, move_kind
from unity_ir.pcg.sharding import (
    COPY,
    PINNED,
    REPEAT,
    SUM,
    Layout,
    Mesh,
    is_pinned,
    is_shard,
    pins_of,
    role_class,
    shard_count,
)

FINE_AXES = 3
"""Plan axis by axis on meshes of at most 3 axes: the number of layouts grows exponentially with the axes."""

Runs = tuple[tuple[int, ...], ...]

RunMove = tuple[int, int, int, int]
"""A move between states: the state after it, what its price is found by, the runs that move, the digit they get."""


def plan_coarsely(
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    levels: Sequence[int],
    price: Price,
    memo: RunMemo | None = None,
) -> tuple[Move, ...]:
    """
    Return the cheapest moves, in order, that bring a value from layout `source` to layout `target` (a move is a
    collective, or a step on each device by itself). Faster than `pcg.reshard.cheapest_moves`, since it plans on a
    coarser mesh; the moves it finds may cost more. They name the axes of `mesh` itself.

    `shape` is the value's global shape; `levels` has, for each mesh axis, the number of its machine level (0: the
    outermost); `price(move)` returns a move's seconds. On a mesh of more than `FINE_AXES` axes, neighbouring axes of
    one level that change from the same role to the same role are planned as one axis: a change of four axes of size 2
    from (0, 0, 0, 0) to (1, 1, COPY, COPY) is planned on two axes of size 4. Layouts in between then use only the dims
    of the two layouts and the largest other dim.

    `memo` caches results between calls, for one mesh, element type and price (None: no cache). Raises `UnityError` if
    no moves lead to `target`.
    """
    if source == target:
        return ()
    fine = len(mesh.sizes) <= FINE_AXES
    runs = tuple((axis,) for axis in range(len(mesh.sizes))) if fine else runs_of(source, target, levels)
    memo = {} if memo is None else memo
    space = memo.get(runs)
    if space is None:
        space = memo[runs] = _Space(runs, mesh, price)
    used = dict.fromkeys(role for role in (*source, *target) if is_shard(role))
    # To divide what is copied or summed for a while pays, along any dim that is free.
    others = [dim for dim in range(len(shape)) if dim not in used and gcd(shape[dim], mesh.devices) > 1]
    others.sort(key=lambda dim: -shape[dim])
    dims = (*used, *(others if fine else others[:1]))
    return space.plan(source, target, shape, dims)


def runs_of(source: Layout, target: Layout, levels: Sequence[int]) -> Runs:
    """
    Return the mesh axes in runs: neighbours of one level whose roles change alike from a layout to another. All
    coordinates of a pinned axis count as one. `levels` has the number of each axis's machine level.

    Planning takes some ten times as long with each run.
    """
    runs: list[list[int]] = []
    ways = [(role_class(a), role_class(b), level) for a, b, level in zip(source, target, levels, strict=True)]
    for axis, way in enumerate(ways):
        if axis and way == ways[axis - 1]:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return tuple(map(tuple, runs))


class _Space:
    """
    The states of some runs: digits, one per run, the first the least. Sets of runs are bit masks likewise.

    With d dims, a digit below d is a dim's, then come `held` (COPY or REPEAT), `sum`, `away` (pinned where the target
    is not), and `there` (pinned where it is).
    """

    def __init__(self, runs: Runs, mesh: Mesh, price: Price):
        self.runs = runs
        self.mesh = mesh
        self.price = price
        masks = range(1 << len(runs))
        self.axes = [tuple(a for i, run in enumerate(runs) if mask >> i & 1 for a in run) for mask in masks]
        self.groups = [prod(mesh.sizes[a] for a in axes) for axes in self.axes]
        self.prices: dict[int, dict[int, float]] = {}
        """The prices of moves, by elements, then by kind and runs."""
        self.steps: dict[tuple[tuple[int, ...], int], _Steps] = {}

    def plan(self, source: Layout, target: Layout, shape: tuple[int, ...], dims: Sequence[int]) -> tuple[Move, ...]:
        """
        Return the moves of the cheapest path between two layouts, in terms of the mesh axes; `dims` are the dims it may
        use.
        """
        number = {dim: i for i, dim in enumerate(dims)}
        held, away, there = len(dims), len(dims) + 2, len(dims) + 3
        number[COPY] = number[REPEAT] = held
        number[SUM] = held + 1
        start = goal = wanted = 0
        one, base = 1, len(dims) + 4
        for i, run in enumerate(self.runs):
            a, b = source[run[0]], target[run[0]]
            if is_pinned(b):
                wanted |= 1 << i
                goal += one * there
                same = all(source[axis] == target[axis] for axis in run)
            else:
                goal += one * number[b]
                same = False
            start += one * (number[a] if not is_pinned(a) else there if same else away)
            one *= base
        divisors = tuple(gcd(shape[dim], self.mesh.devices) for dim in dims)
        steps = self.steps.get((divisors, wanted))
        if steps is None:
            steps = self.steps[divisors, wanted] = _Steps(self, divisors, wanted)
        path = steps.path(start, goal, prod(shape))
        if path is None:
            raise UnityError(f"pcg: no way to reshard {list(shape)} from {source} to {target}")
        return self._spell(path, source, target, shape, dims)

    def priced(self, key: int, elements: int) -> float:
        """Return the seconds of a move, by its kind and runs, on pieces of `elements` elements."""
        known = self.prices.setdefault(elements, {})
        found = known.get(key)
        if found is None:
            kind, mask = divmod(key, len(self.groups))
            old, new = divmod(kind, 4)
            source, target = _ROLES[old], _ROLES[new] if old or new else 1
            move = Move(move_kind(source, target), self.axes[mask], source, target, self.groups[mask], elements)
            # A free move still counts as one, so that of equal plans the shortest is taken.
            found = known[key] = self.price(move) + 1e-12
        return found

    def _spell(
        self, path: Sequence[RunMove], source: Layout, target: Layout, shape: tuple[int, ...], dims: Sequence[int]
    ) -> tuple[Move, ...]:
        """
        Return the moves of a path, on mesh axes.

        Values that all devices hold are repeated, except for those that a move copies from then on to the end.
        """
        out: list[Move] = []
        now = source
        moving = [mask for _, _, mask, _ in path]
        for i, (_, _, mask, digit) in enumerate(path):
            axes = self.axes[mask]
            later = 0
            for other in moving[i + 1 :]:
                later |= other
            if COPY in (roles := {role_class(now[a]) for a in axes}) and len(roles) > 1:
                now = self._move(out, now, tuple(a for a in axes if now[a] == COPY), REPEAT, shape)
            if digit == len(dims):
                copied = not mask & later and all(target[a] == COPY for a in axes)
                role = COPY if copied else REPEAT
            else:
                role = dims[digit] if digit < len(dims) else SUM if digit == len(dims) + 1 else PINNED
            if is_pinned(role):
                role = group_role(target, axes, self.mesh)
            now = self._move(out, now, axes, role, shape)
        for old, new in ((REPEAT, COPY), (COPY, REPEAT)):
            if axes := tuple(a for a, r in enumerate(now) if r == old and target[a] == new):
                now = self._move(out, now, axes, new, shape)
        return tuple(out)

    def _move(self, out: list[Move], now: Layout, axes: tuple[int, ...], role: int, shape: tuple[int, ...]) -> Layout:
        sizes = self.mesh.sizes
        elements = prod(shape) // shard_count(now, sizes)
        old = group_role(now, axes, self.mesh)
        aside = tuple(pin for pin in pins_of(now) if pin[0] not in axes)
        group = prod(sizes[a] for a in axes)
        move = Move(move_kind(old, role), axes, old, role, group, elements, pins=aside)
        out.append(move)
        return move.after(now, self.mesh)


_ROLES = (0, REPEAT, SUM, PINNED)
"""The roles that prices distinguish: shard, replicate, partial, pinned."""


class _Steps:
    """The moves between the states of runs, for dims that may be divided so often, some runs to be pinned."""

    def __init__(self, space: _Space, divisors: tuple[int, ...], wanted: int):
        self.space = space
        self.divisors = divisors
        self.wanted = wanted
        self.base = len(divisors) + 4
        runs = len(space.runs)
        # What adding 1 to the digits of a set of runs adds to a state.
        self.ones = [sum(self.base**i for i in range(runs) if mask >> i & 1) for mask in range(1 << runs)]
        self.kinds = [_kind(digit, len(divisors)) for digit in range(self.base)]
        self.edges: dict[int, tuple[int, list[RunMove]]] = {}
        self.trees: dict[tuple[int, int], _Tree] = {}

    def path(self, start: int, goal: int, elements: int) -> list[RunMove] | None:
        """Return the edges of the cheapest path (Dijkstra), or None where there is none."""
        tree = self.trees.get((start, elements))
        if tree is None:
            tree = self.trees[start, elements] = _Tree({start: 0.0}, [(0.0, start)])
        if goal not in tree.done:
            self._search(tree, goal, elements)
            if goal not in tree.done:
                return None
        out: list[RunMove] = []
        while goal != start:
            goal, edge = tree.via[goal]
            out.append(edge)
        return out[::-1]

    def _search(self, tree: _Tree, goal: int, elements: int) -> None:
        """Resume the search of a tree until the goal is settled."""
        best, queue, done, via = tree.best, tree.queue, tree.done, tree.via
        push, pop = heapq.heappush, heapq.heappop
        while queue:
            cost, state = pop(queue)
            if state in done:
                continue
            done.add(state)
            found = self.edges.get(state)
            if found is None:
                found = self.edges[state] = self._edges(state)
            parts, edges = found
            piece = elements // parts
            prices = self.space.prices.setdefault(piece, {})
            for edge in edges:
                after, key, _, _ = edge
                known = best.get(after, inf)
                if known <= cost:
                    continue
                priced = prices.get(key)
                if priced is None:
                    priced = self.space.priced(key, piece)
                total = cost + priced
                if total < known:
                    best[after] = total
                    via[after] = (state, edge)
                    push(queue, (total, after))
            if state == goal:
                return

    def _edges(self, state: int) -> tuple[int, list[RunMove]]:
        """Return the number of shards a state divides a value into, and all moves that can start from it."""
        space, count = self.space, len(self.divisors)
        groups, ones = space.groups, self.ones
        holders = [0] * self.base
        rest = state
        for i in range(len(space.runs)):
            rest, digit = divmod(rest, self.base)
            holders[digit] |= 1 << i
        held, away, there = count, count + 2, count + 3
        parts = prod(groups[mask] for mask in holders[:count])
        dims = [(new, holders[new], self.divisors[new] // groups[holders[new]]) for new in range(count)]
        others = [(new, self.kinds[new] * len(groups)) for new in (held, held + 1)]
        at_pin = self.kinds[there] * len(groups)
        out: list[RunMove] = []
        for digit in (*range(count), held, held + 1, away):
            mask = holders[digit] | (holders[there] if digit == away else 0)
            old = self.kinds[digit] * 4 * len(groups)
            for moved in _leaving(mask, digit < count):
                one, key = ones[moved], old + moved
                group, inner = groups[moved], moved & -moved
                left = state - one * digit - (ones[moved & holders[there]] if digit == away else 0)
                for new, already, size in dims:
                    # Pieces stay contiguous: inside those that divide the dim already.
                    if new != digit and already <= inner and not size % group:
                        out.append((left + one * new, key, moved, new))
                for new, kind in others:
                    if new != digit:
                        out.append((left + one * new, key + kind, moved, new))
                if not moved & ~self.wanted and (digit != away or moved & holders[away]):
                    out.append((left + one * there, key + at_pin, moved, there))
        return parts, out


def _kind(digit: int, dims: int) -> int:
    """Return the place of a digit's role in `_ROLES`."""
    return 0 if digit < dims else min(digit - dims + 1, 3)


@dataclass(slots=True)
class _Tree:
    """The shortest-path tree from one state, as far as it has been searched."""

    best: dict[int, float]
    queue: list[tuple[float, int]]
    done: set[int] = field(default_factory=set[int])
    via: dict[int, tuple[int, RunMove]] = field(default_factory=dict[int, tuple[int, RunMove]])


def _leaving(mask: int, divided: bool) -> Iterable[int]:
    """Yield the sets of runs that can leave a role together; only the innermost runs can leave a dim."""
    moved = mask
    while moved:
        yield moved
        moved = moved & (moved - 1) if divided else (moved - 1) & mask


RunMemo = dict[Runs, _Space]
"""The planner's caches per set of runs."""
