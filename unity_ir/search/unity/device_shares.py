"""
Enumerate degrees, shares of a machine, and the machine views with given degrees on a share (Unity, 3.2 and 5.2).
Degrees are (role, degree) pairs; a role is an index variable to divide, or a set of operands in partial sums.

A share is a part of a machine: the number of usable coordinates of each mesh axis, all or fewer. An operator uses only
the first coordinate of an axis that is not whole; its view is pinned there. The cost of a share depends only on how
many coordinates it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from math import prod

from unity_ir.machine.model import Machine
from unity_ir.pcg.node import Node
from unity_ir.pcg.sharding import (
    REPEAT,
    Assignment,
    GridRole,
    is_shard,
    operand_role,
    pinned_at,
    prime_factors,
    result_role,
)
from unity_ir.search.layouts.limits import limits

Share = tuple[int, ...]
"""The number of usable coordinates of each mesh axis."""

Degrees = tuple[tuple[GridRole, int], ...]
"""(role, degree) of each index variable or set of carriers with a degree above 1, in TDL order."""


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number: given 6, returns (1, 2, 3, 6)."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def roles(node: Node) -> tuple[GridRole, ...]:
    """
    Return the roles by which an operator may be sharded: the names of its index variables of more than one element that
    can be divided, and the sets of names of operands that may be in partial sums together.
    """
    analysis = node.analysis
    return (*(v for v in analysis.splittable if analysis.bound.extents[v] > 1), *analysis.carriers)


def divisible(node: Node, degrees: Degrees) -> bool:
    """
    Return whether an operator can have these degrees ((role, degree) pairs): all their roles are its `roles`, and every
    degree divides the sizes it shards.
    """
    analysis, known = node.analysis, roles(node)
    if any(role not in known for role, _ in degrees):
        return False
    if any(isinstance(v, str) and analysis.bound.extents[v] % d for v, d in degrees):
        return False
    for values, role_of in ((node.operands, operand_role), (node.results, result_role)):
        for i, value in enumerate(values):
            dims = Counter[int]()
            for role, degree in degrees:
                dim = role_of(analysis, i, role)
                dims[dim] = max(1, dims[dim]) * degree
            if any(is_shard(dim) and value.shape[dim] % degree for dim, degree in dims.items()):
                return False
    return True


@cache
def views(degrees: Degrees, share: Share, sizes: tuple[int, ...], levels: tuple[int, ...]) -> tuple[Assignment, ...]:
    """
    Return the machine views in which an operator has these degrees on a share of the machine, at most
    `limits().unity_views`; () if none fits. A view is the role of each mesh axis.

    `degrees` are (role, degree) pairs, `share` is the number of usable coordinates of each mesh axis; `sizes` and
    `levels` are the size and the machine level of each mesh axis. An axis whose coordinates are all usable has one of
    the roles or, if no role needs it, REPEAT (its devices do the same work). Of any other axis only coordinate 0 is
    used: the view is pinned there. Views differ in which levels provide how much of each degree, and in the order of
    roles on a level's axes; axes of one role are contiguous.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for axis, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        if share[axis] == size:
            classes.setdefault((level, size), []).append(axis)
    wanted = Counter[tuple[int, int]]()
    for i, (_, degree) in enumerate(degrees):
        wanted.update((i, p) for p in prime_factors(degree))
    pinned: Assignment = tuple(REPEAT if share[a] == size else pinned_at(0) for a, size in enumerate(sizes))
    out: dict[Assignment, None] = {}
    for counts in _spread(list(classes.items()), wanted, len(degrees)):
        blocks = [_orders(list(axes), n, degrees) for axes, n in zip(classes.values(), counts, strict=True)]
        for chosen in product(*blocks):
            assignment = list[GridRole](pinned)
            for part in chosen:
                for axis, role in part:
                    assignment[axis] = role
            out[tuple(assignment)] = None
            if len(out) == limits().unity_views:
                return tuple(out)
    return tuple(out)


def _spread(
    classes: Sequence[tuple[tuple[int, int], list[int]]], wanted: Counter[tuple[int, int]], roles: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield, per class of axes, the number each role takes, so that every degree is met."""
    if not classes:
        if not any(wanted.values()):
            yield ()
        return
    ((_, size), axes), *rest = classes
    most = [min(len(axes), wanted[i, size]) for i in range(roles)]
    for counts in product(*(range(m, -1, -1) for m in most)):
        if sum(counts) > len(axes):
            continue
        left = wanted.copy()
        for i, n in enumerate(counts):
            left[i, size] -= n
        for others in _spread(rest, left, roles):
            yield (counts, *others)


def _orders(axes: list[int], counts: tuple[int, ...], degrees: Degrees) -> list[list[tuple[int, GridRole]]]:
    """Return every order of the roles on the axes of one class."""
    blocks: list[tuple[GridRole, int]] = [(degrees[i][0], n) for i, n in enumerate(counts) if n]
    if sum(counts) < len(axes):
        blocks.append((REPEAT, len(axes) - sum(counts)))
    return [
        list(zip(axes, (role for role, n in order for _ in range(n)), strict=True)) for order in permutations(blocks)
    ]


def whole(machine: Machine) -> Share:
    """Return the share that is the whole machine: for every mesh axis, the number of all its coordinates."""
    return machine.mesh.sizes


def splits(share: Share, sizes: Sequence[int], levels: Sequence[int]) -> Iterator[tuple[int, Share, Share]]:
    """
    Yield every split of a share in two along one mesh axis, as (axis, first share, second share). The coordinates of
    the second come after those of the first.

    `share` is the number of usable coordinates of each mesh axis; `sizes` and `levels` are each axis's size and machine
    level. Of axes with the same size, level and number of usable coordinates, only one is split.
    """
    tried: set[tuple[int, int, int]] = set()
    for axis, (count, size, level) in enumerate(zip(share, sizes, levels, strict=True)):
        if count == 1 or (level, size, count) in tried:
            continue
        tried.add((level, size, count))
        for first in range(1, count):
            one, other = ((*share[:axis], n, *share[axis + 1 :]) for n in (first, count - first))
            yield axis, one, other


def view_at(assignment: Assignment, start: Sequence[int]) -> Assignment:
    """
    Return a view (the role of each mesh axis) moved to a share of the machine that begins at `start`, a coordinate per
    mesh axis: where it is pinned at coordinate 0 of an axis (uses only the devices there), at `start[axis]` instead.
    """
    return tuple(pinned_at(start[a]) if role == pinned_at(0) else role for a, role in enumerate(assignment))


def task_count(degrees: Degrees) -> int:
    """
    Return the number of tasks of an operator with these degrees ((role, degree) pairs): the product of the degrees.
    """
    return prod(d for _, d in degrees)
