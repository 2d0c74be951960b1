"""
Count the bytes that each algorithm of a collective sends over the levels its groups span (NCCL's rings and trees).

All groups of a machine run the collective at once; `machine.link_traffic` adds up what they put on every link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, prod


@dataclass(frozen=True, slots=True)
class Crossing:
    """
    The traffic of one group of a collective across one level, in bytes per byte of a device's piece.

    It counts messages between devices that differ in that level and in no outer one.
    """

    level: int
    """The number of the level, outermost 0."""
    device: float
    """Bytes sent (or received, if that is more) by the busiest device."""
    member: float
    """Bytes sent by all devices of the group in the busiest member."""
    total: float
    """Bytes sent by all members of one instance of the level (by all GPUs of one node, say)."""
    pattern: str
    """
    The receivers: `neighbour` (one other member), `rings` (through as many rings as the level has), `spread` (to all
    others alike), `exchange` (rings or spread, whichever is better), `chain` (up and down a chain or tree).
    """
    both: bool = True
    """Whether the busiest device sends and receives that much at once."""


Phase = tuple[Crossing, ...]
"""The crossings that happen at the same time and share links."""


@dataclass(frozen=True, slots=True)
class CollectiveSchedule:
    """
    An algorithm of a collective (a ring, a tree): phases that run one after the other, and the number of successive
    messages per level.
    """

    algorithm: str
    """`ring`, `tree`, `hierarchical` (level by level) or `direct`."""
    phases: tuple[Phase, ...]
    hops: tuple[tuple[int, float], ...]
    """(level, number of messages that follow one another)."""

    @property
    def tree(self) -> bool:
        """Whether messages go along a tree, rather than a ring or directly from member to member."""
        return self.algorithm == "tree"


Span = tuple[int, int]
"""A level, and the number of a group's devices along it."""


def _inside(spans: Sequence[Span], i: int) -> int:
    """Return the number of a group's devices in one member of the i-th level it spans."""
    return prod(n for _, n in spans[i + 1 :])


def _uniform(level: int, n: int, m: int, device: float, pattern: str) -> Crossing:
    return Crossing(level, device, m * device, n * m * device, pattern)


# --- rings: every device sends to the next; as many rings as there are ways out of a member ---------------------------


def _ring_hops(spans: Sequence[Span], times: float = 1) -> tuple[tuple[int, float], ...]:
    return tuple((level, times * prod(n for _, n in spans[:i]) * (size - 1)) for i, (level, size) in enumerate(spans))


def _ring(spans: Sequence[Span], edge: float, times: float = 1) -> CollectiveSchedule:
    """Send `edge` bytes over each edge of the ring for every byte of a piece."""
    crossings: list[Crossing] = []
    for i, (level, n) in enumerate(spans):
        m = _inside(spans, i)
        each = edge if i == 0 else edge * (n - 1) / n
        crossings.append(_uniform(level, n, m, each / m, "rings"))
    return CollectiveSchedule("ring", (tuple(crossings),), _ring_hops(spans, times))


# --- trees: a chain in each member, a double binary tree over the outermost level (NCCL) ------------------------------


def _double_tree(spans: Sequence[Span]) -> CollectiveSchedule:
    """
    Return a double binary tree, each tree with half of the bytes; members take turns at being the head of their chain.
    """
    crossings: list[Crossing] = []
    for i, (level, n) in enumerate(spans):
        crossings.append(Crossing(level, 2.0 / _inside(spans, i), 2.0, 2.0 * (n - 1), "chain"))
    return CollectiveSchedule("tree", (tuple(crossings),), _tree_hops(spans, 2))


def _rooted_tree(spans: Sequence[Span]) -> CollectiveSchedule:
    """Return a binary tree."""
    crossings: list[Crossing] = []
    for i, (level, n) in enumerate(spans):
        sent = 2.0 if i == 0 and n > 3 else 1.0
        crossings.append(Crossing(level, sent, sent, n - 1.0, "neighbour"))
    return CollectiveSchedule("tree", (tuple(crossings),), _tree_hops(spans, 1))


def _tree_hops(spans: Sequence[Span], times: float) -> tuple[tuple[int, float], ...]:
    return tuple((level, times * (n - 1 if i else ceil(log2(n)))) for i, (level, n) in enumerate(spans))


