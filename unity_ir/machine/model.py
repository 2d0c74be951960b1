"""What a machine is: one kind of device, in nested levels (nodes, sockets, GPUs) joined by links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from unity_ir.machine.collectives import COLLECTIVES, Level
from unity_ir.machine.device import Device
from unity_ir.pcg.layout import Mesh, prime_factors
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.types import ELEMENT_BYTES


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
        return self.overhead + COLLECTIVES[kind](spans, bytes)

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
