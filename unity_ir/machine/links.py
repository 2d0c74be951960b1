"""Describe how devices are joined: levels of the machine, hubs, single links, and the protocols of messages."""

from __future__ import annotations

from dataclasses import dataclass, field

LINKS = ("switch", "all", "ring", "bus", "links")
"""
How the members of a level are joined: each has a port to a switch; a link to every other (with ports per
device, every device to every one in other members); a link to either neighbour; one shared medium; or as the
machine's list of links says.
"""

PORTS = ("device", "member")
"""Whether every device below a member has a port of its own, or all of them share the member's."""

ProtocolLatency = tuple[str, float, float]
"""A protocol, and its seconds per hop in rings and in trees."""


@dataclass(frozen=True)
class Wire:
    """
    A link: bandwidth in bytes/s, latency in seconds, and whether both directions have that bandwidth at once (duplex).
    """

    bandwidth: float
    """Bytes/s, in each direction when duplex, else in both together."""
    latency: float = 0.0
    """Seconds per hop."""
    duplex: bool = True
    protocol_latency: tuple[ProtocolLatency, ...] = field(default=(), kw_only=True)
    """Latencies in protocols where they differ from `latency`."""

    def hop(self, protocol: str, tree: bool) -> float:
        """
        Return the latency in seconds of a message over the link with the message protocol named `protocol` (NCCL's
        `LL`, `LL128`, `Simple`), in tree algorithms if `tree`, else in rings. For a protocol that is not in
        `protocol_latency`, it is the link's `latency`.
        """
        for name, ring, of_tree in self.protocol_latency:
            if name == protocol:
                return of_tree if tree else ring
        return self.latency


@dataclass(frozen=True)
class Level:
    """
    One level of a machine: `size` members (the nodes of a cluster, the GPUs of a node) and the links that join them.
    """

    name: str
    size: int
    bandwidth: float
    """Bytes/s of a link (a port, of a switch) and direction; of the whole medium, for a bus."""
    latency: float
    """Seconds from one member to another that it is joined to."""
    link: str = "switch"
    """One of `LINKS`."""
    port: str = "device"
    """One of `PORTS`."""
    duplex: bool = True
    hub: Wire | None = None
    """The link from each member to its surroundings' hub, on the way to ports that devices share (a GPU to its CPU)."""
    protocol_latency: tuple[ProtocolLatency, ...] = ()
    kinds: tuple[str, ...] = ()
    """The name of the kind of device in each member, in order; () where all members have the same."""

    @property
    def wire(self) -> Wire:
        """One of the links that join the level's members: its bandwidth, latency and whether it is duplex."""
        return Wire(self.bandwidth, self.latency, self.duplex, protocol_latency=self.protocol_latency)


@dataclass(frozen=True)
class Link:
    """A link between two vertices: devices by number, hubs and switches by name (see `machine.graph`)."""

    between: tuple[int | str, int | str]
    wire: Wire


@dataclass(frozen=True)
class Protocol:
    """
    A message protocol (NCCL's LL, LL128, Simple): seconds before a collective's first byte, and the fraction of a
    link's bandwidth it reaches.
    """

    name: str
    ring: float
    """Seconds before the first byte, in rings and direct messages."""
    tree: float
    """Seconds before the first byte, in trees."""
    ring_bandwidth: float
    """Fraction of a link's bandwidth that rings reach."""
    tree_bandwidth: float
    """Fraction of a link's bandwidth that trees reach."""
