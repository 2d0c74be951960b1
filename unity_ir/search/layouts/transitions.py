"""
Enumerate legal moves between layouts, and find the cheapest sequences of moves (Bellman-Ford).

In a move, axes of a level change from one role to another, by one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import comb, prod

import numpy as np
import numpy.typing as npt

from unity_ir.pcg.reshard import move_kind
from unity_ir.pcg.sharding import COPY, SUM
from unity_ir.search.layouts.axes import AxisGroup, Floats, Ints, code, role_counts, role_degrees
from unity_ir.search.layouts.limits import limits


@dataclass(frozen=True, eq=False)
class Moves:
    """
    Single moves between layouts without REPEAT: each changes the role of some mesh axes, by one collective or a step on
    each device. Layouts are given by their index in `role_counts`.

    Moves of one set (the same axes, from one role to another) are contiguous; no two of a set share a source or a
    target.
    """

    degrees: Ints
    """Degrees of the layouts: [layout, role]."""
    sources: Ints
    """The layout index of each move's source: [move]."""
    targets: Ints
    """The layout index of each move's target: [move]."""
    of: Ints
    """The number of each move's set: [move]."""
    kinds: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """Per set its collective, and the devices along each level in a group."""
    lie: tuple[slice, ...]
    """Per set, the slice of its moves."""
    before: Ints
    """Per set, the factor by which a piece grows as the axes leave their dim; 1 if they shard none."""
    after: Ints
    """Per set, the factor by which a piece shrinks as the axes enter another dim; 1 if they enter none."""

    @property
    def reversed(self) -> Moves:
        """
        The same moves with sources and targets exchanged, to find distances to a layout instead of from it; the
        collectives, and the factors by which pieces grow and shrink, stay those of the original direction.
        """
        return replace(self, sources=self.targets, targets=self.sources)

    def among(self, layouts: npt.NDArray[np.bool_]) -> Moves:
        """
        Return the moves that begin and end at layouts where the mask `layouts` is True, with those layouts renumbered.
        """
        number = np.cumsum(layouts) - 1
        kept = layouts[self.sources] & layouts[self.targets]
        ends = np.cumsum(kept)
        stops = [int(ends[at.stop - 1]) for at in self.lie]
        return Moves(
            self.degrees[layouts],
            number[self.sources[kept]],
            number[self.targets[kept]],
            self.of[kept],
            self.kinds,
            tuple(slice(start, stop) for start, stop in pairwise([0, *stops])),
            self.before,
            self.after,
        )


