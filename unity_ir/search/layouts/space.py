"""Enumerate the layouts of a value and compute the distances between them: shortest paths over legal moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import comb, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from unity_ir.machine.model import Machine
from unity_ir.pcg.node import Value
from unity_ir.pcg.sharding import COPY, REPEAT, SUM
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.layouts.axes import (
    AxisGroup,
    Counts,
    Floats,
    Ints,
    Singles,
    code,
    count_equal_axes,
    group_axes,
    role_counts,
    role_degrees,
)
from unity_ir.search.layouts.exchanged import exchange_rows
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.transitions import Moves, PricedMoves, all_moves
from unity_ir.tdl.syntax import NOT_FLOATING

FREE_MOVE = 1e-12
"""Seconds charged for a free move, so that of equal plans the one with fewer moves wins, as in the planner."""


def _columns(table: Floats, rows: Ints, columns: Ints) -> Floats:
    """Return `table` at [rows, columns], gathering along contiguous memory."""
    if len(rows) > len(table):
        return np.take(table, columns, axis=1)[rows]
    return np.take(table[rows], columns, axis=1)


@dataclass(frozen=True, eq=False)
class _Layouts:
    """
    The layouts of a `LayoutSpace` and the moves between them, without their seconds: the same for all shapes that the
    same degrees divide. `single` says of each dim whether it is one dim, or stands for several.
    """

    groups: tuple[AxisGroup, ...]
    single: tuple[bool, ...]
    counts: Counts
    degrees: Ints
    fits: npt.NDArray[np.bool_]
    """Which of all choices of roles the layouts are."""

    @cached_property
    def numbers(self) -> Ints:
        """The number of each layout by its `code`; -1 where there is none."""
        roles = len(self.single) + 3
        out = np.full(prod(comb(g.count + roles - 1, g.count) for g in self.groups), -1)
        out[code(self.groups, self.counts)] = np.arange(len(self.counts))
        return out

    def find(self, counts: Counts) -> Ints:
        """Return the numbers of layouts, as `LayoutSpace.find` does."""
        return self.numbers[code(self.groups, counts)]

    @cached_property
    def duals(self) -> Ints:
        """As `LayoutSpace.duals`."""
        swapped = self.counts.copy()
        c = len(self.single)
        swapped[:, :, [c, c + 1]] = swapped[:, :, [c + 1, c]]
        return self.find(swapped)

    @cached_property
    def without_repeat(self) -> Ints:
        """The layouts without REPEAT, as representatives: moves between REPEAT and COPY are free."""
        return np.flatnonzero(np.all(self.counts[:, :, -1] == 0, axis=1))

    def _standing_for(self, counts: Counts) -> Ints:
        number = np.full(len(self.counts), -1)
        number[self.without_repeat] = np.arange(len(self.without_repeat))
        counts[:, :, len(self.single)] += counts[:, :, -1]
        counts[:, :, -1] = 0
        return number[self.find(counts)]

    @cached_property
    def there(self) -> Ints:
        """The index in `without_repeat` of each layout's representative."""
        return self._standing_for(self.counts.copy())

    @cached_property
    def back(self) -> Ints:
        """The index in `without_repeat` of the representative of each layout's dual."""
        return self._standing_for(self.counts[self.duals].copy())

    @cached_property
    def moves(self) -> Moves:
        """All moves between representatives."""
        moves = all_moves(self.groups, self.single)
        # Those of all layouts are between layouts without REPEAT, in the same order.
        fits = self.fits[np.all(role_counts(self.groups, len(self.single) + 3)[:, :, -1] == 0, axis=1)]
        return moves if fits.all() else moves.among(fits)


@lru_cache(maxsize=64)
def _layouts(groups: tuple[AxisGroup, ...], single: tuple[bool, ...], fitting: bytes) -> _Layouts:
    """Return the layouts that are those choices of roles for which the mask `fitting` is True."""
    fits = np.frombuffer(fitting, dtype=bool)
    roles = len(single) + 3
    return _Layouts(groups, single, role_counts(groups, roles)[fits], role_degrees(groups, roles)[fits], fits)


