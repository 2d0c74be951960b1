"""What a machine is: one kind of device, in nested levels (nodes, sockets, GPUs) joined by links."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod

from unity_ir.errors import UnityError
from unity_ir.pcg.layout import Mesh, prime_factors
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.types import ELEMENT_BYTES


@dataclass(frozen=True)
class Device:
    """A kind of device. FLOP/s and bytes/s are peaks; `efficiency` is the part of them a good kernel reaches."""

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s per element type."""
    memory_bandwidth: float
    """Bytes/s."""
    memory: int
    """Bytes."""
    launch: float
    """Seconds a kernel costs at least."""
    efficiency: float = 0.7

    def kernel_time(self, flops: float, bytes: float, dtype: str) -> float:
        """Seconds of one kernel by the roofline."""
        peak = self.flops.get(dtype)
        if peak is None:
            raise UnityError(f"machine: {self.name} has no peak for {dtype}; it has {', '.join(self.flops)}")
        return self.launch + max(flops / peak, bytes / self.memory_bandwidth) / self.efficiency


@dataclass(frozen=True)
class Level:
    """`size` parts (nodes of a cluster, GPUs of a node) and the links between them."""

    name: str
    size: int
    bandwidth: float
    """Bytes/s per device and direction while all devices of the level send at once."""
    latency: float
    """Seconds per hop."""


@dataclass(frozen=True)
class Machine:
    """`levels` from the outermost in. `name` is what `--machine` was given, and finds the machine again."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    overhead: float = 6.6e-6
    """Seconds every collective costs before its first byte (NCCL's base latency, measured by PyTorch's DTensor)."""

    @cached_property
    def mesh(self) -> Mesh:
        """The axes of all levels, each level as its prime factors."""
        return Mesh(tuple(p for level in self.levels for p in prime_factors(level.size)))

    @cached_property
    def axis_levels(self) -> tuple[int, ...]:
        """The level of each mesh axis."""
        return tuple(i for i, level in enumerate(self.levels) for _ in prime_factors(level.size))

    @property
    def devices(self) -> int:
        return prod(level.size for level in self.levels)

    def collective_time(self, kind: str, sizes: Mapping[int, int], bytes: float) -> float:
        """
        Seconds of a collective whose groups have `sizes[level]` devices along each level; `bytes` is the piece before
        it, or, of a halo, its border.

        Hierarchical, as NCCL does it: an all-gather crosses the outer (slower) levels while pieces are small, a
        reduce-scatter the inner ones first, an all-reduce is both; or one ring or tree when that is cheaper. No
        estimate is below the bytes that must enter a device divided by its bandwidth.
        """
        spans = [(sizes[i], self.levels[i]) for i in sorted(sizes) if sizes[i] > 1]
        return self.overhead + _COLLECTIVES[kind](spans, bytes)

    def local_time(self, bytes: float) -> float:
        """Seconds to read and write `bytes` in a device's own memory."""
        return self.device.launch + 2 * bytes / self.device.memory_bandwidth / self.device.efficiency

    def move_seconds(
        self, kind: str, sizes: Mapping[int, int], elements: float, elements_after: float, item: int
    ) -> float:
        """
        Seconds of one reshard move on pieces of so many elements of `item` bytes, in groups as `collective_time` has.
        """
        if kind == "retype":
            return 0.0
        if kind in ("slice", "zero_pad"):
            return self.local_time(elements_after * item)
        return self.collective_time(kind, sizes, elements * item)

    def move_time(self, move: Move, dtype: str) -> float:
        """Seconds of a planner's move."""
        sizes: dict[int, int] = {}
        elements = move.border or move.elements
        for axis in move.axes:
            level = self.axis_levels[axis]
            sizes[level] = sizes.get(level, 1) * self.mesh.sizes[axis]
        return self.move_seconds(move.kind, sizes, elements, move.elements_after, ELEMENT_BYTES[dtype])


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


_COLLECTIVES: Mapping[str, Callable[[Spans, float], float]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "halo": _halo,
    "halo_reduce": _halo,
}