@dataclass(frozen=True, eq=False)
class PricedMoves:
    """
    A weighted directed graph. Its `count` nodes are states (layouts, or orders of axes); its edges are moves from
    `sources` to `targets` (indices of states: [move]), which take `seconds` [move].
    """

    count: int
    sources: Ints
    targets: Ints
    seconds: Floats

    def cheapest(self, starts: Ints) -> Floats:
        """
        Return the seconds [start, state] of the cheapest sequence of moves from each state in `starts` (indices, at
        least one) to every state.

        Bellman-Ford: begin with single moves; relax all, until few sums improve; then relax only moves from the states
        that improved. The minima are the same in any order. In float32 each sum along a path may be too large by a
        factor of 1 + 2**-24.
        """
        order = np.lexsort((-self.seconds, self.targets))
        first = np.searchsorted(self.targets[order], np.arange(self.count + 1))
        into = np.diff(first)
        # States that most moves lead to come first: those that have an nth move are then a slice, which is not copied.
        states = np.argsort(-into, kind="stable")
        place = np.empty(self.count, dtype=np.int64)
        place[states] = np.arange(self.count)
        moves = [order[first[states[: np.count_nonzero(into > nth)]] + nth] for nth in range(int(into.max(initial=0)))]
        relaxed = [(place[self.sources[some]], self.seconds[some][:, None]) for some in moves]
        placed = PricedMoves(self.count, place[self.sources], place[self.targets], self.seconds)
        seconds = np.empty((len(starts), self.count), dtype=self.seconds.dtype)
        blocks = -(-self.count * len(starts) // limits().relaxed_distances)
        for some in np.array_split(np.arange(len(starts)), blocks):
            seconds[some] = placed._cheapest(place[starts[some]], relaxed)[place].T
        return seconds

    def _cheapest(self, starts: Ints, relaxed: Sequence[tuple[Ints, Floats]]) -> Floats:
        """
        Return the seconds [state, start]. `relaxed` has (sources, seconds) of the nth move to each of the first states,
        for every n.
        """
        # [target, start]: rows, which are copied, lie together.
        to_all: Floats = np.full((self.count, len(starts)), np.inf, dtype=self.seconds.dtype)
        column = np.full(self.count, -1)
        column[starts] = np.arange(len(starts))
        first = column[self.sources]
        some = first >= 0
        to_all[self.targets[some], first[some]] = self.seconds[some]
        to_all[starts, np.arange(len(starts))] = 0.0
        before, found = np.empty_like(to_all), np.empty_like(to_all)
        while relaxed:
            np.copyto(before, to_all)
            for sources, seconds in relaxed:
                targets, sums = to_all[: len(sources)], found[: len(sources)]
                # Without a mode, `take` fills a copy first.
                np.take(to_all, sources, axis=0, out=sums, mode="clip")
                sums += seconds
                np.minimum(targets, sums, out=targets)
            better = np.flatnonzero((to_all < before).reshape(-1))
            if len(better) * limits().scattered < to_all.size:
                self._relax_from(to_all.reshape(-1), better, len(starts))
                break
        return to_all

    def _relax_from(self, to_all: Floats, better: Ints, columns: int) -> None:
        """Relax moves only from the entries of [target, start], flat, that improved last, until none does."""
        order = np.argsort(self.sources, kind="stable")
        starts = np.searchsorted(self.sources[order], np.arange(self.count + 1))
        while len(better):
            row, column = np.divmod(better, columns)
            leave = starts[row + 1] - starts[row]
            first = np.repeat(starts[row] - np.cumsum(leave) + leave, leave)
            move = order[first + np.arange(len(first))]
            found = np.repeat(to_all[better], leave) + self.seconds[move]
            place = self.targets[move] * columns + np.repeat(column, leave)
            less = found < to_all[place]
            place = place[less]
            np.minimum.at(to_all, place, found[less])
            better = np.unique(place)


@lru_cache(maxsize=256)
def all_moves(groups: tuple[AxisGroup, ...], single: tuple[bool, ...]) -> Moves:
    """
    Return all single moves (collectives, or steps on each device) between layouts without REPEAT of values of rank
    `len(single)`, sizes disregarded. Layouts are indices in `role_counts(groups, rank + 2)`, whose roles are the dims,
    COPY and SUM.

    `single` says for each dim whether it is one dim (True) or stands for several that layouts do not tell apart
    (False). Mesh axes leave a single dim innermost first, and enter it inside those that shard it already; they leave
    and enter several dims in any order.
    """
    rank = len(single)
    every = role_counts(groups, rank + 2)
    names = (*range(rank), COPY, SUM)
    column = {COPY: rank, SUM: rank + 1, **{d: d for d in range(rank)}}
    number = np.full(prod(comb(g.count + rank + 1, g.count) for g in groups), -1)
    number[code(groups, every)] = np.arange(len(every))
    sources: list[Ints] = []
    targets: list[Ints] = []
    kinds: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    lie: list[slice] = []
    changes: list[tuple[int, int]] = []
    total = 0
    for amount in product(*(range(group.count + 1) for group in groups)):
        if not any(amount):
            continue
        taken = np.array(amount, dtype=np.int8)
        sizes: dict[int, int] = {}
        for axis_group, k in zip(groups, amount, strict=True):
            for level, size in axis_group.levels:
                sizes[level] = sizes.get(level, 1) * size**k
        group = prod(sizes.values())
        inner = np.arange(len(taken)) > int(np.flatnonzero(taken)[0])
        for p in names:
            holding = np.flatnonzero(np.all(every[:, :, column[p]] >= taken, axis=1))
            if p >= 0 and single[p]:
                # As `pcg.reshard.moves_from`: axes leave a dim innermost first, and enter inside those that divide it.
                holding = holding[np.all(every[holding][:, inner, p] == taken[inner], axis=1)]
            for q in names:
                if p == q:
                    continue
                source = holding
                if q >= 0 and single[q]:
                    source = source[np.all(every[source][:, inner, q] == 0, axis=1)]
                if not len(source):
                    continue
                moved = every[source]
                moved[:, :, column[p]] -= taken
                moved[:, :, column[q]] += taken
                sources.append(source)
                targets.append(number[code(groups, moved)])
                kinds.append((move_kind(p, q), tuple(sizes.items())))
                lie.append(slice(total, total + len(source)))
                changes.append((group if p >= 0 else 1, group if q >= 0 else 1))
                total += len(source)
    none = np.zeros(0, dtype=np.int64)
    return Moves(
        role_degrees(groups, rank + 2),
        np.concatenate([none, *sources]),
        np.concatenate([none, *targets]),
        np.repeat(np.arange(len(kinds)), [len(s) for s in sources]).astype(np.int64),
        tuple(kinds),
        tuple(lie),
        np.array([c[0] for c in changes], dtype=np.int64),
        np.array([c[1] for c in changes], dtype=np.int64),
    )