class LayoutSpace:
    """
    All layouts that a value of one shape may have on a machine, numbered, and the seconds of moving between any two. A
    layout gives each mesh axis a role: its devices hold shards of a dim, addends (SUM), replicas that do different
    work, whose gradients are added (COPY), or replicas that all do the same work (REPEAT).

    A layout is a row of `counts` [layout, group, role]; the columns of roles are the dims, then COPY, SUM, REPEAT.
    """

    def __init__(
        self,
        machine: Machine,
        groups: tuple[AxisGroup, ...],
        shape: tuple[int, ...],
        dtype: str,
        merged: tuple[int, ...] | None = None,
        gradient: LayoutSpace | None = None,
    ):
        """
        Merge dims with equal numbers in `merged`; moving between merged dims is free.

        `gradient` is the space of the same layouts at the gradient's element type, if that is another one.
        """
        self.machine = machine
        self.gradient = gradient or self
        """The same layouts, with the seconds of moving the value's gradient."""
        self.groups = groups
        self.merged = tuple(range(len(shape))) if merged is None else merged
        self.rank = max(self.merged, default=-1) + 1
        shape = tuple(prod(s for s, m in zip(shape, self.merged, strict=True) if m == d) for d in range(self.rank))
        self.shape = shape
        self.dtype = dtype
        self.item = ELEMENT_BYTES[dtype]
        self.roles = self.rank + 3
        degrees = role_degrees(groups, self.roles)
        fits = np.all(np.array(shape, dtype=np.int64) % degrees[:, : self.rank] == 0, axis=1)
        if dtype in NOT_FLOATING:
            fits &= degrees[:, self.role(SUM)] == 1
        self._layouts = _layouts(groups, tuple(self.merged.count(d) == 1 for d in range(self.rank)), fits.tobytes())
        self.counts: Counts = self._layouts.counts
        self.degrees: Ints = self._layouts.degrees

    def role(self, role: int) -> int:
        """
        Return the index of a role in the last dim of `counts` [layout, group of axes, role]. `role` is the number of a
        dim, or COPY, SUM or REPEAT. Dims that layouts do not tell apart (`merged`) have the same index.
        """
        return self.merged[role] if role >= 0 else self.rank + {COPY: 0, SUM: 1, REPEAT: 2}[role]

    def __len__(self) -> int:
        return len(self.counts)

    def find(self, counts: Counts) -> Ints:
        """
        Return the numbers of the layouts that are given by `counts` [way, group of axes, role], how many axes of each
        group have each role: [way]. The number is -1 for a way that is no layout of this space, as degrees do not
        divide the shape or integers would be in partial sums.
        """
        return self._layouts.find(counts)

    @cached_property
    def elements(self) -> Floats:
        """Elements of a device's piece in each layout: [layout]."""
        total = float(np.prod([float(s) for s in self.shape]))
        return total / np.prod(self.degrees[:, : self.rank], axis=1)

    @cached_property
    def bytes(self) -> Floats:
        """Bytes of a device's piece in each layout: [layout]."""
        return self.elements * self.item

    @property
    def duals(self) -> Ints:
        """
        The number of each layout's dual (COPY and SUM swapped), which is the layout of the gradient: [layout]; -1 where
        integers would be in partial sums.
        """
        return self._layouts.duals

    @cached_property
    def forward(self) -> Floats:
        """
        Seconds [source, target] of the cheapest sequence of collectives between every two layouts. Computed once, so it
        must not be changed.
        """
        every = np.arange(len(self))
        return self.reshard(every, every, False)

    @cached_property
    def training(self) -> Floats:
        """
        Seconds [source, target] of the cheapest moves of a value from layout to layout and of its gradient back,
        between their duals (COPY and SUM swapped). Computed once, so it must not be changed.
        """
        every = np.arange(len(self))
        return self.reshard(every, every, True)

    def reshard(self, sources: Ints, targets: Ints, training: bool) -> Floats:
        """
        Return seconds [source, target] of the cheapest sequence of collectives between layouts given by number.

        `training` adds the moves of the gradient in the other direction, from the target's dual to the source's.
        Between different layouts even a free move costs `FREE_MOVE`.
        """
        there, back = self._there, self._back
        seconds = _columns(self._cheapest, there[sources], there[targets])
        if training:
            all_home = self.gradient._home
            home = np.take(all_home, back[targets], axis=1) if len(sources) > len(all_home) else None
            rows = max(1, limits().cached_distances // max(1, len(targets)))
            for start in range(0, len(sources), rows):
                at = slice(start, start + rows)
                some = back[sources[at]]
                seconds[at] += np.take(all_home[some], back[targets], axis=1) if home is None else home[some]
        # Going by another name counts as a free move: pairs of layouts that stand for the same.
        order = np.argsort(there[targets], kind="stable")
        ends = np.searchsorted(there[targets][order], [there[sources], there[sources] + 1])
        many = ends[1] - ends[0]
        source = np.repeat(np.arange(len(sources)), many)
        target = order[np.arange(len(source)) + np.repeat(ends[0] - np.cumsum(many) + many, many)]
        seconds[source, target] += FREE_MOVE * (sources[source] != targets[target])
        return seconds

    def reshard_from_few(self, sources: Ints, training: bool) -> Floats:
        """
        Return seconds [source, layout] of the cheapest moves from few layouts, given by number, to every layout.

        Equal to `reshard` to all layouts, but computes no distances from other layouts.
        """
        some, at = np.unique(self._there[sources], return_inverse=True)
        own, back = np.unique(self._back[sources], return_inverse=True)
        n = len(self._without_repeat)
        if "_cheapest" in self.__dict__ or n <= limits().dense_paths or 3 * len(some) > n:
            return self.reshard(sources, np.arange(len(self)), training)
        seconds = np.take(self._from(some), self._there, axis=1)[at]
        if training:
            seconds += np.take(self.gradient._from(own, home=True), self._back, axis=1)[back]
        seconds += FREE_MOVE * (
            (self._there == self._there[sources][:, None]) & (np.arange(len(self)) != sources[:, None])
        )
        return seconds

    def _from(self, layouts: Ints, home: bool = False) -> Floats:
        if not home:
            return self._filled(layouts)[layouts]
        key = layouts.tobytes()
        if key not in self._homes:
            self._homes[key] = self.from_layouts(layouts, home=True)
        return self._homes[key]

    @cached_property
    def _homes(self) -> dict[bytes, Floats]:
        return {}

    def _filled(self, sources: Ints) -> Floats:
        """Return the table [source, layout] of distances, in which at least the rows `sources` are filled."""
        filled, seconds = self._rows
        missing = sources[~filled[sources]]
        if len(missing):
            seconds[missing] = self.from_layouts(missing)
            filled[missing] = True
        return seconds

    @cached_property
    def _rows(self) -> tuple[npt.NDArray[np.bool_], Floats]:
        """A mask of the rows of the table of distances that are filled, and the table."""
        n = len(self._without_repeat)
        return np.zeros(n, dtype=bool), np.empty((n, n))

    def reshard_one(self, layout: int, training: bool, there: bool) -> Floats:
        """
        Return seconds [layout] of the cheapest moves from the layout with number `layout` to every layout or, if not
        `there`, from every layout to it.

        `training` adds the moves of the gradient in the other direction, as in `reshard`.
        """
        at, back = int(self._there[layout]), self._back
        seconds = np.take((self._cheapest if there else self._home)[at], self._there)
        if training:
            gradient = self.gradient
            seconds += np.take((gradient._home if there else gradient._cheapest)[back[layout]], back)
        ends, order = self._alike
        before = seconds[layout]
        seconds[order[ends[at] : ends[at + 1]]] += FREE_MOVE
        seconds[layout] = before
        return seconds

    def moved_bytes(self, sources: Ints, targets: Ints) -> Floats:
        """
        Return bytes [source, target] of the piece that a reshard between layouts given by number leaves on a device; 0
        where it moves nothing: between equal layouts, or those that differ in COPY and REPEAT only.
        """
        there = self._there
        return (there[sources][:, None] != there[targets]) * self.bytes[targets]

    @property
    def _without_repeat(self) -> Ints:
        return self._layouts.without_repeat

    @property
    def _there(self) -> Ints:
        return self._layouts.there

    @property
    def _back(self) -> Ints:
        return self._layouts.back

    @cached_property
    def _alike(self) -> tuple[list[int], Ints]:
        """Layouts sorted by representative, and where those of each start."""
        order = np.argsort(self._there, kind="stable")
        return np.searchsorted(self._there[order], np.arange(len(self._without_repeat) + 1)).tolist(), order

    @property
    def representatives(self) -> tuple[Ints, Ints]:
        """
        Two arrays [layout] of indices in `without_repeat`. Moves between COPY and REPEAT are free, so only layouts
        without REPEAT have distances, and stand for the others. The first array has the layout that stands for each
        layout: the one with COPY in the place of REPEAT. The second has the one that stands for the layout of its
        gradient: with COPY and SUM swapped, then COPY in the place of REPEAT.
        """
        return self._there, self._back

    @property
    def without_repeat(self) -> Ints:
        """
        The numbers of the layouts in which no mesh axis has the role REPEAT: [index]. Only these have distances, as
        moves between REPEAT and COPY are free.
        """
        return self._without_repeat

    @property
    def moves(self) -> tuple[Ints, Ints, Floats]:
        """
        Every single collective between two layouts without REPEAT, as three arrays [move]: the source's and the
        target's index in `without_repeat`, and the seconds.
        """
        return self._moves.sources, self._moves.targets, self._move_seconds

    def lower_bounds(self, sources: Ints, targets: Ints) -> Singles:
        """
        Return float32 lower bounds on the seconds [source, target] of the cheapest moves between layouts without
        REPEAT.

        `sources` and `targets` are indices in `without_repeat`. If they are most of all pairs (`mostly`), the cached
        table [layout, layout] of all is returned instead, which must not be changed. In its rows only those of sources
        that were asked for, now or before, are defined.
        """
        filled, seconds = self._least
        n = len(filled)
        missing = sources[~filled[sources]]
        if len(missing):
            # No way of the cheapest visits a layout twice.
            seconds[missing] = self.from_layouts(missing, single=True) * np.float32(1 - (n + 2) * 2.0**-23)
            filled[missing] = True
        return seconds if self.mostly(len(sources), len(targets)) else seconds[np.ix_(sources, targets)]

    @property
    def steps(self) -> int:
        """
        An estimate of the work of computing all distances: additions when every move is relaxed once from every layout.
        """
        return len(self._moves.sources) * len(self._without_repeat)

    def mostly(self, sources: int, targets: int) -> bool:
        """
        Return whether `sources` x `targets` pairs (two counts) are more than a third of all pairs of layouts without
        REPEAT, so that `lower_bounds` returns its whole table.
        """
        return 3 * sources * targets > len(self._without_repeat) ** 2

    @cached_property
    def _home(self) -> Floats:
        """The transpose of `_cheapest`, contiguous."""
        return np.ascontiguousarray(self._cheapest.T)

    @cached_property
    def _least(self) -> tuple[npt.NDArray[np.bool_], Singles]:
        """A mask of the rows of the float32 table that are filled, and the table."""
        n = len(self._without_repeat)
        return np.zeros(n, dtype=bool), np.zeros((n, n), dtype=np.float32)

    @cached_property
    def _cheapest(self) -> Floats:
        """Seconds [from, to] of the cheapest moves between representatives."""
        return self._filled(np.arange(len(self._without_repeat)))

    def from_layouts(self, sources: Ints, single: bool = False, home: bool = False) -> Floats:
        """
        Return seconds [source, layout] of the cheapest moves from the layouts `sources` to all layouts without REPEAT;
        all are indices in `without_repeat`.

        With `home`, moves go from all layouts to the sources instead. With `single`, sums are in float32 (see
        `PricedMoves.cheapest`).
        """
        moves = self._moves.reversed if home else self._moves
        precision: Any = np.float32 if single else np.float64
        seconds: Floats = self._move_seconds.astype(precision)
        return PricedMoves(len(self._without_repeat), moves.sources, moves.targets, seconds).cheapest(sources)

    @property
    def _moves(self) -> Moves:
        return self._layouts.moves

    @cached_property
    def _move_seconds(self) -> Floats:
        """Seconds of each of `_moves`."""
        moves = self._moves
        before = self.elements[self._without_repeat][moves.sources]
        after = before * moves.before[moves.of] / moves.after[moves.of]
        if self.machine.device.profile is not None:
            out = np.zeros(len(before))
            for (kind, sizes), at in zip(moves.kinds, moves.lie, strict=True):
                pairs = list(zip(before[at].tolist(), after[at].tolist(), strict=True))
                seconds = {(b, a): self.machine.move_seconds(kind, dict(sizes), b, a, self.item) for b, a in set(pairs)}
                out[at] = [seconds[pair] for pair in pairs]
            return out + FREE_MOVE
        local, starts, slopes = self.machine.move_lines(moves.kinds)
        bytes = np.where(local[moves.of], after, before) * self.item
        out = np.full(len(bytes), np.inf)
        for start, slope in zip(starts, slopes, strict=True):
            np.minimum(out, start[moves.of] + slope[moves.of] * bytes, out=out)
        return out + FREE_MOVE


def _merged_dims(rank: int, merge: int) -> tuple[int, ...]:
    """
    Return a class number for each dim of a value of this rank; dims of one class are not told apart in layouts.

    `merge` is 0 (each dim is a class), 1 (three classes), 2 (two: the channels of images, or else the last dim; all
    other dims) or 3 (one). The three are, of four dims, the first, the second and the others: samples and heads or
    channels, or experts and their slots; of more dims the first, the last and the others. Given rank 4 and `merge` 2,
    returns (0, 1, 0, 0).
    """
    classes = (rank, 3, 2, 1)[merge]
    if rank <= classes:
        return tuple(range(rank))
    kept = 1 if rank == 4 else rank - 1
    if classes == 3:
        return tuple(0 if d == 0 else 1 if d == kept else 2 for d in range(rank))
    return tuple(int(classes == 2 and d == kept) for d in range(rank))


@dataclass(frozen=True)
class Spaces:
    """
    The layout spaces of one machine, one per shape and element types of value and gradient, memoised.

    By its fields, a search with many mesh axes looks at fewer layouts: `cuts` gives neighbouring axes one role, and
    `by_count` and `merge` make layouts equal that differ little, which gives lower bounds.
    """

    machine: Machine
    cuts: tuple[int, ...] | None = None
    """The axes at which a new group begins, all axes of a group having one role; None for every axis on its own."""
    by_count: bool = False
    """Whether equal axes of a level are counted instead: a relaxation, whose costs bound those of the axes' layouts."""
    merge: int = 0
    """
    Which dims layouts tell apart: 0 all, 1 (of four dims or more) the first, the last and the others, 2 the last from
    the others, 3 none; of four dims, the second in place of the last. It is a further relaxation, as moves between
    merged dims are free.
    """
    hybrids: bool = True
    """
    Whether weights may be sharded along what is summed over (the rules `divide-matmul.sum`, `divide-embedding.rows`,
    `divide-perceptron`, `divide-attention.heads`), and partial sums pass linear operators (`add-of-sums`, ..).
    """
    exchange_rows: float = field(default_factory=exchange_rows)
    """Whether rows of experts may be exchanged, and how many: as `Graph.exchange_rows`."""

    @cached_property
    def groups(self) -> tuple[AxisGroup, ...]:
        """
        The machine's mesh axes in groups. All axes of a group have the same role (see `cuts`). But if the field
        `by_count` is True, each axis of a group has its own, and layouts only say how many axes of the group have each
        role.
        """
        if self.by_count:
            return count_equal_axes(self.machine)
        axes = len(self.machine.mesh.sizes)
        return group_axes(self.machine, *(range(1, axes) if self.cuts is None else self.cuts))

    @property
    def axis_by_axis(self) -> bool:
        """
        Whether every mesh axis may have a role of its own, neither shared by a group of axes nor only counted, so that
        the search is exact.
        """
        return not self.by_count and len(self.groups) == len(self.machine.mesh.sizes)

    @cached_property
    def _made(self) -> dict[Any, LayoutSpace]:
        return {}

    def of(self, shape: tuple[int, ...], dtype: str, merge: int | None = None, grad: str = "") -> LayoutSpace:
        """
        Return the space of layouts of values of this global shape and element type on the machine, memoised.

        `merge` says which dims layouts tell apart, as the field `merge` of this object, which None takes. `grad` is the
        element type of their gradients, "" if it is the same.
        """
        merged = _merged_dims(len(shape), self.merge if merge is None else merge)
        key = (shape, dtype, merged, grad)
        if key not in self._made:
            gradient = self.of(shape, grad, merge) if grad else None
            self._made[key] = LayoutSpace(self.machine, self.groups, shape, dtype, merged, gradient)
        return self._made[key]

    def of_value(self, value: Value) -> LayoutSpace:
        """
        Return the space of layouts of a value.

        For a weight, layouts tell no dims apart as soon as `merge` is above 0. The lower bound is hardly weaker by
        that: a weight may be stored sharded along the dim along which it is needed sharded anyway, so that it need not
        move between dims.
        """
        weight = self.merge > 0 and value.node.op == "weight"
        return self.of(value.type.shape, value.type.dtype, 3 if weight else None, value.type.grad)
