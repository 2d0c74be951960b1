"""
Layouts and configurations as numbers: what the exact search enumerates.

On a machine of few axes a layout is a role for each. On a larger one axes of equal size on one level are taken as
interchangeable: a layout is, per such class of axes, how many of them have each role. Which axis has which role is then
settled afterwards (`search.realise`); a search over counts can only come out cheaper, so its optimum is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from unity_ir.machine.model import Machine
from unity_ir.pcg.layout import COPY, REPEAT, SUM
from unity_ir.pcg.reshard import move_kind
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.tdl.syntax import NOT_FLOATING

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FREE_MOVE = 1e-12
"""Seconds a free move counts, so that of equal plans the one with fewer moves wins, as in the planner."""


@dataclass(frozen=True, slots=True)
class AxisClass:
    """Interchangeable mesh axes: same level, same size."""

    level: int
    size: int
    axes: tuple[int, ...]


EXACT_AXES = 3
"""Machines of up to so many axes are searched axis by axis: their plans are exact, not only their bounds."""


def axis_classes(machine: Machine) -> tuple[AxisClass, ...]:
    """The classes of a machine's axes, outermost first; of a small machine each axis is one."""
    if len(machine.mesh.sizes) <= EXACT_AXES:
        pairs = zip(machine.axis_levels, machine.mesh.sizes, strict=True)
        return tuple(AxisClass(level, size, (axis,)) for axis, (level, size) in enumerate(pairs))
    found: dict[tuple[int, int], list[int]] = {}
    for axis, (level, size) in enumerate(zip(machine.axis_levels, machine.mesh.sizes, strict=True)):
        found.setdefault((level, size), []).append(axis)
    return tuple(AxisClass(level, size, tuple(axes)) for (level, size), axes in found.items())


def compositions(total: int, parts: int) -> Ints:
    """All ways to write `total` as an ordered sum of `parts` numbers, one per row."""

    def rows(left: int, width: int) -> Iterator[tuple[int, ...]]:
        if width == 1:
            yield (left,)
            return
        for first in range(left, -1, -1):
            for rest in rows(left - first, width - 1):
                yield (first, *rest)

    return np.array(list(rows(total, parts)), dtype=np.int64).reshape(-1, parts)


def role_counts(classes: Sequence[AxisClass], roles: int) -> Ints:
    """Every way to give the axes roles: an array [ways, class, role] of counts."""
    each = [compositions(len(c.axes), roles) for c in classes]
    if not each:
        return np.zeros((1, 0, roles), dtype=np.int64)
    grid = np.array(list(product(*(range(len(e)) for e in each))), dtype=np.int64)
    return np.stack([e[grid[:, i]] for i, e in enumerate(each)], axis=1)


def degrees_of(counts: Ints, classes: Sequence[AxisClass]) -> Ints:
    """The degree of every role: [ways, role]."""
    sizes = np.array([c.size for c in classes], dtype=np.int64)
    return np.prod(sizes[None, :, None] ** counts, axis=1)


