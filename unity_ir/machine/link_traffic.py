"""
Price a collective on nested levels from their symmetry: bytes per kind of link, without visiting single devices.

`machine.graph` finds the same by routing every message over an explicit graph; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from unity_ir.machine.collectives import CollectiveSchedule, Crossing, Phase
from unity_ir.machine.links import Level, Protocol, Wire

LinkKey = tuple[str, int]
"""`port` or `hub`, and its level."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A kind of link that messages across a level go over, and which devices share one such link."""

    key: LinkKey
    below: int | None
    """The number of the level whose members have one each; None if every device has one."""
    wire: Wire
    bus: bool = False
    """Whether all members of the level's instance share it."""


def devices_per_member(levels: Sequence[Level], i: int) -> int:
    """Return the number of devices in one member (a node, a GPU) of level number `i`, outermost 0."""
    return prod(level.size for level in levels[i + 1 :])


def _crossing_links(levels: Sequence[Level], i: int) -> tuple[LinkUse, ...]:
    """
    Return the kinds of links that a message between two members of level number `i` (outermost 0) takes on one of its
    sides: from the switch or medium that joins the members down to a device, outermost first.
    """
    level = levels[i]
    uses = [LinkUse(("port", i), None if level.port == "device" else i, level.wire, level.link == "bus")]
    return tuple(uses) if level.port == "device" else (*uses, *_to_hub(levels, i + 1))


def _to_hub(levels: Sequence[Level], first: int) -> list[LinkUse]:
    """Return the links from a device to the hub of the member that level `first` is in."""
    uses: list[LinkUse] = []
    for j in range(first, len(levels)):
        level = levels[j]
        if level.hub is not None:
            uses.append(LinkUse(("hub", j), j, level.hub))
            continue
        uses.append(LinkUse(("port", j), None if level.port == "device" else j, level.wire, level.link == "bus"))
        if level.port == "device":
            break
    return uses


def cut_off_level(levels: Sequence[Level]) -> Level | None:
    """
    Return a level that makes a machine with these `levels` (outermost first) invalid; None if there is none. By an
    outer level, whose `port` is `member`, all devices in one of that outer level's members share a port. But the
    members of the level returned are linked to each other only (`ring`, `all`, `links`) and have no hub, so no link
    leads to the port.
    """
    for i, level in enumerate(levels):
        if level.port == "member":
            for use in _to_hub(levels, i + 1):
                kind, j = use.key
                if kind == "port" and levels[j].link not in ("switch", "bus"):
                    return levels[j]
    return None


def _pattern_share(level: Level, n: int, pattern: str) -> float:
    """
    Return the fraction of the bytes leaving a member that goes over its busiest link; above 1 where groups share links.
    """
    match level.link, pattern:
        case ("all", "neighbour"):
            return 1.0
        case ("all", "chain"):
            return 0.5
        case ("all", "rings"):
            return 1 / sum(gcd(k, n) == 1 for k in range(1, n))
        case ("all", _):
            return 1 / (n - 1)
        case ("ring", _):
            return _ring_share(level.size, n, pattern)
        case _:
            return 1.0


def _ring_share(size: int, n: int, pattern: str) -> float:
    """Return the share on a ring. Groups that are not neighbours share links; the worst choice of axes is taken."""
    stride = size // n
    if n == 2 == size:
        return 1.0
    spread = stride * (n * (n + 2) / 8 if n % 2 == 0 else (n * n - 1) / 8) / (n - 1)
    # Messages to the opposite side are not split between both ways.
    rings = float(stride) if n == 2 else 0.5 if stride == 1 else max(1.0, stride / 2)
    shares = {"neighbour": float(stride), "chain": float(stride), "rings": rings, "spread": spread}
    return min(rings, spread) if pattern == "exchange" else shares[pattern]


def _loads(levels: Sequence[Level], sizes: Mapping[int, int], crossing: Crossing) -> dict[LinkKey, float]:
    """
    Return, per kind of link, the seconds per byte of a piece that a crossing keeps the busiest of these links in use.
    """
    i = crossing.level
    out: dict[LinkKey, float] = {}

    def inside(j: int) -> int:
        return prod(n for k, n in sizes.items() if k > j)

    for use in _crossing_links(levels, i):
        j = use.key[1]
        ways = 2.0 if crossing.both else 1.0
        if use.bus and j == i:
            bytes = devices_per_member(levels, i - 1) / inside(i - 1) * crossing.total
        elif use.bus:
            m = inside(j - 1)
            bytes = devices_per_member(levels, j - 1) / m * min(crossing.member, m * crossing.device) * ways
        else:
            at = len(levels) - 1 if use.below is None else use.below
            m = inside(at)
            bytes = devices_per_member(levels, at) / m * min(crossing.member, m * crossing.device)
            bytes *= 1.0 if use.wire.duplex else ways
            if j == i:
                bytes *= _pattern_share(levels[i], sizes[i], crossing.pattern)
        out[use.key] = bytes / use.wire.bandwidth
    return out


def _phase_loads(levels: Sequence[Level], sizes: Mapping[int, int], phase: Phase) -> dict[LinkKey, float]:
    """
    Return the seconds per byte of a device's shard for which a phase of a collective keeps each kind of link busy; a
    kind is (`port` or `hub`, level number).

    `sizes` maps level numbers (outermost 0) to the number of a group's devices along each level.
    """
    out: dict[LinkKey, float] = {}
    for crossing in phase:
        for key, seconds in _loads(levels, sizes, crossing).items():
            out[key] = out.get(key, 0.0) + seconds
    return out


def hop(levels: Sequence[Level], i: int, n: int, protocol: str, schedule: CollectiveSchedule) -> float:
    """
    Return the latency in seconds of an empty message between two members of level number `i` (outermost 0): that of the
    level's own link, and of the links between it and the devices on both sides.

    `n` is the number of devices that a group has along the level. `protocol` is the message protocol's name (NCCL's
    `LL`, `LL128`, `Simple`). `schedule` is the algorithm, since trees, rings and direct messages differ in latency.
    """
    own, *others = _crossing_links(levels, i)
    tree = schedule.tree
    seconds = own.wire.hop(protocol, tree)
    to_all = any(c.level == i and c.pattern == "spread" for phase in schedule.phases for c in phase)
    if levels[i].link == "ring" and (to_all or n < levels[i].size):
        # Who is not a neighbour is at most on the opposite side.
        seconds *= levels[i].size // 2
    for use in others:
        # A port is half of the way from one member to another, and there are two of them.
        seconds += use.wire.hop(protocol, tree) * (2 if use.key[0] == "hub" else 1)
    return seconds


def line(
    levels: Sequence[Level], sizes: Mapping[int, int], schedule: CollectiveSchedule, protocol: Protocol
) -> tuple[float, float]:
    """
    Return the cost of one algorithm of a collective with one message protocol as a line: (seconds before the first
    byte, seconds per byte of a device's shard before the collective). All groups of the machine run at once.

    `sizes` maps level numbers (outermost 0) to the number of a group's devices along each level; `schedule` must be
    made for these, by `machine.collectives.SCHEDULES`.
    """
    tree = schedule.tree
    start = protocol.tree if tree else protocol.ring
    start += sum(hops * hop(levels, i, sizes[i], protocol.name, schedule) for i, hops in schedule.hops)
    seconds = sum(max(_phase_loads(levels, sizes, phase).values()) for phase in schedule.phases)
    return start, seconds / (protocol.tree_bandwidth if tree else protocol.ring_bandwidth)