# --- hierarchical: level by level -------------------------------------------------------------------------------------


def _gather_phases(spans: Sequence[Span], bytes: float) -> list[Phase]:
    """Return the phases of a hierarchical all-gather: the outermost level first, while pieces are small."""
    phases: list[Phase] = []
    for i, (level, n) in enumerate(spans):
        phases.append((_uniform(level, n, _inside(spans, i), (n - 1) * bytes, "exchange"),))
        bytes *= n
    return phases


def _level_hops(spans: Sequence[Span], times: float = 1) -> tuple[tuple[int, float], ...]:
    return tuple((level, times * (n - 1)) for level, n in spans)


def _size(spans: Sequence[Span]) -> int:
    return prod(n for _, n in spans)


def _all_gather(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    phases = tuple(_gather_phases(spans, 1.0))
    return [_ring(spans, _size(spans) - 1), CollectiveSchedule("hierarchical", phases, _level_hops(spans))]


def _reduce_scatter(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    n = _size(spans)
    phases = tuple(reversed(_gather_phases(spans, 1 / n)))
    return [_ring(spans, (n - 1) / n), CollectiveSchedule("hierarchical", phases, _level_hops(spans))]


def _all_reduce(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    n = _size(spans)
    out = _gather_phases(spans, 1 / n)
    phases = (*reversed(out), *out)
    return [
        _ring(spans, 2 * (n - 1) / n, 2),
        CollectiveSchedule("hierarchical", phases, _level_hops(spans, 2)),
        _double_tree(spans),
    ]


def _all_to_all(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    size = _size(spans)
    direct: list[Crossing] = []
    hops: list[tuple[int, float]] = []
    phases: list[Phase] = []
    for i, (level, n) in enumerate(spans):
        m = _inside(spans, i)
        direct.append(_uniform(level, n, m, (n - 1) * m / size, "spread"))
        hops.append((level, (n - 1) * m))
        phases.append((_uniform(level, n, m, (n - 1) / n, "spread"),))
    return [
        CollectiveSchedule("direct", (tuple(direct),), tuple(hops)),
        CollectiveSchedule("hierarchical", tuple(phases), _level_hops(spans)),
    ]


# --- neighbours, and one device of each group -------------------------------------------------------------------------


def _halo(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    """Return the exchange of neighbours, all at once; in a group that spans levels, some are neighbours across each."""
    crossings = tuple(Crossing(level, 1.0, 1.0, float(n), "neighbour") for level, n in spans)
    return [CollectiveSchedule("direct", (crossings,), ((spans[0][0], 1),))]


def _broadcast(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    return [_ring(spans, 1.0), _rooted_tree(spans)]


def _from_one(spans: Sequence[Span], bytes: float) -> list[CollectiveSchedule]:
    """Return the schedule in which one device sends `bytes` to each other device, or receives as much."""
    crossings: list[Crossing] = []
    hops: list[tuple[int, float]] = []
    for i, (level, n) in enumerate(spans):
        m = _inside(spans, i)
        sent = (n - 1) * m * bytes
        crossings.append(Crossing(level, sent, sent, sent, "spread", both=False))
        hops.append((level, (n - 1) * m))
    return [CollectiveSchedule("direct", (tuple(crossings),), tuple(hops))]


def _send(spans: Sequence[Span]) -> list[CollectiveSchedule]:
    crossing = Crossing(spans[0][0], 1.0, 1.0, 1.0, "neighbour", both=False)
    return [CollectiveSchedule("direct", ((crossing,),), ((spans[0][0], 1),))]


SCHEDULES: Mapping[str, Callable[[Sequence[Span]], list[CollectiveSchedule]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "halo": _halo,
    "halo_reduce": _halo,
    "broadcast": _broadcast,
    "reduce": _broadcast,
    "scatter": lambda spans: _from_one(spans, 1 / _size(spans)),
    "gather": lambda spans: _from_one(spans, 1.0),
    "send": _send,
    "ring_shift": _halo,
    "count_rows": _all_gather,
    "send_rows": _all_to_all,
    "return_rows": _all_to_all,
}
"""
The algorithms of each kind, for groups that span at least one level. Bytes are those of the piece before it; of halo
and halo_reduce, the border that a device between two others receives.
"""
