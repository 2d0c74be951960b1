"""
Represent machines that are not symmetric as explicit graphs of vertices (devices, hubs, switches) and links.

Devices are numbers. A hub is `nodes:0` (of member 0 of the level nodes), a switch `nodes:switch:0` (of the first
instance of the level); other vertices are named in the machine's links. A message takes the route of least
latency, and of those the widest.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError
from unity_ir.machine.bounds import DEMANDS, Capacity
from unity_ir.machine.link_traffic import devices_per_member
from unity_ir.machine.links import Level, Link, Protocol, Wire
from unity_ir.machine.transfers import PLANS, Indexed, Message, Traffic
from unity_ir.pcg.collectives import FROM_ONE
from unity_ir.pcg.sharding import Mesh

MAX_DEVICES = 1024
"""Largest machine that may have links of its own: its messages are routed one by one."""

Vertex = int | str


@dataclass(frozen=True, slots=True)
class Arc:
    """One direction of a link."""

    target: Vertex
    resource: int
    """
    The number of the resource whose bandwidth its bytes take (`Topology.bandwidths`): duplex links have one for each
    direction.
    """
    wire: Wire
    share: float = 1.0
    """The fraction of the wire's latency that this arc has."""


@dataclass(frozen=True)
class Topology:
    """
    A machine as a graph: the outgoing `arcs` (directed links) of each vertex (a device, hub or switch), and
    `bandwidths`: the bytes/s that arcs draw on, by number (`Arc.resource`).

    Each arc takes the bandwidth of one resource. Several arcs may share one: those of a bus, or both directions of a
    link that is not duplex.
    """

    arcs: Mapping[Vertex, tuple[Arc, ...]]
    bandwidths: tuple[float, ...]
    levels: tuple[Level, ...]

    @staticmethod
    def of(name: str, levels: tuple[Level, ...], links: tuple[Link, ...]) -> Topology:
        """
        Build the graph of the machine called `name` from its levels, outermost first, and `links`, those that it has in
        addition to the levels'.

        Raises `UnityError` if it has more than `MAX_DEVICES` devices, devices that no link connects, or vertices where
        only one of `links` ends.
        """
        devices = prod(level.size for level in levels)
        if devices > MAX_DEVICES:
            raise UnityError(
                f"machine: {name}: {devices} devices are too many for a machine with links of its own; "
                f"at most {MAX_DEVICES} are allowed"
            )
        made = _Builder(levels)
        made.levels_()
        own = frozenset(made.arcs)
        for link in links:
            made.join(*link.between, link.wire)
        topology = Topology({v: tuple(a) for v, a in made.arcs.items()}, tuple(made.bandwidths), levels)
        topology.check_connected(name, devices, own)
        return topology

    def check_connected(self, name: str, devices: int, own: Container[Vertex]) -> None:
        """
        Raise `UnityError` if one of the first `devices` devices is not connected to device 0, or if only one link ends
        at a vertex that is no device, such as a switch, and not in `own`.

        `name` is the machine's, for the message; `own` are the vertices that its levels make, where one link may end.
        """
        for vertex, arcs in self.arcs.items():
            if isinstance(vertex, str) and len(arcs) == 1 and vertex not in own:
                raise UnityError(f"machine: {name}: only one link ends at {vertex!a}; a vertex joins two or more")
        seen: set[Vertex] = {0}
        queue: list[Vertex] = [0]
        while queue:
            for arc in self.arcs.get(queue.pop(), ()):
                if arc.target not in seen:
                    seen.add(arc.target)
                    queue.append(arc.target)
        for device in range(devices):
            if device not in seen:
                raise UnityError(f"machine: {name}: device {device} is not connected to device 0; add a link")

    # --- routes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _routes(self) -> dict[Vertex, dict[Vertex, tuple[Vertex, Arc]]]:
        return {}

    def route(self, source: int, target: int) -> list[Arc]:
        """
        Return the arcs (directed links), in order, that a message takes from device `source` to device `target`: the
        route of least latency; if several have it, the one of most bandwidth.
        """
        if source not in self._routes:
            self._routes[source] = self._routes_from(source)
        via, path, at = self._routes[source], list[Arc](), target
        vertex: Vertex = at
        while vertex != source:
            vertex, arc = via[vertex]
            path.append(arc)
        return path[::-1]

    def _routes_from(self, source: Vertex) -> dict[Vertex, tuple[Vertex, Arc]]:
        best: dict[Vertex, tuple[float, float, int]] = {source: (0.0, -float("inf"), 0)}
        via: dict[Vertex, tuple[Vertex, Arc]] = {}
        tie = 0
        queue: list[tuple[tuple[float, float, int], int, Vertex]] = [(best[source], tie, source)]
        while queue:
            so_far, _, vertex = heapq.heappop(queue)
            if so_far > best[vertex]:
                continue
            for arc in self.arcs.get(vertex, ()):
                latency = so_far[0] + arc.wire.latency * arc.share
                reached = (latency, max(so_far[1], -self.bandwidths[arc.resource]), so_far[2] + 1)
                if reached < best.get(arc.target, (float("inf"), 0.0, 0)):
                    best[arc.target], via[arc.target] = reached, (vertex, arc)
                    tie += 1
                    heapq.heappush(queue, (reached, tie, arc.target))
        return via

    def latency(self, source: int, target: int, protocol: str, tree: bool) -> float:
        """
        Return the seconds that an empty message takes from device `source` to device `target` by its route; 0 from a
        device to itself.

        `protocol` is the message protocol's name (NCCL's `LL`, `LL128`, `Simple`); `tree` says whether the message is
        part of a tree algorithm, else of a ring.
        """
        return sum(arc.wire.hop(protocol, tree) * arc.share for arc in self.route(source, target))

    def busiest_link_seconds(self, messages: Iterable[Message]) -> float:
        """
        Return the seconds, without latency, that all messages (source, target, bytes) take when sent at once: those of
        the link or medium that is busiest. Sources and targets are device numbers.
        """
        loads = np.zeros(len(self.bandwidths))
        for source, target, bytes in messages:
            for arc in self.route(source, target):
                loads[arc.resource] += bytes
        return float(np.max(loads / np.array(self.bandwidths), initial=0.0))

    # --- collectives --------------------------------------------------------------------------------------------------

    def lines(
        self, kind: str, mesh: Mesh, axes: Sequence[int], axis_levels: Sequence[int], protocols: Sequence[Protocol]
    ) -> tuple[tuple[float, float], ...]:
        """
        Return the cost of a collective, run at once in all groups along the mesh axes `axes`, as lines (seconds before
        the first byte, seconds per byte of a device's shard before it), one per algorithm and protocol. The cost is the
        least of the lines.

        `kind` is the collective's name. `axes` are numbers of axes of `mesh`, at least one, and `axis_levels` has the
        machine level of each axis of the mesh. `protocols` are the message protocols to choose from.
        """
        groups = _groups(mesh, axes, axis_levels)
        out: list[tuple[float, float]] = []
        for traffic in PLANS[kind](groups[0].shape):
            seconds = sum(
                min(self.busiest_link_seconds(_placed(messages, groups)) for messages in choices)
                for choices in traffic.phases
            )
            pairs = _pairs(traffic, groups)
            for protocol in protocols:
                start = protocol.tree if traffic.tree else protocol.ring
                for dim, hops in traffic.hops:
                    each = (self.latency(a, b, protocol.name, traffic.tree) for a, b in pairs[dim])
                    start += hops * max(each, default=0.0)
                out.append((start, seconds / (protocol.tree_bandwidth if traffic.tree else protocol.ring_bandwidth)))
        return tuple(out)

    def least_seconds(self, kind: str, mesh: Mesh, sizes: Mapping[int, int], bytes: float) -> float:
        """
        Return a lower bound on the seconds of a collective by any algorithm, without latency. For each member of each
        level of the machine (each node, each GPU, ..), take the bytes that must leave and enter it, over the bandwidth
        of the links between its devices and the rest of the graph (min-cut); the largest of these is returned. 0 for
        groups of one device.

        In a collective between one device and the others (scatter, gather, reduce, send) that device is in the first
        member of each level, and only the first members count. For a broadcast none does, so the bound is 0.

        `kind` is the collective's name, `mesh` the machine's. `sizes` maps level numbers (outermost 0) to the number of
        a group's devices along each level. `bytes` is the size of a device's shard before the collective.
        """
        n = prod(sizes.values())
        bound = 0.0
        for i in range(len(self.levels)):
            m = prod(k for level, k in sizes.items() if level > i)
            if not any(k > 1 for level, k in sizes.items() if level <= i):
                continue
            size = devices_per_member(self.levels, i)
            # Where members differ, one may do with less than its share of an all-reduce, not with less than its piece.
            out, back = (bytes, bytes) if kind == "all_reduce" else DEMANDS[kind](n, m, bytes)
            if kind in FROM_ONE:
                # The roots of its groups are in the first member; where the others are, their axes say.
                members = range(0, size, size) if kind != "broadcast" else range(0)
            else:
                members = range(0, mesh.devices, size)
            for first in members:
                inside = self._capacity(set(range(first, first + size)))
                bound = max(bound, inside.seconds(out * (size // m), back * (size // m)))
        return bound

    def _capacity(self, devices: set[int]) -> Capacity:
        """Add up the bytes/s out of some devices, with the hubs that only they are joined to."""
        inside: set[Vertex] = set(devices)
        for vertex, arcs in self.arcs.items():
            if isinstance(vertex, str) and all(arc.target in devices for arc in arcs):
                inside.add(vertex)
        found = Capacity()
        seen: set[int] = set()
        for vertex in inside:
            for arc in self.arcs.get(vertex, ()):
                if arc.target not in inside and arc.resource not in seen:
                    seen.add(arc.resource)
                    found = found.plus(arc.wire, 1)
        return found


DeviceGroup = npt.NDArray[np.int64]


def _groups(mesh: Mesh, axes: Sequence[int], axis_levels: Sequence[int]) -> list[DeviceGroup]:
    """Return the groups along mesh axes, as arrays of device numbers with one dimension per level spanned."""
    shape: dict[int, int] = {}
    for axis in axes:
        shape[axis_levels[axis]] = shape.get(axis_levels[axis], 1) * mesh.sizes[axis]
    return [np.array(g).reshape(tuple(shape.values())) for g in mesh.groups(axes)]


def _placed(messages: Sequence[Indexed], groups: Sequence[DeviceGroup]) -> Iterable[Message]:
    for group in groups:
        for source, target, bytes in messages:
            yield int(group[source]), int(group[target]), bytes


def _pairs(traffic: Traffic, groups: Sequence[DeviceGroup]) -> dict[int, set[tuple[int, int]]]:
    """
    Return the pairs of devices that exchange messages, by the outermost dimension of the group in which they differ.
    """
    found: dict[int, set[tuple[int, int]]] = {dim: set() for dim, _ in traffic.hops}
    for source, target, _ in (message for choices in traffic.phases for message in choices[0]):
        dim = next(i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
        found.setdefault(dim, set()).update((int(g[source]), int(g[target])) for g in groups)
    return found


class _Builder:
    """Makes the vertices, arcs and resources of levels."""

    def __init__(self, levels: tuple[Level, ...]):
        self.levels = levels
        self.arcs: dict[Vertex, list[Arc]] = {}
        self.bandwidths: list[float] = []

    def resource(self, bandwidth: float) -> int:
        self.bandwidths.append(bandwidth)
        return len(self.bandwidths) - 1

    def join(self, a: Vertex, b: Vertex, wire: Wire, share: float = 1.0) -> None:
        there = self.resource(wire.bandwidth)
        back = self.resource(wire.bandwidth) if wire.duplex else there
        self.arcs.setdefault(a, []).append(Arc(b, there, wire, share))
        self.arcs.setdefault(b, []).append(Arc(a, back, wire, share))

    def hub(self, level: int, member: int) -> Vertex:
        """Return the vertex from which ports that a member's devices share start; of a single device, itself."""
        inner = level + 1
        if inner == len(self.levels):
            return member
        if self.levels[inner].hub is None and self.levels[inner].link == "switch":
            return self.joint(inner, member)
        return f"{self.levels[level].name}:{member}"

    def joint(self, level: int, instance: int) -> Vertex:
        """Return the vertex of the switch of an instance of a level."""
        return f"{self.levels[level].name}:switch:{instance}"

    def levels_(self) -> None:
        instances = 1
        for i, level in enumerate(self.levels):
            inner = devices_per_member(self.levels, i)
            for instance in range(instances):
                self.level(i, level, instance, inner)
                if level.hub is not None and i > 0:
                    for k in range(level.size):
                        member = instance * level.size + k
                        self.join(self.hub(i, member), self.hub(i - 1, instance), level.hub)
            instances *= level.size

    def level(self, i: int, level: Level, instance: int, inner: int) -> None:
        first = instance * level.size
        members = range(first, first + level.size)
        ports: list[list[Vertex]]
        if level.port == "member":
            ports = [[self.hub(i, k)] for k in members]
        else:
            ports = [list(range(k * inner, (k + 1) * inner)) for k in members]
        match level.link:
            case "switch":
                for vertex in (v for member in ports for v in member):
                    self.join(vertex, self.joint(i, instance), level.wire, 0.5)
            case "bus":
                self.bus(i, level, instance, [v for member in ports for v in member])
            case "all":
                for k, member in enumerate(ports):
                    for a, b in product(member, (v for other in ports[k + 1 :] for v in other)):
                        self.join(a, b, level.wire)
            case "ring":
                for k in range(level.size if level.size > 2 else level.size - 1):
                    self.join(ports[k][0], ports[(k + 1) % level.size][0], level.wire)
            case _:
                pass

    def bus(self, i: int, level: Level, instance: int, vertices: Sequence[Vertex]) -> None:
        """Join vertices by one medium, on which all bytes count against one bandwidth."""
        enter, leave = self.joint(i, instance), f"{level.name}:bus:{instance}"
        self.arcs[enter] = [Arc(leave, self.resource(level.bandwidth), level.wire, 0.0)]
        outside = [self.hub(i - 1, instance)] if i > 0 and level.hub is None else []
        for vertex in (*vertices, *outside):
            share = 0.0 if vertex in outside else 0.5
            self.arcs.setdefault(vertex, []).append(Arc(enter, self.resource(level.bandwidth), level.wire, share))
            self.arcs.setdefault(leave, []).append(Arc(vertex, self.resource(level.bandwidth), level.wire, share))
