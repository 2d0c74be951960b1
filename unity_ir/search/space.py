"""
Layouts and configurations as numbers: what the exact search enumerates.

Every axis of the machine gets a role of its own; on larger machines, neighbouring axes get one together
(`search/groups.py`), or equal axes of a level are counted: so many of them have this role, so many that
(`search/counted.py`). A layout or configuration is an array [group, role]: of the group's axes, how many have the role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from math import comb, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Value
from unity_ir.pcg.layout import COPY, REPEAT, SUM
from unity_ir.pcg.reshard import move_kind
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.tdl.syntax import NOT_FLOATING

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FREE_MOVE = 1e-12
"""Seconds a free move counts, so that of equal plans the one with fewer moves wins, as in the planner."""


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Neighbouring mesh axes that have one role together; or `count` equal ones of a level with a role each."""

    axes: tuple[int, ...]
    levels: tuple[tuple[int, int], ...]
    """The devices along each level; if counted, of one axis."""
    count: int = 1

    @property
    def size(self) -> int:
        return prod(n for _, n in self.levels)


EXACT_AXES = 3
"""Machines of up to so many axes are always searched axis by axis; of larger ones, neighbouring axes together."""


def grouped(machine: Machine, *cuts: int) -> tuple[AxisGroup, ...]:
    """The machine's axes, outermost first, in groups that end before the axes `cuts`."""
    edges = (0, *cuts, len(machine.mesh.sizes)) if machine.mesh.sizes else ()
    out: list[AxisGroup] = []
    for start, stop in pairwise(edges):
        levels: dict[int, int] = {}
        for axis in range(start, stop):
            level = machine.axis_levels[axis]
            levels[level] = levels.get(level, 1) * machine.mesh.sizes[axis]
        out.append(AxisGroup(tuple(range(start, stop)), tuple(levels.items())))
    return tuple(out)


def counted(machine: Machine) -> tuple[AxisGroup, ...]:
    """The machine's axes, outermost first, with equal ones of a level in one group that is counted."""
    alike: dict[tuple[int, int], list[int]] = {}
    for axis, (level, size) in enumerate(zip(machine.axis_levels, machine.mesh.sizes, strict=True)):
        alike.setdefault((level, size), []).append(axis)
    return tuple(AxisGroup(tuple(axes), (of,), len(axes)) for of, axes in alike.items())


def role_counts(groups: Sequence[AxisGroup], roles: int) -> Ints:
    """Every way to give the axes of all groups roles: [ways, group, role], how many of the group have the role."""
    each = [_compositions(group.count, roles) for group in groups]
    at = np.indices(tuple(map(len, each))).reshape(len(each), prod(map(len, each)))
    out = np.zeros((at.shape[1], len(groups), roles), dtype=np.int64)
    for group, (ways, chosen) in enumerate(zip(each, at, strict=True)):
        out[:, group] = ways[chosen]
    return out


@cache
def _compositions(number: int, parts: int) -> Ints:
    """Every way to write a number as an ordered sum of so many parts: [ways, parts], most in the first ones first."""
    if parts == 1:
        return np.array([[number]], dtype=np.int64)
    return np.concatenate(
        [np.insert(_compositions(number - first, parts - 1), 0, first, axis=1) for first in range(number, -1, -1)]
    )


def degrees_of(counts: Ints, groups: Sequence[AxisGroup]) -> Ints:
    """The degree of every role: [ways, role]."""
    sizes = np.array([c.size for c in groups], dtype=np.int64)
    return np.prod(sizes[None, :, None] ** counts, axis=1)


@cache
def _ranks(number: int, parts: int) -> Ints:
    """What each part adds to the place of a composition among all: [parts left, number left, first]."""
    out = np.zeros((parts + 1, number + 1, number + 1), dtype=np.int64)
    for left in range(2, parts + 1):
        for n in range(number + 1):
            for first in range(n - 1, -1, -1):
                out[left, n, first] = out[left, n, first + 1] + comb(n - first - 1 + left - 2, left - 2)
    return out


def _rank(ways: Ints, number: int) -> Ints:
    """The places of compositions [ways, parts] of a number among all of them."""
    parts = ways.shape[1]
    ranks = _ranks(number, parts)
    out, left = np.zeros(len(ways), dtype=np.int64), np.full(len(ways), number)
    for i in range(parts - 1):
        out += ranks[parts - i, left, ways[:, i]]
        left = left - ways[:, i]
    return out


