"""Convert machines from and to tables, the form they have in TOML files and in the machine dialect, with checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import inf, prod
from typing import Any, cast

from unity_ir.errors import UnityError
from unity_ir.machine.curve import curves
from unity_ir.machine.device import Device, HostLink, profiled
from unity_ir.machine.link_traffic import cut_off_level
from unity_ir.machine.links import LINKS, PORTS, Level, Link, Protocol, ProtocolLatency, Wire
from unity_ir.machine.model import Machine, slowest

TomlTable = Mapping[str, Any]

MAX_DEVICES = 2**20
"""Maximum number of devices, more than any cluster has; the devices of larger machines could not be listed."""

RATES = (1.0, 1e24)
"""Range of FLOP/s, bytes/s and bytes; outside, a number is a typing error, and times would be infinite or 0."""

MAX_SECONDS = 3600.0
"""Longest latency, launch or overhead, in seconds, that a description may give."""

LEAST_PART = 1e-6
"""Least efficiency, as a part of a peak or a bandwidth, that a description may give."""

NAME_LENGTH = 200

KNOWN = {
    "machine": ("parameter", "overhead", "device", "devices", "levels", "links", "protocols"),
    "device": (*(f.name for f in fields(Device) if f.name != "profile"), "count"),
    "host": tuple(f.name for f in fields(HostLink)),
    "level": tuple(f.name for f in fields(Level)),
    "hub": ("bandwidth", "latency", "duplex", "protocol_latency"),
    "link": ("between", "bandwidth", "latency", "duplex", "protocol_latency"),
    "protocol": ("ring", "tree", "ring_bandwidth", "tree_bandwidth"),
}
"""The fields of each table."""


def machine_from(name: str, described: TomlTable, count: object = None, profile: str = "") -> Machine:
    """
    Make the machine called `name` from its description: the tables of a TOML file, or of the machine dialect.

    `count` replaces the sizes of levels that the description gives as "parameter"; None takes the description's own
    `parameter`, or 1. `profile` is the path of a file of measurements; "" takes the one that comes with the package for
    this device, if any. Levels of one member are left out, unless they have a hub or kinds of devices.

    Raises `UnityError` for impossible figures, for missing or unknown fields, for devices that no link connects, and
    for a profile that cannot be read or is of another device.
    """
    reader = _Reader(name)
    try:
        machine = reader.machine(described, described.get("parameter", 1) if count is None else count)
    except KeyError as e:
        raise reader.refuse(f"{e.args[0]} is missing") from e
    return replace(machine, device=profiled(machine.device, machine.devices, profile))


def _items(value: Any) -> list[Any] | None:
    return [*value] if isinstance(value, list | tuple) else None


def _short(value: object) -> str:
    """Quote a value from the description, shortened for an error message."""
    try:
        text = ascii(value)
    except ValueError:
        # Python's limit on the digits of an integer.
        return "a number too long to print"
    return text if len(text) <= 50 else f"{text[:50]}..."


class _Reader:
    """Reads the tables of the machine `name`; errors begin with that name and the part being read."""

    def __init__(self, name: str):
        self.name = name
        self.part = ""
        """The part that is being read."""
        self.protocols: tuple[Protocol, ...] = ()

    def refuse(self, what: str) -> UnityError:
        return UnityError(f"machine: {self.name}: {self.part}{what}")

    def machine(self, described: TomlTable, count: object) -> Machine:
        if "levels" not in described and "links" not in described:
            raise KeyError("levels")
        self.known("machine", described)
        protocols = self.table(described.get("protocols", {}), "protocols")
        self.protocols = tuple(self.protocol(n, self.table(t, n)) for n, t in protocols.items())
        self.reading("")
        if "devices" not in described:
            tables = [self.table(described["device"], "device")]
        elif "device" in described or not described["devices"]:
            raise self.refuse("devices must be a list of tables, in place of device")
        else:
            tables = self.tables(described, "devices")
        kinds = tuple(self.device(t) for t in tables)
        self.reading("")
        if len({k.name for k in kinds}) != len(kinds):
            raise self.refuse("two kinds of devices have the same name")
        links = tuple(self.link(t) for t in self.tables(described, "links"))
        self.reading("")
        if "levels" in described:
            if any("count" in t for t in tables):
                raise self.refuse("count of a device, but the levels say how many there are; leave it out")
            levels = tuple(self.level(t, count) for t in self.tables(described, "levels"))
        else:
            levels = (self.listed(tables, kinds),)
        self.reading("")
        self.check(levels, kinds, links)
        # A level of one member joins nothing.
        levels = tuple(v for v in levels if v.size > 1 or v.hub is not None or v.kinds)
        extra: dict[str, Any] = {}
        if "overhead" in described:
            extra["overhead"] = self.seconds(described, "overhead")
        several = kinds if len(kinds) > 1 else ()
        machine = Machine(
            self.name, slowest(kinds), levels, protocols=self.protocols, links=links, kinds=several, **extra
        )
        if links or any(level.link == "links" for level in levels):
            _ = machine.topology
        return machine

    def listed(self, tables: Sequence[TomlTable], kinds: Sequence[Device]) -> Level:
        """Return the only level of a machine that has only devices and links."""
        counts = [self.size({"count": 1, **t}, "count") for t in tables]
        if sum(counts) > MAX_DEVICES:
            raise self.refuse(f"{sum(counts)} devices are too many; at most {MAX_DEVICES} are allowed")
        names = tuple(kind.name for kind, count in zip(kinds, counts, strict=True) for _ in range(count))
        return Level("devices", sum(counts), 0.0, 0.0, "links", kinds=names if len(kinds) > 1 else ())

    def reading(self, part: str) -> None:
        """Set the part that errors name."""
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
        if (level := cut_off_level([v for v in levels if v.size > 1 or v.hub is not None])) is not None:
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

    def known(self, what: str, table: TomlTable) -> None:
        for key in table:
            if key not in KNOWN[what]:
                raise self.refuse(f"a {what} has no field {key!a}; it has {', '.join(KNOWN[what])}")

    def table(self, value: Any, what: str) -> TomlTable:
        if not isinstance(value, Mapping):
            raise self.refuse(f"{what} is {value!r}; it must be a table")
        return cast("TomlTable", value)

    def tables(self, table: TomlTable, key: str) -> list[TomlTable]:
        """Return a list of tables; [] if there is no such field."""
        items = _items(table.get(key, []))
        if items is None or not all(isinstance(item, Mapping) for item in items):
            raise self.refuse(f"{key} must be a list of tables")
        return items

    def device(self, table: TomlTable) -> Device:
        name = self.named("device", table)
        self.known("device", table)
        flops = self.table(table["flops"], "flops")
        return Device(
            name=name,
            flops={dtype: self.rate(flops, dtype) for dtype in flops},
            memory_bandwidth=self.rate(table, "memory_bandwidth"),
            memory=int(self.rate(table, "memory")),
            reserve=self.reserve(table),
            launch=self.seconds(table, "launch"),
            efficiency=self.part_of_1(table, "efficiency"),
            curves=curves(self.name, table.get("curves", {})),
            host=self.host(self.table(table["host"], "host")) if "host" in table else None,
        )

    def host(self, table: TomlTable) -> HostLink:
        self.known("host", table)
        return HostLink(
            from_host=self.rate(table, "from_host"),
            to_host=self.rate(table, "to_host"),
            both=self.rate(table, "both") if "both" in table else 0.0,
            latency=self.seconds({"latency": 0, **table}, "latency"),
            memory=int(self.rate(table, "memory")) if "memory" in table else 0,
        )

    def reserve(self, table: TomlTable) -> int:
        """Return the bytes of a device's memory that no plan may take; 0 where a description says nothing of them."""
        reserve, memory = int(self.number({"reserve": 0, **table}, "reserve", zero=True)), int(table["memory"])
        if reserve >= memory:
            raise self.refuse(f"reserve is {reserve}; it must be less than the memory, {memory}")
        return reserve

    def level(self, table: TomlTable, count: object) -> Level:
        name = self.named("level", table)
        self.known("level", table)
        link = self.choice(table, "link", LINKS)
        size = self.size({"size": count} if table["size"] == "parameter" else table, "size")
        joined = link != "links"
        return Level(
            name=name,
            size=size,
            bandwidth=self.rate(table, "bandwidth") if joined else 0.0,
            latency=self.seconds(table, "latency") if joined else 0.0,
            link=link,
            port=self.choice(table, "port", PORTS),
            duplex=self.flag(table, "duplex") if link != "bus" else self.bus(table),
            hub=self.hub(self.table(table["hub"], "hub")) if "hub" in table else None,
            protocol_latency=self.latencies(table),
            kinds=self.kinds(table),
        )

    def kinds(self, table: TomlTable) -> tuple[str, ...]:
        items = _items(table.get("kinds", []))
        if items is None or not all(isinstance(item, str) for item in items):
            raise self.refuse(f"kinds is {table['kinds']!r}; it must be a list of names of devices")
        return tuple(items)

    def bus(self, table: TomlTable) -> bool:
        if self.flag({"duplex": False, **table}, "duplex"):
            raise self.refuse("a bus is one medium; it cannot be duplex")
        return False

    def hub(self, table: TomlTable) -> Wire:
        self.known("hub", table)
        return self.wire(table)

    def link(self, table: TomlTable) -> Link:
        self.reading("a link")
        self.known("link", table)
        ends = _items(table["between"])
        fits = ends is not None and all(isinstance(v, int | str) and not isinstance(v, bool) for v in ends)
        if ends is None or not fits or len(ends) != 2 or ends[0] == ends[1]:
            raise self.refuse(f"is between {table['between']!r}; it must be between two devices, or vertices by name")
        return Link((ends[0], ends[1]), self.wire(table))

    def wire(self, table: TomlTable) -> Wire:
        return Wire(
            self.rate(table, "bandwidth"),
            self.seconds(table, "latency"),
            self.flag(table, "duplex"),
            protocol_latency=self.latencies(table),
        )

    def latencies(self, table: TomlTable) -> tuple[ProtocolLatency, ...]:
        out: list[ProtocolLatency] = []
        for name, both in self.table(table.get("protocol_latency", {}), "protocol_latency").items():
            if name not in [p.name for p in self.protocols]:
                raise self.refuse(f"protocol_latency of {name!a}, which is none of its protocols")
            each = _items(both)
            pair = each if each is not None and len(each) == 2 else [both, both]
            ring, tree = (self.seconds({name: value}, name) for value in pair)
            out.append((name, ring, tree))
        return tuple(out)

    def protocol(self, name: str, table: TomlTable) -> Protocol:
        self.reading(f"protocol {name}")
        self.known("protocol", table)
        ring, tree = (self.part_of_1(table, f"{of}_bandwidth") for of in ("ring", "tree"))
        return Protocol(name, self.seconds(table, "ring"), self.seconds(table, "tree"), ring, tree)

    # --- values -------------------------------------------------------------------------------------------------------

    def named(self, what: str, table: TomlTable) -> str:
        """Return the name of a part, and let errors name that part."""
        name = table["name"]
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= NAME_LENGTH:
            raise self.refuse(f"the name of a {what} is {_short(name)}; it must be text that can be printed")
        self.reading(f"{what} {name}")
        return name

    def number(self, table: TomlTable, key: str, zero: bool = False) -> float:
        value = table[key]
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf
        if not fits or value < 0 or (value == 0 and not zero):
            raise self.refuse(f"{key} is {_short(value)}; it must be a number {'from' if zero else 'above'} 0")
        return value

    def rate(self, table: TomlTable, key: str) -> float:
        if not RATES[0] <= (value := self.number(table, key)) <= RATES[1]:
            raise self.refuse(f"{key} is {_short(value)}; it must be from {RATES[0]:g} to {RATES[1]:g}")
        return value

    def seconds(self, table: TomlTable, key: str) -> float:
        if (value := self.number(table, key, zero=True)) > MAX_SECONDS:
            raise self.refuse(f"{key} is {_short(value)}; it must be in seconds, and at most {MAX_SECONDS:g}")
        return value

    def part_of_1(self, table: TomlTable, key: str) -> float:
        if not LEAST_PART <= (value := self.number(table, key)) <= 1:
            limit = "most 1" if value > 1 else f"least {LEAST_PART:g}"
            raise self.refuse(f"{key} is {_short(value)}; it must be at {limit}")
        return value

    def size(self, table: TomlTable, key: str) -> int:
        value = table[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(f"{key} is {value!r}; it must be a whole number from 1 on")
        return value

    def flag(self, table: TomlTable, key: str) -> bool:
        value = table.get(key, True)
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {value!r}; it must be true or false")
        return value

    def choice(self, table: TomlTable, key: str, among: Sequence[str]) -> str:
        value = table.get(key, among[0])
        if value not in among:
            raise self.refuse(f"{key} is {value!r}; it must be one of {', '.join(among)}")
        return value


# --- writing ----------------------------------------------------------------------------------------------------------


def described(machine: Machine) -> dict[str, Any]:
    """
    Return the tables (of a TOML file) that describe a machine, from which `machine_from` makes one that is equal but
    for its name and its measured profile, which are not in them.
    """
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
    """
    Return the table of a device, without its profile, which is not part of a description (the machine's name has it).
    """
    out = {f.name: getattr(kind, f.name) for f in fields(Device) if f.name not in ("curves", "profile", "host")}
    if kind.host is not None:
        out["host"] = {key: value for key, value in asdict(kind.host).items() if value}
    curves = {name: asdict(curve) for name, curve in kind.curves.items()}
    if not kind.reserve:
        del out["reserve"]
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
