"""
List the messages of collective algorithms one by one, for machines that are not symmetric.

The algorithms are those of `machine.collectives`, in the same order. A group is an array with one dimension per level
it spans; messages go between members of the array, in bytes per byte of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil, gcd, log2, prod

Member = tuple[int, ...]
GroupShape = tuple[int, ...]
Message = tuple[int, int, float]
"""A message: source device, target device, bytes."""
Indexed = tuple[Member, Member, float]
"""A message between members of a group: source index, target index, bytes per byte of a piece."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """
    The messages of an algorithm of a collective in one group, by phase; each phase has alternatives, of which the
    fastest is used.
    """

    tree: bool
    """Whether messages go along a tree, rather than a ring or directly from member to member."""
    phases: tuple[tuple[list[Indexed], ...], ...]
    """By phase, one after the other, the messages of each alternative."""
    hops: tuple[tuple[int, float], ...]
    """(dimension of the group, number of successive messages along it)."""


def _indices(shape: GroupShape) -> Iterator[Member]:
    return product(*map(range, shape))


def _shifted(index: Member, dim: int, by: int, size: int) -> Member:
    return (*index[:dim], (index[dim] + by) % size, *index[dim + 1 :])


# --- rings ------------------------------------------------------------------------------------------------------------


def _order(shape: GroupShape, start: Member, stride: Member) -> list[Member]:
    """Return a ring through a group as a list of members: each dimension from `start` in steps of `stride`."""
    axes = [[(s + d * k) % n for k in range(n)] for n, s, d in zip(shape, start, stride, strict=True)]
    return [tuple(i) for i in product(*axes)]


def _rings(shape: GroupShape, edge: float) -> tuple[list[Indexed], ...]:
    """
    Return three alternatives of rings that leave members by different devices: with one step,
    both ways, with all steps.
    """
    starts = [(0, *inner) for inner in _indices(shape[1:])]
    some = [(1,) * len(shape)]
    both = [*some, tuple(n - 1 for n in shape)]
    every = list(product(*([k for k in range(1, n) if gcd(k, n) == 1] for n in shape)))
    return tuple(_ring_messages(shape, starts, strides, edge) for strides in (some, both, every))


def _ring_messages(
    shape: GroupShape, starts: Sequence[Member], strides: Sequence[Member], edge: float
) -> list[Indexed]:
    each = edge / len(starts) / len(strides)
    orders = [_order(shape, start, stride) for start in starts for stride in strides]
    return [(a, b, each) for order in orders for a, b in zip(order, (*order[1:], order[0]), strict=True)]


def _ring(shape: GroupShape, edge: float, times: float = 1) -> Traffic:
    hops = tuple((d, times * prod(shape[:d]) * (n - 1)) for d, n in enumerate(shape))
    return Traffic(False, (_rings(shape, edge),), hops)


# --- trees ------------------------------------------------------------------------------------------------------------


def _parent(rank: int, size: int) -> int:
    """Return the parent of a rank in NCCL's binary tree, whose leaves are the odd ranks; for rank 0, returns 0."""
    if rank == 0:
        return 0
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < size else rank ^ bit


def _double_edges(size: int) -> list[tuple[int, int]]:
    """Return (child, parent) pairs of two trees, such that a leaf of one is an inner vertex of the other."""
    one = [(r, _parent(r, size)) for r in range(1, size)]

    def turn(rank: int) -> int:
        return size - 1 - rank if size % 2 == 0 else (rank + 1) % size

    return one + [(turn(a), turn(b)) for a, b in one]


def _edges(shape: GroupShape, head: Member, outer: Sequence[tuple[int, int]], part: float) -> list[Indexed]:
    """
    Return (child, parent, part) messages: `outer` between heads of members, and chains that begin at a head inside.
    """
    found: list[Indexed] = [((a, *head), (b, *head), part) for a, b in outer]
    part = part * len(outer) / (shape[0] - 1)
    for d in range(1, len(shape)):
        for before in _indices(shape[:d]):
            for k in range(shape[d] - 1):
                a, b = (head[d - 1] + k + 1) % shape[d], (head[d - 1] + k) % shape[d]
                found.append(((*before, a, *head[d:]), (*before, b, *head[d:]), part))
    return found


def _double_tree(shape: GroupShape) -> Traffic:
    heads = list(_indices(shape[1:]))
    outer = _double_edges(shape[0])
    up = [e for head in heads for e in _edges(shape, head, outer, 0.5 / len(heads))]
    return Traffic(True, (([*up, *_reversed(up)],),), _tree_hops(shape, 2))


def _rooted_tree(shape: GroupShape, up: bool) -> Traffic:
    outer = [(r, _parent(r, shape[0])) for r in range(1, shape[0])]
    edges = _edges(shape, (0,) * (len(shape) - 1), outer, 1.0)
    return Traffic(True, ((edges if up else _reversed(edges),),), _tree_hops(shape, 1))


def _reversed(messages: Sequence[Indexed]) -> list[Indexed]:
    return [(b, a, bytes) for a, b, bytes in messages]


