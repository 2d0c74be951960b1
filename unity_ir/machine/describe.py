"""Machines as tables, as their files and the machine dialect have them: read, checked, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import isfinite, prod
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.machine.curve import curves
from unity_ir.machine.device import Device, profiled
from unity_ir.machine.links import LINKS, PORTS, Level, Link, Protocol, ProtocolLatency, Wire
from unity_ir.machine.loads import stuck
from unity_ir.machine.model import Machine, slowest

Table = Mapping[str, Any]

MAX_DEVICES = 2**20
"""More than any cluster has; beyond it the devices cannot be listed."""

KNOWN = {
    "machine": ("parameter", "overhead", "device", "devices", "levels", "links", "protocols"),
    "device": (*(f.name for f in fields(Device) if f.name != "profile"), "count"),
    "level": tuple(f.name for f in fields(Level)),
    "hub": ("bandwidth", "latency", "duplex", "protocol_latency"),
    "link": ("between", "bandwidth", "latency", "duplex", "protocol_latency"),
    "protocol": ("ring", "tree", "ring_bandwidth", "tree_bandwidth"),
}
"""The fields of each table."""


def machine_from(name: str, described: Table, count: object = None, profile: str = "") -> Machine:
    """
    The machine that tables describe; `count` is what a size of "parameter" stands for, `profile` a file to read rather
    than the profile of such a device that comes with the package.

    Raises `UnityError` for figures that cannot be, and devices that nothing connects.
    """
    reader = _Reader(name)
    try:
        machine = reader.machine(described, described.get("parameter", 1) if count is None else count)
        return replace(machine, device=profiled(machine.device, machine.devices, profile))
    except KeyError as e:
        raise reader.refuse(f"{e.args[0]} is missing") from e
    except TypeError as e:
        raise UnityError(
            f"machine: {name}: device must be a table with a table flops, and levels, devices and links lists of them"
        ) from e


def _items(value: Any) -> list[Any] | None:
    return [*value] if isinstance(value, list | tuple) else None


class _Reader:
    """Reads the tables of one machine; errors name it."""

    def __init__(self, name: str):
        self.name = name
        self.part = ""
        """What is being read."""
        self.protocols: tuple[Protocol, ...] = ()

    def refuse(self, what: str) -> UnityError:
        return UnityError(f"machine: {self.name}: {self.part}{what}")

    def machine(self, described: Table, count: object) -> Machine:
        if "levels" not in described and "links" not in described:
            raise KeyError("levels")
        self.known("machine", described)
        self.protocols = tuple(self.protocol(n, t) for n, t in described.get("protocols", {}).items())
        tables: Sequence[Table] = [described["device"]] if "devices" not in described else described["devices"]
        if "devices" in described and ("device" in described or not isinstance(tables, list)):
            raise self.refuse("devices must be a list of tables, in place of device")
        kinds = tuple(self.device(t) for t in tables)
        self.reading("")
        if len({k.name for k in kinds}) != len(kinds):
            raise self.refuse("two kinds of devices have the same name")
        links = tuple(self.link(t) for t in described.get("links", []))
        if "levels" in described:
            levels = tuple(self.level(t, count) for t in described["levels"])
        else:
            levels = (self.listed(tables, kinds),)
        self.reading("")
        self.check(levels, kinds, links)
        # A level of one member joins nothing.
        levels = tuple(v for v in levels if v.size > 1 or v.hub is not None or v.kinds)
        extra: dict[str, Any] = {}
        if "overhead" in described:
            extra["overhead"] = self.number(described, "overhead", zero=True)
        several = kinds if len(kinds) > 1 else ()
        machine = Machine(
            self.name, slowest(kinds), levels, protocols=self.protocols, links=links, kinds=several, **extra
        )
        if links or any(level.link == "links" for level in levels):
            _ = machine.topology
        return machine

    def listed(self, tables: Sequence[Table], kinds: Sequence[Device]) -> Level:
        """The one level of a machine that has only devices and links."""
        counts = [self.size({"count": 1, **t}, "count") for t in tables]
        if sum(counts) > MAX_DEVICES:
            raise self.refuse(f"{sum(counts)} devices are too many; at most {MAX_DEVICES} are allowed")
        names = tuple(kind.name for kind, count in zip(kinds, counts, strict=True) for _ in range(count))
        return Level("devices", sum(counts), 0.0, 0.0, "links", kinds=names if len(kinds) > 1 else ())

    def reading(self, part: str) -> None:
        """Say in errors what is being read."""
        self.part = f"{part}: " if part else ""

    def check(self, levels: Sequence[Level], kinds: Sequence[Device], links: Sequence[Link]) -> None:
        devices = prod(level.size for level in levels)
        if devices > MAX_DEVICES:
            raise self.refuse(f"{devices} devices are too many; at most {MAX_DEVICES} are allowed")
        if len({level.name for level in levels}) != len(levels):
            raise self.refuse("two levels have the same name")
        mixed = [level for level in levels if level.kinds]
        if len(kinds) > 1 and len(mixed) != 1:
            raise self.refuse(f"{len(kinds)} kinds of devices; one level must say with kinds which members are which")
        if not set(kinds[0].flops).intersection(*(kind.flops for kind in kinds)):
            raise self.refuse("no element type is common to all kinds of devices")
        for level in mixed:
            for unknown in sorted(set(level.kinds) - {k.name for k in kinds}):
                raise self.refuse(f"level {level.name}: there is no kind of device {unknown!a}")
            if len(level.kinds) != level.size:
                raise self.refuse(f"level {level.name}: {len(level.kinds)} kinds for {level.size} members")
            for unused in (k.name for k in kinds if k.name not in level.kinds):
                raise self.refuse(f"level {level.name}: no member is of the kind {unused}")
        if (level := stuck([v for v in levels if v.size > 1 or v.hub is not None])) is not None:
            raise self.refuse(f"level {level.name}: its members have no way to the port they share; give it a hub")
        for i, level in enumerate(levels):
            several = prod(inner.size for inner in levels[i + 1 :]) > 1
            if level.link == "ring" and level.port == "device" and several and level.size > 1:
                raise self.refuse(f'level {level.name}: a ring of members with several devices; set port = "member"')
            if level.link == "links" and level.size > 1 and not links:
                raise self.refuse(f"level {level.name} is joined by links, but there are none")
        for vertex in (v for link in links for v in link.between):
            if isinstance(vertex, int) and not 0 <= vertex < devices:
                raise self.refuse(f"a link to device {vertex}, but there are {devices} devices")

    # --- tables -------------------------------------------------------------------------------------------------------

    def known(self, what: str, table: Table) -> None:
        for key in table:
            if key not in KNOWN[what]:
                raise self.refuse(f"a {what} has no field {key!a}; it has {', '.join(KNOWN[what])}")

    def device(self, table: Table) -> Device:
        self.reading(f"device {table['name']}")
        self.known("device", table)
        kind = Device(
            name=str(table["name"]),
            flops={dtype: self.number(table["flops"], dtype) for dtype in table["flops"]},
            memory_bandwidth=self.number(table, "memory_bandwidth"),
            memory=int(self.number(table, "memory")),
            launch=self.number(table, "launch", zero=True),
            efficiency=self.number(table, "efficiency"),
            curves=curves(self.name, table.get("curves", {})),
        )
        if kind.efficiency > 1:
            raise self.refuse(f"efficiency is {kind.efficiency}; it must be at most 1")
        return kind

    def level(self, table: Table, count: object) -> Level:
        self.reading(f"level {table['name']}")
        self.known("level", table)
        link = self.choice(table, "link", LINKS)
        size = self.size({"size": count} if table["size"] == "parameter" else table, "size")
        joined = link != "links"
        return Level(
            name=str(table["name"]),
            size=size,
            bandwidth=self.number(table, "bandwidth") if joined else 0.0,
            latency=self.number(table, "latency", zero=True) if joined else 0.0,
            link=link,
            port=self.choice(table, "port", PORTS),
            duplex=self.flag(table, "duplex") if link != "bus" else self.bus(table),
            hub=self.hub(table["hub"]) if "hub" in table else None,
            protocol_latency=self.latencies(table),
            kinds=tuple(str(kind) for kind in table.get("kinds", ())),
        )

    def bus(self, table: Table) -> bool:
        if self.flag({"duplex": False, **table}, "duplex"):
            raise self.refuse("a bus is one medium; it cannot be duplex")
        return False

    def hub(self, table: Table) -> Wire:
        self.known("hub", table)
        return self.wire(table)

    def link(self, table: Table) -> Link:
        self.reading("a link")
        self.known("link", table)
        ends = _items(table["between"])
        fits = ends is not None and all(isinstance(v, int | str) and not isinstance(v, bool) for v in ends)
        if ends is None or not fits or len(ends) != 2 or ends[0] == ends[1]:
            raise self.refuse(f"is between {table['between']!r}; it must be between two devices, or vertices by name")
        return Link((ends[0], ends[1]), self.wire(table))

    def wire(self, table: Table) -> Wire:
        return Wire(
            self.number(table, "bandwidth"),
            self.number(table, "latency", zero=True),
            self.flag(table, "duplex"),
            protocol_latency=self.latencies(table),
        )

    def latencies(self, table: Table) -> tuple[ProtocolLatency, ...]:
        out: list[ProtocolLatency] = []
        for name, both in table.get("protocol_latency", {}).items():
            if name not in [p.name for p in self.protocols]:
                raise self.refuse(f"protocol_latency of {name!a}, which is none of its protocols")
            each = _items(both)
            pair = each if each is not None and len(each) == 2 else [both, both]
            ring, tree = (self.number({name: value}, name, zero=True) for value in pair)
            out.append((name, ring, tree))
        return tuple(out)

    def protocol(self, name: str, table: Table) -> Protocol:
        self.reading(f"protocol {name}")
        self.known("protocol", table)
        parts = [self.number(table, f"{of}_bandwidth") for of in ("ring", "tree")]
        if max(parts) > 1:
            raise self.refuse(f"a part of the bandwidth is {max(parts)}; it must be at most 1")
        return Protocol(
            name, self.number(table, "ring", zero=True), self.number(table, "tree", zero=True), parts[0], parts[1]
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def number(self, table: Table, key: str, zero: bool = False) -> float:
        value = table[key]
        fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not fits or value < 0 or (value == 0 and not zero):
            raise self.refuse(f"{key} is {value!r}; it must be a number {'from' if zero else 'above'} 0")
        return value

    def size(self, table: Table, key: str) -> int:
        value = table[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(f"{key} is {value!r}; it must be a whole number from 1 on")
        return value

    def flag(self, table: Table, key: str) -> bool:
        value = table.get(key, True)
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {value!r}; it must be true or false")
        return value

    def choice(self, table: Table, key: str, among: Sequence[str]) -> str:
        value = table.get(key, among[0])
        if value not in among:
            raise self.refuse(f"{key} is {value!r}; it must be one of {', '.join(among)}")
        return value


# --- writing ----------------------------------------------------------------------------------------------------------


def described(machine: Machine) -> dict[str, Any]:
    """The tables that describe a machine: `machine_from` makes it again."""
    out: dict[str, Any] = {}
    if machine.overhead != Machine.overhead:
        out["overhead"] = machine.overhead
    if machine.protocols:
        out["protocols"] = {p.name: {k: getattr(p, k) for k in KNOWN["protocol"]} for p in machine.protocols}
    kinds = [_device(kind) for kind in machine.kinds or (machine.device,)]
    if len(machine.levels) == 1 and machine.levels[0].link == "links":
        names = machine.levels[0].kinds
        for kind in kinds:
            kind["count"] = names.count(kind["name"]) if names else machine.devices
    else:
        out["levels"] = [_level(level) for level in machine.levels]
    if machine.kinds or "levels" not in out:
        out["devices"] = kinds
    else:
        out["device"] = kinds[0]
    if machine.links:
        out["links"] = [{"between": list(link.between), **_wire(link.wire)} for link in machine.links]
    return out


def _device(kind: Device) -> dict[str, Any]:
    """A profile is no part of a description: the machine's name says which."""
    out = {f.name: getattr(kind, f.name) for f in fields(Device) if f.name not in ("curves", "profile")}
    curves = {name: asdict(curve) for name, curve in kind.curves.items()}
    return out | {"flops": dict(kind.flops)} | ({"curves": curves} if curves else {})


def _wire(wire: Wire) -> dict[str, Any]:
    out: dict[str, Any] = {"bandwidth": wire.bandwidth, "latency": wire.latency}
    if not wire.duplex:
        out["duplex"] = False
    if wire.protocol_latency:
        out["protocol_latency"] = {name: [ring, tree] for name, ring, tree in wire.protocol_latency}
    return out


def _level(level: Level) -> dict[str, Any]:
    out: dict[str, Any] = {"name": level.name, "size": level.size, "link": level.link}
    if level.port != PORTS[0]:
        out["port"] = level.port
    if level.link != "links":
        out |= _wire(level.wire if level.link != "bus" else replace(level.wire, duplex=True))
    if level.hub is not None:
        out["hub"] = _wire(level.hub)
    if level.kinds:
        out["kinds"] = list(level.kinds)
    return out
