"""
Lower bounds by min-cut: a collective takes at least the bytes that must cross a cut over the bandwidth of the cut.

The cuts are one member of a level against the rest, at every level, and single devices against the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.machine.link_traffic import devices_per_member
from unity_ir.machine.links import Level, Wire


@dataclass(frozen=True, slots=True)
class Capacity:
    """
    The bandwidth of all links between some devices of a machine (a node, say) and the rest, in bytes/s: `duplex` is
    that of links that carry it in both directions at once, `half` that of links whose directions share it.
    """

    duplex: float = 0.0
    half: float = 0.0
    """Bandwidth of links whose directions share it, in bytes/s."""

    def seconds(self, out: float, back: float) -> float:
        """Return the least seconds in which `out` bytes can leave these devices while `back` bytes enter them."""
        one_way = max(out, back) / (self.duplex + self.half)
        return max(one_way, (out + back) / (2 * self.duplex + self.half))

    def plus(self, wire: Wire, count: float) -> Capacity:
        """Return a new capacity: this one and the bandwidth of `count` more links like `wire`."""
        bandwidth = wire.bandwidth * count
        return Capacity(self.duplex + bandwidth * wire.duplex, self.half + bandwidth * (not wire.duplex))


Demand = Callable[[int, int, float], tuple[float, float]]
"""Maps (n devices of a group, m of them in the part, bytes of a piece) to the bytes leaving and entering the part."""


def _all_reduce(n: int, m: int, b: float) -> tuple[float, float]:
    # n / m parts need 2 (n / m - 1) b in all (Patarasuk and Yuan 2009), and one has no less than its share.
    return 2 * (1 - m / n) * b, 2 * (1 - m / n) * b


def _all_gather(n: int, m: int, b: float) -> tuple[float, float]:
    return m * b, (n - m) * b


def _all_to_all(n: int, m: int, b: float) -> tuple[float, float]:
    return m * (n - m) * b / n, m * (n - m) * b / n


DEMANDS: Mapping[str, Demand] = {
    "all_gather": _all_gather,
    "reduce_scatter": lambda n, m, b: ((n - m) * b / n, m * b / n),
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    # Of two parts each has one neighbour, and half of the border may be on its other side.
    "halo": lambda n, m, b: (0.0, b if n > 2 * m else b / 2),
    "halo_reduce": lambda n, m, b: (b if n > 2 * m else b / 2, 0.0),
    "broadcast": lambda n, m, b: (0.0, b),
    "reduce": lambda n, m, b: (b, 0.0),
    "scatter": lambda n, m, b: ((n - m) * b / n, 0.0),
    "gather": lambda n, m, b: (0.0, (n - m) * b),
    "send": lambda n, m, b: (b, 0.0),
    # A part is left by one piece, at least, and entered by one.
    "ring_shift": lambda n, m, b: (b, b),
    "count_rows": _all_gather,
    # Prices are those of even shares.
    "send_rows": _all_to_all,
    "return_rows": _all_to_all,
}


def _capacity(levels: Sequence[Level], i: int) -> Capacity:
    """
    Return the bandwidth in bytes/s of all links that leave one member (a node, a GPU) of level number `i`, outermost 0.
    """
    found = Capacity()
    devices = devices_per_member(levels, i)
    for j in range(i + 1):
        level = levels[j]
        ways = {"all": level.size - 1, "ring": min(level.size - 1, 2)}.get(level.link, 1)
        wire = Wire(level.bandwidth, duplex=level.duplex and level.link != "bus")
        if level.link == "bus":
            found = found.plus(wire, 1)
        elif level.port == "device":
            each = devices_per_member(levels, j) if level.link == "all" else 1
            found = found.plus(wire, ways * devices * each)
        elif j == i:
            found = found.plus(wire, ways)
    hub = levels[i].hub
    return found if hub is None else found.plus(hub, 1)


def _separated_members(levels: Sequence[Level], sizes: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """
    Yield (level, m, groups) for each level of the machine at which some group has devices in more than one member (one
    node, of the level of nodes), so that a collective must send bytes from member to member. `level` is the level's
    number, `m` the number of devices that such a group has in one member, and `groups` the number of groups that have
    devices in it.

    `sizes` maps level numbers (outermost 0) to the number of a group's devices along each level.
    """
    for i in range(len(levels)):
        m = prod(n for k, n in sizes.items() if k > i)
        if any(n > 1 for k, n in sizes.items() if k <= i):
            yield i, m, devices_per_member(levels, i) // m


def least_seconds(kind: str, levels: Sequence[Level], sizes: Mapping[int, int], bytes: float) -> float:
    """
    Return a lower bound on the seconds of a collective by any algorithm, without latency. For each level of the machine
    (nodes, GPUs, ..), take one of its members (one node, say): the bytes that must leave and enter it, over the
    bandwidth of the links that leave it (min-cut). The largest of these is returned; 0 for groups of one device. All
    groups of the machine run at once.

    `kind` is the collective's name, one of `DEMANDS`. `sizes` maps level numbers (outermost 0) to the number of a
    group's devices along each level. `bytes` is the size of a device's shard before the collective; for halo exchanges,
    the border's.
    """
    n = prod(sizes.values())
    bound = 0.0
    for i, m, groups in _separated_members(levels, sizes):
        out, back = DEMANDS[kind](n, m, bytes)
        bound = max(bound, _capacity(levels, i).seconds(out * groups, back * groups))
    return bound