def _tree_hops(shape: GroupShape, times: float) -> tuple[tuple[int, float], ...]:
    return tuple((d, times * (n - 1 if d else ceil(log2(n)))) for d, n in enumerate(shape))


# --- level by level ---------------------------------------------------------------------------------------------------


def _spread(shape: GroupShape, dim: int, each: float) -> list[Indexed]:
    """Return the messages by which every device sends `each` to every other along a dimension."""
    n = shape[dim]
    return [(i, _shifted(i, dim, by, n), each) for i in _indices(shape) for by in range(1, n)]


def _exchange(shape: GroupShape, dim: int, bytes: float) -> tuple[list[Indexed], ...]:
    """
    Return alternatives by which every device sends `bytes` along a dimension: a ring, both
    ways around it, to all alike.
    """
    n = shape[dim]
    one = [(i, _shifted(i, dim, 1, n), bytes) for i in _indices(shape)]
    both = [(i, _shifted(i, dim, by, n), bytes / 2) for i in _indices(shape) for by in (1, n - 1)]
    return one, both, _spread(shape, dim, bytes / (n - 1))


def _level_hops(shape: GroupShape, times: float = 1) -> tuple[tuple[int, float], ...]:
    return tuple((d, times * (n - 1)) for d, n in enumerate(shape))


def _gather_phases(shape: GroupShape, bytes: float) -> list[tuple[list[Indexed], ...]]:
    phases: list[tuple[list[Indexed], ...]] = []
    for d, n in enumerate(shape):
        phases.append(_exchange(shape, d, (n - 1) * bytes))
        bytes *= n
    return phases


def _all_gather(shape: GroupShape) -> list[Traffic]:
    phases = tuple(_gather_phases(shape, 1.0))
    return [_ring(shape, prod(shape) - 1), Traffic(False, phases, _level_hops(shape))]


def _reduce_scatter(shape: GroupShape) -> list[Traffic]:
    n = prod(shape)
    phases = tuple(reversed(_gather_phases(shape, 1 / n)))
    return [_ring(shape, (n - 1) / n), Traffic(False, phases, _level_hops(shape))]


def _all_reduce(shape: GroupShape) -> list[Traffic]:
    n = prod(shape)
    out = _gather_phases(shape, 1 / n)
    return [
        _ring(shape, 2 * (n - 1) / n, 2),
        Traffic(False, (*reversed(out), *out), _level_hops(shape, 2)),
        _double_tree(shape),
    ]


def _peer_hops(shape: GroupShape) -> tuple[tuple[int, float], ...]:
    return tuple((d, (n - 1) * prod(shape[d + 1 :])) for d, n in enumerate(shape))


def _all_to_all(shape: GroupShape) -> list[Traffic]:
    n = prod(shape)
    direct = [(a, b, 1 / n) for a in _indices(shape) for b in _indices(shape) if a != b]
    phases = tuple((_spread(shape, d, 1 / size),) for d, size in enumerate(shape))
    return [Traffic(False, ((direct,),), _peer_hops(shape)), Traffic(False, phases, _level_hops(shape))]


# --- neighbours, and one device of each group -------------------------------------------------------------------------


def _halo(shape: GroupShape) -> list[Traffic]:
    # All of the border may be on one side.
    order = list(_indices(shape))
    messages = [(a, b, 1.0) for a, b in pairwise(order)]
    return [Traffic(False, ((messages,),), ((0, 1),))]


def _broadcast(shape: GroupShape) -> list[Traffic]:
    return [_ring(shape, 1.0), _rooted_tree(shape, up=False)]


def _reduce(shape: GroupShape) -> list[Traffic]:
    return [_ring(shape, 1.0), _rooted_tree(shape, up=True)]


def _root(shape: GroupShape, bytes: float, away: bool) -> list[Traffic]:
    root, *others = _indices(shape)
    messages = [(root, i, bytes) if away else (i, root, bytes) for i in others]
    return [Traffic(False, ((messages,),), _peer_hops(shape))]


def _send(shape: GroupShape) -> list[Traffic]:
    root = (0,) * len(shape)
    return [Traffic(False, (([(root, (1, *root[1:]), 1.0)],),), ((0, 1),))]


def _shift(shape: GroupShape) -> list[Traffic]:
    order = list(_indices(shape))
    messages = [(a, b, 1.0) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return [Traffic(False, ((messages,),), ((0, 1),))]


PLANS: Mapping[str, Callable[[GroupShape], list[Traffic]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "halo": _halo,
    "halo_reduce": _halo,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": lambda shape: _root(shape, 1 / prod(shape), True),
    "gather": lambda shape: _root(shape, 1.0, False),
    "send": _send,
    "ring_shift": _shift,
    "count_rows": _all_gather,
    "send_rows": _all_to_all,
    "return_rows": _all_to_all,
}
"""Algorithms of each kind of collective for a group's shape, in the order of `collectives.SCHEDULES`."""
