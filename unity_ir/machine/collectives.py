"""What a collective costs over the levels its groups span."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod


@dataclass(frozen=True)
class Level:
    """`size` parts (nodes of a cluster, GPUs of a node) and the links between them."""

    name: str
    size: int
    bandwidth: float
    """Bytes/s per device and direction while all devices of the level send at once."""
    latency: float
    """Seconds per hop."""


Spans = list[tuple[int, Level]]
"""Devices along each level a group spans, outermost first."""


def _all_gather(spans: Spans, bytes: float) -> float:
    seconds = 0.0
    for n, link in spans:
        seconds += (n - 1) * link.latency + bytes * (n - 1) / link.bandwidth
        bytes *= n
    return seconds


def _reduce_scatter(spans: Spans, bytes: float) -> float:
    return _all_gather(spans, bytes / prod(n for n, _ in spans))


def _all_reduce(spans: Spans, bytes: float) -> float:
    n, outer = spans[0]
    inner = prod(m for m, _ in spans[1:])
    ring = 2 * (n - 1) * outer.latency + 2 * bytes / inner * (n - 1) / n / outer.bandwidth
    hierarchical = ring + 2 * _reduce_scatter(spans[1:], bytes)
    steps = sum(2 * ceil(log2(m)) * link.latency for m, link in spans)
    tree = steps + 2 * bytes / min(link.bandwidth for _, link in spans)
    return min(hierarchical, tree)


def _all_to_all(spans: Spans, bytes: float) -> float:
    seconds = 0.0
    for n, link in spans:
        seconds += (n - 1) * link.latency + bytes * (n - 1) / n / link.bandwidth
        bytes /= n
    return seconds


def _halo(spans: Spans, bytes: float) -> float:
    """Neighbours send at once; of a group that spans levels, some are neighbours across the slowest."""
    _, outer = spans[0]
    return outer.latency + bytes / outer.bandwidth


def _broadcast(spans: Spans, bytes: float) -> float:
    """A pipelined chain, or a tree."""
    slowest = min(link.bandwidth for _, link in spans)
    return sum(ceil(log2(n)) * link.latency for n, link in spans) + bytes / slowest


def _gather(spans: Spans, bytes: float) -> float:
    """One device receives, or sends, what all others have."""
    return _all_gather(spans, bytes)


def _scatter(spans: Spans, bytes: float) -> float:
    return _gather(spans, bytes / prod(n for n, _ in spans))


COLLECTIVES: Mapping[str, Callable[[Spans, float], float]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "halo": _halo,
    "broadcast": _broadcast,
    "reduce": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "send": _halo,
    "halo_reduce": _halo,
}