class LayoutSpace:
    """
    The layouts a value of one shape may have on a machine, and what it costs to go between any two.

    Roles are numbered: dims, then COPY, SUM, REPEAT.
    """

    def __init__(self, machine: Machine, classes: tuple[AxisClass, ...], shape: tuple[int, ...], dtype: str):
        self.machine = machine
        self.classes = classes
        self.shape = shape
        self.item = ELEMENT_BYTES[dtype]
        self.rank = len(shape)
        self.roles = self.rank + 3
        counts = role_counts(classes, self.roles)
        degrees = degrees_of(counts, classes)
        fits = np.all(np.array(shape, dtype=np.int64) % degrees[:, : self.rank] == 0, axis=1)
        if dtype in NOT_FLOATING:
            fits &= degrees[:, self.role(SUM)] == 1
        self.counts: Ints = counts[fits]
        self.degrees: Ints = degrees[fits]
        self._index = {row.tobytes(): i for i, row in enumerate(self.counts)}

    def role(self, role: int) -> int:
        """The number of a role."""
        return role if role >= 0 else self.rank + {COPY: 0, SUM: 1, REPEAT: 2}[role]

    def __len__(self) -> int:
        return len(self.counts)

    def find(self, counts: Ints) -> Ints:
        """The layout numbers of rows [ways, class, role]; -1 for one that does not fit the shape."""
        rows = np.ascontiguousarray(counts)
        return np.array([self._index.get(row.tobytes(), -1) for row in rows], dtype=np.int64)

    @cached_property
    def elements(self) -> Floats:
        """Elements of a piece, per layout."""
        total = float(np.prod([float(s) for s in self.shape]))
        return total / np.prod(self.degrees[:, : self.rank], axis=1)

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
        n = len(self)
        table = np.full((n, n), np.inf)
        np.fill_diagonal(table, 0.0)
        groups = list(self._moves())
        changed = True
        while changed:
            before = table.copy()
            for source, target, seconds in groups:
                table[:, target] = np.minimum(table[:, target], table[:, source] + seconds)
            changed = not np.array_equal(before, table)
        return table

    @cached_property
    def training(self) -> Floats:
        """Seconds from every layout to every layout, and of the gradient back between their duals."""
        back = self.forward[np.ix_(self.duals, self.duals)]
        return self.forward + back.T

    def _moves(self) -> Iterator[tuple[Ints, Ints, Floats]]:
        """Sets of moves: the layouts they start from, where they lead (all different), what each costs."""
        names = (*range(self.rank), COPY, SUM, REPEAT)
        for amount in product(*(range(len(c.axes) + 1) for c in self.classes)):
            if not any(amount):
                continue
            taken = np.array(amount, dtype=np.int64)
            sizes: dict[int, int] = {}
            for axis_class, k in zip(self.classes, amount, strict=True):
                sizes[axis_class.level] = sizes.get(axis_class.level, 1) * axis_class.size**k
            group = int(np.prod(list(sizes.values())))
            for p, q in product(names, names):
                if p == q:
                    continue
                source = np.flatnonzero(np.all(self.counts[:, :, self.role(p)] >= taken, axis=1))
                if self.axis_by_axis:
                    source = source[self._keeps_contiguous(source, p, q, taken)]
                moved = self.counts[source].copy()
                moved[:, :, self.role(p)] -= taken
                moved[:, :, self.role(q)] += taken
                target = self.find(moved)
                ok = target >= 0
                source, target = source[ok], target[ok]
                if len(source):
                    yield source, target, self._seconds(move_kind(p, q), sizes, group, source, p, q)

    @cached_property
    def axis_by_axis(self) -> bool:
        """Whether a layout says what each single axis does, so that the planner's rules for moves apply."""
        return all(len(c.axes) == 1 for c in self.classes)

    def _keeps_contiguous(self, source: Ints, p: int, q: int, taken: Ints) -> npt.NDArray[np.bool_]:
        """As `pcg.reshard.moves`: axes leave a dim innermost first, and enter one inside those that divide it."""
        first = int(np.flatnonzero(taken)[0])
        inner = np.arange(len(taken)) > first
        ok = np.ones(len(source), dtype=bool)
        if p >= 0:
            ok &= np.all(self.counts[source][:, inner & (taken == 0), p] == 0, axis=1)
        if q >= 0:
            ok &= np.all(self.counts[source][:, inner, q] == 0, axis=1)
        return ok

    def _seconds(self, kind: str, sizes: dict[int, int], group: int, source: Ints, p: int, q: int) -> Floats:
        before = self.elements[source]
        after = before * (group if p >= 0 else 1) / (group if q >= 0 else 1)
        seconds = {
            b: self.machine.move_seconds(kind, sizes, b, a, self.item)
            for b, a in dict(zip(before.tolist(), after.tolist(), strict=True)).items()
        }
        return np.array([seconds[b] for b in before.tolist()]) + FREE_MOVE


@dataclass(frozen=True)
class Spaces:
    """The layout spaces of one machine, one per shape and element type, made when first asked for."""

    machine: Machine

    @cached_property
    def classes(self) -> tuple[AxisClass, ...]:
        return axis_classes(self.machine)

    @cached_property
    def _made(self) -> dict[Any, LayoutSpace]:
        return {}

    def of(self, shape: tuple[int, ...], dtype: str) -> LayoutSpace:
        key = (shape, dtype)
        if key not in self._made:
            self._made[key] = LayoutSpace(self.machine, self.classes, shape, dtype)
        return self._made[key]
