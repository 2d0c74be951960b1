"""Model a machine: devices in nested levels (nodes, sockets, GPUs), and the links that join them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError
from unity_ir.machine.bounds import least_seconds
from unity_ir.machine.collectives import SCHEDULES
from unity_ir.machine.device import Device, HostLink
from unity_ir.machine.graph import Topology
from unity_ir.machine.link_traffic import line
from unity_ir.machine.links import Level, Link, Protocol
from unity_ir.pcg.collectives import BETWEEN_DEVICES, FREE, ON_DEVICE
from unity_ir.pcg.reshard import Move, sum_over
from unity_ir.pcg.sharding import Mesh, prime_factors
from unity_ir.pcg.types import ELEMENT_BYTES

Floats = npt.NDArray[np.float64]

CostLine = tuple[float, float]
"""Seconds before the first byte, and seconds per byte."""


@dataclass(frozen=True)
class Machine:
    """
    A machine: its kind of device, its nested `levels` (nodes, sockets, GPUs), outermost first, and what its collectives
    cost.
    """

    name: str
    device: Device
    """The device; if kinds are mixed, `slowest` of them, since an operator ends with its slowest device."""
    levels: tuple[Level, ...]
    overhead: float = 6.6e-6
    """Seconds before the first byte of any collective, if there are no `protocols` (NCCL's base latency)."""
    protocols: tuple[Protocol, ...] = ()
    links: tuple[Link, ...] = ()
    """
    Links in addition to those of the levels. With any, collectives are priced over the explicit graph (`topology`).
    """
    kinds: tuple[Device, ...] = ()
    """The kinds of devices, where there are several; else ()."""

    @cached_property
    def mesh(self) -> Mesh:
        """The device mesh, whose axes are the prime factors of each level's size, outermost level first."""
        return Mesh(tuple(p for level in self.levels for p in prime_factors(level.size)))

    @cached_property
    def axis_levels(self) -> tuple[int, ...]:
        """For each mesh axis, the number of the level (outermost 0) whose size it is a factor of."""
        return tuple(i for i, level in enumerate(self.levels) for _ in prime_factors(level.size))

    @cached_property
    def devices(self) -> int:
        """The number of devices: the product of the levels' sizes."""
        return prod(level.size for level in self.levels)

    @property
    def host_link(self) -> HostLink:
        """The link between a device and the memory of its host. Raises `UnityError` if the machine has none."""
        if self.device.host is None:
            raise UnityError(
                f"offload: {self.name} has no link to the host's memory; describe it in [device.host], or leave it out"
            )
        return self.device.host

    def device_of(self, number: int) -> Device:
        """Return the kind of device number `number`, from 0; in a machine of one kind, that kind."""
        named = {kind.name: kind for kind in self.kinds}
        for i, level in enumerate(self.levels):
            if level.kinds:
                inside = prod(inner.size for inner in self.levels[i + 1 :])
                return named[level.kinds[number // inside % level.size]]
        return self.device

    # --- collectives --------------------------------------------------------------------------------------------------

    def lines(self, kind: str, sizes: Mapping[int, int]) -> tuple[CostLine, ...]:
        """
        Return the cost of a collective of `bytes` bytes as lines (a, b), one per algorithm and protocol: a + b * bytes
        seconds (alpha-beta model). The cost is the least of the lines. All groups of the machine run at once.

        `kind` is the collective's name, such as `all_reduce`. `sizes` maps level numbers (outermost 0) to the number of
        a group's devices along each level. The bytes are those of a device's shard before the collective; for halo
        exchanges, of the border.

        For groups of one device there is one line, latency alone. On a machine with `links`, lines are those of the
        worst mesh axes of these sizes.
        """
        spans = tuple((i, sizes[i]) for i in sorted(sizes) if sizes[i] > 1)
        key = (kind, spans)
        if key not in self._lines:
            self._lines[key] = self._lines_of_sizes(kind, spans)
        return self._lines[key]

    def lines_of_axes(self, kind: str, axes: Sequence[int]) -> tuple[CostLine, ...]:
        """
        Return the cost of a collective as lines (a, b), as `lines` does, in the groups along the mesh axes with the
        numbers `axes`. For no axes there is one line, latency alone.

        Without `links` this is `lines` at the sizes of the axes (`sizes_of`). On a machine with links in addition to
        its levels', axes of the same level and size may differ in cost, and this is the cost of these axes.
        """
        axes = tuple(sorted(axes))
        if not self.links:
            return self.lines(kind, self.sizes_of(axes))
        key = (kind, axes)
        if key not in self._lines:
            self._lines[key] = self._lines_of_graph(kind, axes)
        return self._lines[key]

    def _lines_of_graph(self, kind: str, axes: tuple[int, ...]) -> tuple[CostLine, ...]:
        if not axes:
            return self._free
        return self.topology.lines(kind, self.mesh, axes, self.axis_levels, self._spoken)

    def sizes_of(self, axes: Sequence[int]) -> dict[int, int]:
        """
        Return the number of devices that a group along the mesh axes with the numbers `axes` has along each machine
        level, by level number: the argument `sizes` of `lines`.
        """
        sizes: dict[int, int] = {}
        for axis in axes:
            level = self.axis_levels[axis]
            sizes[level] = sizes.get(level, 1) * self.mesh.sizes[axis]
        return sizes

    def _lines_of_sizes(self, kind: str, spans: tuple[tuple[int, int], ...]) -> tuple[CostLine, ...]:
        if not spans:
            return self._free
        if self.links:
            each = [self.lines_of_axes(kind, axes) for axes in self._axes_with(spans)]
            return tuple((max(a for a, _ in lines), max(b for _, b in lines)) for lines in zip(*each, strict=True))
        outer = self.levels[spans[0][0]]
        return tuple(
            line(self.levels, dict(spans), schedule, protocol)
            for schedule in SCHEDULES[kind](spans)
            # A tree over a ring's links would cross them many times.
            if not (schedule.tree and outer.link == "ring")
            for protocol in self._spoken
        )

    def _axes_with(self, spans: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
        """Return every choice of mesh axes that has these sizes along these levels."""
        of_level: list[list[tuple[int, ...]]] = []
        for level, size in spans:
            axes = [i for i, at in enumerate(self.axis_levels) if at == level]
            subsets = [tuple(a for k, a in enumerate(axes) if mask >> k & 1) for mask in range(1 << len(axes))]
            of_level.append([s for s in subsets if prod(self.mesh.sizes[a] for a in s) == size])
        return [tuple(a for part in choice for a in part) for choice in product(*of_level)]

    @cached_property
    def _lines(self) -> dict[tuple[str, tuple[object, ...]], tuple[CostLine, ...]]:
        return {}

    @cached_property
    def _spoken(self) -> tuple[Protocol, ...]:
        return self.protocols or (Protocol("plain", self.overhead, self.overhead, 1.0, 1.0),)

    @cached_property
    def _free(self) -> tuple[CostLine, ...]:
        """The cost lines of a collective of one device: latency alone."""
        return ((min(p.ring for p in self._spoken), 0.0),)

    @cached_property
    def topology(self) -> Topology:
        """The machine as an explicit graph. Raises `UnityError` if it is too large for one."""
        return Topology.of(self.name, self.levels, self.links)

    def collective_time(self, kind: str, sizes: Mapping[int, int], bytes: float) -> float:
        """
        Return the estimated seconds of a collective: the least over its algorithms and protocols, with all groups of
        the machine at once.

        `kind` is the collective's name, such as `all_reduce`. `sizes` maps level numbers (outermost 0) to the number of
        a group's devices along each level. `bytes` is the size of a device's shard before the collective.
        """
        return min(a + b * bytes for a, b in self.lines(kind, sizes))

    def least_seconds(self, kind: str, sizes: Mapping[int, int], bytes: float) -> float:
        """
        Return a lower bound on the seconds of a collective by any algorithm, without latency: the most, over the
        members of the levels (a node, a GPU), of the bytes that must leave and enter one over the bandwidth of the
        links that leave it (min-cut).

        `kind` is the collective's name, such as `all_reduce`. `sizes` maps level numbers (outermost 0) to the number of
        a group's devices along each level. `bytes` is the size of a device's shard before the collective.
        """
        if self.links:
            return self.topology.least_seconds(kind, self.mesh, sizes, bytes)
        return least_seconds(kind, self.levels, sizes, bytes)

    def link_keys(self, axes: Sequence[int]) -> tuple[tuple[int, str], ...]:
        """
        Return which links a collective along the mesh axes with the numbers `axes` keeps busy, as (level number, kind)
        for each machine level that it crosses, outermost first. For simulators: collectives that have a pair in common
        slow each other down.

        `kind` says who shares a link of that level: `device` (every device has a port of its own), `member` (the
        devices of one member, a node say, share its port) or `level` (all members share one medium, such as a bus).
        """
        levels = sorted({self.axis_levels[axis] for axis in axes})
        return tuple((i, "level" if self.levels[i].link in ("bus", "links") else self.levels[i].port) for i in levels)

    # --- what is done on a device -------------------------------------------------------------------------------------

    def copy_seconds(self, bytes: float) -> float:
        """
        Return the estimated seconds of a kernel that copies `bytes` bytes within a device's own memory (reads and
        writes them).
        """
        return self.memory_seconds(1, 2 * bytes)

    def memory_seconds(self, kernels: int, bytes: float) -> float:
        """
        Return the estimated seconds of `kernels` kernels, one after the other, that read and write `bytes` bytes in all
        within a device's own memory.
        """
        return kernels * self.device.launch + bytes / self.device.memory_bandwidth / self.device.efficiency

    def move_seconds(
        self, kind: str, sizes: Mapping[int, int], elements: float, elements_after: float, item: int
    ) -> float:
        """
        Return the seconds of one move of a reshard, whose name is `kind`: a collective, or a step that each device does
        by itself. They are 0 if it moves nothing, measured if the device's profile has it, else estimated.

        A device's shard has `elements` elements of `item` bytes before the move, and `elements_after` after it; for a
        halo exchange, `elements` are those of the border. `sizes` maps level numbers (outermost 0) to the number of a
        group's devices along each level.
        """
        if kind in FREE:
            return 0.0
        if self.device.profile is not None:
            after = kind in ON_DEVICE
            measured = self.device.profile.collective(
                kind, prod(sizes.values()), (elements_after if after else elements) * item
            )
            if measured is not None:
                return measured
        if kind in ON_DEVICE:
            return self.copy_seconds(elements_after * item)
        return self.collective_time(kind, sizes, elements * item)

    def move_lines(
        self, kinds: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    ) -> tuple[npt.NDArray[np.bool_], Floats, Floats]:
        """
        Return the cost of many moves as lines in the bytes of a device's shard: the estimates of `move_seconds`,
        without regard to measurements. A move is (name, sizes), where sizes are pairs (level number, number of a
        group's devices along the level).

        Returns three arrays: [move], whether its cost depends on the bytes after the move (else on those before);
        [line, move], the seconds at no bytes; and [line, move], the seconds per byte. The cost of a move is the least
        of its lines. The arrays are cached and must not be changed.
        """
        if kinds not in self._move_lines:
            local = np.array([kind not in BETWEEN_DEVICES for kind, _ in kinds], dtype=bool)
            memory = self.device.launch, 2 / self.device.memory_bandwidth / self.device.efficiency
            each = [
                ((0.0, 0.0),) if kind in FREE else (memory,) if at_home else self.lines(kind, dict(sizes))
                for (kind, sizes), at_home in zip(kinds, local, strict=True)
            ]
            # Those with fewer lines have their first again.
            most = max(map(len, each), default=1)
            lines = np.array([[*of, *(of[:1] * (most - len(of)))] for of in each]).reshape(len(each), most, 2)
            self._move_lines[kinds] = local, lines[:, :, 0].T.copy(), lines[:, :, 1].T.copy()
        return self._move_lines[kinds]

    @cached_property
    def _move_lines(self) -> dict[object, tuple[npt.NDArray[np.bool_], Floats, Floats]]:
        return {}

    def move_time(self, move: Move, dtype: str) -> float:
        """
        Return the seconds of a reshard move of a value of element type `dtype`, such as `bf16`, as `move_seconds` does;
        but on a machine with links in addition to its levels', moves between devices are always estimated.
        """
        item = ELEMENT_BYTES[dtype]
        elements = move.border or move.elements
        if self.links and move.kind in BETWEEN_DEVICES:
            return min(a + b * elements * item for a, b in self.lines_of_axes(move.kind, move.axes))
        return self.move_seconds(move.kind, self.sizes_of(move.axes), elements, move.elements_after, item)

    def moves_time(self, moves: Sequence[tuple[Move, str]]) -> float:
        """
        Return the seconds of the moves in `moves`, pairs (move, element type), one after the other: the sum of
        `move_time`.
        """
        return sum_over(moves, self.move_time)


def slowest(kinds: Sequence[Device]) -> Device:
    """
    Return a device that is as bad in every respect (speed, bandwidth, memory) as the worst of the devices `kinds`, at
    least one. It has the element types that all of them have, and no curves or profile. If there is only one, returns
    that.
    """
    if len(kinds) == 1:
        return kinds[0]
    dtypes = [d for d in kinds[0].flops if all(d in kind.flops for kind in kinds)]
    return Device(
        name=" + ".join(kind.name for kind in kinds),
        flops={d: min(kind.flops[d] for kind in kinds) for d in dtypes},
        memory_bandwidth=min(kind.memory_bandwidth for kind in kinds),
        memory=(memory := min(kind.memory for kind in kinds)),
        reserve=memory - min(kind.usable for kind in kinds),
        launch=max(kind.launch for kind in kinds),
        efficiency=min(kind.efficiency for kind in kinds),
        host=_slowest_link([kind.host for kind in kinds]),
    )


def _slowest_link(links: Sequence[HostLink | None]) -> HostLink | None:
    """Return a link to the host that is as bad in every respect as the worst of these; None if one is None."""
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return None
    return HostLink(
        from_host=min(link.from_host for link in known),
        to_host=min(link.to_host for link in known),
        both=min((link.both for link in known if link.both), default=0.0),
        latency=max(link.latency for link in known),
        memory=min((link.memory for link in known if link.memory), default=0),
    )