class LayoutSpace:
    """
    The layouts a value of one shape may have on a machine, and what it costs to go between any two.

    Roles are numbered: dims, then COPY, SUM, REPEAT.
    """

    def __init__(
        self,
        machine: Machine,
        groups: tuple[AxisGroup, ...],
        shape: tuple[int, ...],
        dtype: str,
        merged: tuple[int, ...] | None = None,
    ):
        """`merged` says for each dim which it is told apart as; going between dims that are not told apart is free."""
        self.machine = machine
        self.groups = groups
        self.merged = tuple(range(len(shape))) if merged is None else merged
        self.rank = max(self.merged, default=-1) + 1
        shape = tuple(prod(s for s, m in zip(shape, self.merged, strict=True) if m == d) for d in range(self.rank))
        self.shape = shape
        self.item = ELEMENT_BYTES[dtype]
        self.roles = self.rank + 3
        counts = role_counts(groups, self.roles)
        degrees = degrees_of(counts, groups)
        fits = np.all(np.array(shape, dtype=np.int64) % degrees[:, : self.rank] == 0, axis=1)
        if dtype in NOT_FLOATING:
            fits &= degrees[:, self.role(SUM)] == 1
        self.counts: Ints = counts[fits]
        self.degrees: Ints = degrees[fits]
        self._number = np.full(prod(comb(g.count + self.roles - 1, g.count) for g in groups), -1)
        self._number[self._code(self.counts)] = np.arange(len(self.counts))

    def role(self, role: int) -> int:
        """The number of a role."""
        return self.merged[role] if role >= 0 else self.rank + {COPY: 0, SUM: 1, REPEAT: 2}[role]

    def __len__(self) -> int:
        return len(self.counts)

    def _code(self, counts: Ints) -> Ints:
        code = np.zeros(len(counts), dtype=np.int64)
        for i, group in enumerate(self.groups):
            code = code * comb(group.count + self.roles - 1, group.count) + _rank(counts[:, i], group.count)
        return code

    def find(self, counts: Ints) -> Ints:
        """The layout numbers of rows [ways, group, role]; -1 for one that does not fit the shape."""
        return self._number[self._code(counts)]

    @cached_property
    def elements(self) -> Floats:
        """Elements of a piece, per layout."""
        total = float(np.prod([float(s) for s in self.shape]))
        return total / np.prod(self.degrees[:, : self.rank], axis=1)

    @cached_property
    def bytes(self) -> Floats:
        """Bytes of a piece, per layout."""
        return self.elements * self.item

    @cached_property
    def duals(self) -> Ints:
        """The number of each layout's dual."""
        swapped = self.counts.copy()
        c, s = self.role(COPY), self.role(SUM)
        swapped[:, :, [c, s]] = swapped[:, :, [s, c]]
        return self.find(swapped)

    @cached_property
    def forward(self) -> Floats:
        """Seconds of the cheapest moves from every layout to every layout."""
        every = np.arange(len(self))
        return self.reshard(every, every, False)

    @cached_property
    def training(self) -> Floats:
        """Seconds from every layout to every layout, and of the gradient back between their duals."""
        every = np.arange(len(self))
        return self.reshard(every, every, True)

    def reshard(self, sources: Ints, targets: Ints, training: bool) -> Floats:
        """Seconds of the cheapest moves [source, target]; in training also of the gradient back between their duals."""
        there, back = self._there, self._back
        seconds = self._cheapest[np.ix_(there[sources], there[targets])]
        if training:
            seconds = seconds + self._cheapest[np.ix_(back[targets], back[sources])].T
        same = there[sources][:, None] == there[targets]
        return seconds + FREE_MOVE * (same & (sources[:, None] != targets))

    def arriving(self, sources: Ints, targets: Ints) -> Floats:
        """Bytes of what a reshard makes [source, target]; none where pieces only go by another name."""
        there = self._there
        return (there[sources][:, None] != there[targets]) * self.bytes[targets]

    @cached_property
    def _stays(self) -> Ints:
        """The layouts without REPEAT: between it and COPY all moves are free, so these stand for the others."""
        return np.flatnonzero(np.all(self.counts[:, :, self.role(REPEAT)] == 0, axis=1))

    def _standing_for(self, counts: Ints) -> Ints:
        number = np.full(len(self), -1)
        number[self._stays] = np.arange(len(self._stays))
        counts[:, :, self.role(COPY)] += counts[:, :, self.role(REPEAT)]
        counts[:, :, self.role(REPEAT)] = 0
        return number[self.find(counts)]

    @cached_property
    def _there(self) -> Ints:
        """For each layout the one of `_stays` that stands for it, ..."""
        return self._standing_for(self.counts.copy())

    @cached_property
    def _back(self) -> Ints:
        """... and for its dual."""
        return self._standing_for(self.counts[self.duals].copy())

    @property
    def stands(self) -> tuple[Ints, Ints]:
        """For each layout the numbers, among those without REPEAT, of the one that stands for it and for its dual."""
        return self._there, self._back

    @property
    def cheapest(self) -> Floats:
        """Seconds of the cheapest moves between the layouts without REPEAT."""
        return self._cheapest

    @cached_property
    def _cheapest(self) -> Floats:
        """Seconds of the cheapest moves between the layouts of `_stays`: shortest paths, relaxed until none is left."""
        n = len(self._stays)
        from_all = np.full((n, n), np.inf)  # [target, source]: rows, which are copied, lie together
        np.fill_diagonal(from_all, 0.0)
        groups = list(self._moves())
        changed = True
        while changed:
            before = from_all.copy()
            for source, target, seconds in groups:
                from_all[target] = np.minimum(from_all[target], from_all[source] + seconds[:, None])
            changed = not np.array_equal(before, from_all)
        return np.ascontiguousarray(from_all.T)

    def _moves(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Sets of moves between layouts of `_stays`: where they start, where they lead (all different), their costs."""
        names = (*range(self.rank), COPY, SUM)
        at = {p: p if p >= 0 else self.role(p) for p in names}
        stays = self.counts[self._stays]
        elements = self.elements[self._stays]
        number = np.full(len(self) + 1, -1)
        number[self._stays] = np.arange(len(self._stays))
        for amount in product(*(range(group.count + 1) for group in self.groups)):
            if not any(amount):
                continue
            taken = np.array(amount, dtype=np.int64)
            sizes: dict[int, int] = {}
            for axis_group, k in zip(self.groups, amount, strict=True):
                for level, size in axis_group.levels:
                    sizes[level] = sizes.get(level, 1) * size**k
            group = prod(sizes.values())
            for p in names:
                holding = np.flatnonzero(np.all(stays[:, :, at[p]] >= taken, axis=1))
                if not len(holding):
                    continue
                for q in names:
                    if p == q:
                        continue
                    source = holding[self._keeps_contiguous(stays[holding], p, q, taken)]
                    moved = stays[source]
                    moved[:, :, at[p]] -= taken
                    moved[:, :, at[q]] += taken
                    target = number[self.find(moved)]
                    ok = target >= 0
                    source, target = source[ok], target[ok]
                    if len(source):
                        kind = move_kind(p, q)
                        yield source, target, self._seconds(kind, sizes, group, elements[source], p, q)

    def _keeps_contiguous(self, counts: Ints, p: int, q: int, taken: Ints) -> npt.NDArray[np.bool_]:
        """As `pcg.reshard.moves`: axes leave a dim innermost first, and enter one inside those that divide it."""
        first = int(np.flatnonzero(taken)[0])
        inner = np.arange(len(taken)) > first
        ok = np.ones(len(counts), dtype=bool)
        if p >= 0 and self.merged.count(p) == 1:
            ok &= np.all(counts[:, inner, p] == taken[inner], axis=1)
        if q >= 0 and self.merged.count(q) == 1:
            ok &= np.all(counts[:, inner, q] == 0, axis=1)
        return ok

    def _seconds(self, kind: str, sizes: dict[int, int], group: int, before: Floats, p: int, q: int) -> Floats:
        after = before * (group if p >= 0 else 1) / (group if q >= 0 else 1)
        seconds = {
            b: self.machine.move_seconds(kind, sizes, b, a, self.item)
            for b, a in dict(zip(before.tolist(), after.tolist(), strict=True)).items()
        }
        return np.array([seconds[b] for b in before.tolist()]) + FREE_MOVE


def merged_dims(rank: int, merge: int) -> tuple[int, ...]:
    """
    Which dims a bound tells apart: 0, all; 1, channels of images, the last dim of others, and the rest; 2, none.
    """
    if merge == 0 or (merge == 1 and rank <= 2):
        return tuple(range(rank))
    kept = 1 if rank == 4 else rank - 1
    return tuple(int(merge == 1 and d == kept) for d in range(rank))


@dataclass(frozen=True)
class Spaces:
    """The layout spaces of one machine, one per shape and element type, made when first asked for."""

    machine: Machine
    cuts: tuple[int, ...] | None = None
    """Where the machine's axes are cut into groups that have one role; None for every axis on its own."""
    by_count: bool = False
    """Whether equal axes of a level are counted instead: less than what any layout of the axes themselves costs."""
    merge: int = 0
    """How coarsely dims are told apart, as `merged_dims` says: less still."""
    hybrids: bool = True
    """
    Whether weights may be divided along what is summed over (the rules `divide-matmul.sum`, `divide-embedding.rows`,
    `divide-perceptron`, `divide-attention.heads`), and partial sums pass linear operators (`add-of-sums`, ..).
    """

    @cached_property
    def groups(self) -> tuple[AxisGroup, ...]:
        if self.by_count:
            return counted(self.machine)
        axes = len(self.machine.mesh.sizes)
        return grouped(self.machine, *(range(1, axes) if self.cuts is None else self.cuts))

    @property
    def axis_by_axis(self) -> bool:
        """Whether every axis may have a role of its own, so that nothing is left out."""
        return not self.by_count and len(self.groups) == len(self.machine.mesh.sizes)

    @cached_property
    def _made(self) -> dict[Any, LayoutSpace]:
        return {}

    def of(self, shape: tuple[int, ...], dtype: str, merge: int | None = None) -> LayoutSpace:
        merged = merged_dims(len(shape), self.merge if merge is None else merge)
        key = (shape, dtype, merged)
        if key not in self._made:
            self._made[key] = LayoutSpace(self.machine, self.groups, shape, dtype, merged)
        return self._made[key]

    def of_value(self, value: Value) -> LayoutSpace:
        """
        The layouts of a value. Where dims are merged at all, those of weights all are: a weight may rest divided along
        the dim in which it is needed divided, so that hardly anything is lost.
        """
        weight = self.merge > 0 and value.node.op == "weight"
        return self.of(value.type.shape, value.type.dtype, 2 if weight else None)
