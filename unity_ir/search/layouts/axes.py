"""
Enumerate the roles of mesh axes: their devices hold shards of a dim, replicas that do different work (copy), addends
(sum), or replicas that all do the same work (repeat).

Every axis of the machine has a role of its own; on larger machines, neighbouring axes share one
(`search/exact/axis_groups.py`), or equal axes of a level are counted (`search/bounds/axis_counts.py`). A layout or
configuration is an array [group, role]: the number of the group's axes with the role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from math import comb, prod

import numpy as np
import numpy.typing as npt

from unity_ir.machine.model import Machine

Floats = npt.NDArray[np.float64]


Ints = npt.NDArray[np.int64]


Counts = npt.NDArray[np.int8]


Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Neighbouring mesh axes that all have the same role, or `count` equal axes of one level that have a role each."""

    axes: tuple[int, ...]
    levels: tuple[tuple[int, int], ...]
    """(machine level, devices along the group on it), outermost first; of a counted group, those of one of its axes."""
    count: int = 1

    @property
    def size(self) -> int:
        """
        The number of devices along all axes of the group together; for `count` equal axes that have a role each, the
        number along one of them.
        """
        return prod(n for _, n in self.levels)


def group_axes(machine: Machine, *starts: int) -> tuple[AxisGroup, ...]:
    """
    Return the machine's mesh axes in groups of neighbours, outermost first. `starts` are the numbers of the axes at
    which the second and later groups begin, ascending; the first begins at axis 0.
    """
    edges = (0, *starts, len(machine.mesh.sizes)) if machine.mesh.sizes else ()
    out: list[AxisGroup] = []
    for start, stop in pairwise(edges):
        levels: dict[int, int] = {}
        for axis in range(start, stop):
            level = machine.axis_levels[axis]
            levels[level] = levels.get(level, 1) * machine.mesh.sizes[axis]
        out.append(AxisGroup(tuple(range(start, stop)), tuple(levels.items())))
    return tuple(out)


def count_equal_axes(machine: Machine) -> tuple[AxisGroup, ...]:
    """
    Return the machine's mesh axes in groups, outermost first: axes of equal size and machine level form one group,
    whose axes may have different roles and are only counted (`AxisGroup.count`).
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for axis, (level, size) in enumerate(zip(machine.axis_levels, machine.mesh.sizes, strict=True)):
        alike.setdefault((level, size), []).append(axis)
    return tuple(AxisGroup(tuple(axes), (of,), len(axes)) for of, axes in alike.items())


@lru_cache(maxsize=16)
def role_counts(groups: tuple[AxisGroup, ...], roles: int) -> Counts:
    """
    Return every way to give each mesh axis one of several roles: [way, group, role], the number of a group's axes that
    have the role; a group whose axes all have the same role counts as one axis. `roles` is the number of roles.

    Given one group of two equal axes and 2 roles, returns [[[2, 0]], [[1, 1]], [[0, 2]]].
    """
    each = [_compositions(group.count, roles) for group in groups]
    at = np.indices(tuple(map(len, each))).reshape(len(each), prod(map(len, each)))
    out = np.zeros((at.shape[1], len(groups), roles), dtype=np.int8)
    for group, (ways, chosen) in enumerate(zip(each, at, strict=True)):
        out[:, group] = ways[chosen]
    out.setflags(write=False)
    return out


@lru_cache(maxsize=16)
def role_degrees(groups: tuple[AxisGroup, ...], roles: int) -> Ints:
    """
    Return the degree of each role in every way to give each mesh axis one of several roles: [way, role], the product of
    the sizes of the axes that have the role. Ways are those of `role_counts`, in the same order.

    `groups` are the mesh axes in groups; `roles` is the number of roles.
    """
    out = degrees_of(role_counts(groups, roles), groups)
    out.setflags(write=False)
    return out


def degrees_of(counts: Counts, groups: Sequence[AxisGroup]) -> Ints:
    """
    Return the degree of each role, the product of the sizes of the mesh axes that have it, as an array [choice, role].

    `counts` is an array [choice, group, role]: how many of the equal axes of a group, in `groups`, have that role under
    each choice.
    """
    out = np.ones((len(counts), counts.shape[2]), dtype=np.int64)
    for i, group in enumerate(groups):
        out *= np.array([group.size**n for n in range(group.count + 1)], dtype=np.int64)[counts[:, i]]
    return out


@cache
def _compositions(number: int, parts: int) -> Counts:
    """Return every ordered sum of `parts` terms equal to `number`: [ways, parts], large first terms first."""
    if parts == 1:
        return np.array([[number]], dtype=np.int8)
    return np.concatenate(
        [np.insert(_compositions(number - first, parts - 1), 0, first, axis=1) for first in range(number, -1, -1)]
    )


@cache
def _ranks(number: int, parts: int) -> Ints:
    """Return what each part adds to the rank of a composition: [parts left, number left, first]."""
    out = np.zeros((parts + 1, number + 1, number + 1), dtype=np.int64)
    for left in range(2, parts + 1):
        for n in range(number + 1):
            for first in range(n - 1, -1, -1):
                out[left, n, first] = out[left, n, first + 1] + comb(n - first - 1 + left - 2, left - 2)
    return out


def _rank(ways: Counts, number: int) -> Ints:
    """Return the ranks of compositions [ways, parts] of a number among all of them."""
    parts = ways.shape[1]
    out, left = np.zeros(len(ways), dtype=np.int64), np.full(len(ways), number)
    if number == 1:
        for i in range(1, parts):
            out += i * ways[:, i]
        return out
    ranks = _ranks(number, parts)
    for i in range(parts - 1):
        out += ranks[parts - i, left, ways[:, i]]
        left = left - ways[:, i]
    return out


def code(groups: Sequence[AxisGroup], counts: Counts) -> Ints:
    """
    Return an integer for each choice of roles in `counts` [choice, group, role] (how many axes of each of `groups` have
    a role), equal for equal choices only, and below the number of possible ones: an index into dense tables, [choice].
    """
    roles = counts.shape[2]
    out = np.zeros(len(counts), dtype=np.int64)
    for i, group in enumerate(groups):
        out = out * comb(group.count + roles - 1, group.count) + _rank(counts[:, i], group.count)
    return out
