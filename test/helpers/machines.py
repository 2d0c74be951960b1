"""Random machines of nested levels, and groups on them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from graphs import boxes
from hypothesis import strategies as st

from unity_ir.machine import Level, Machine, Protocol, Wire
from unity_ir.machine.link_traffic import cut_off_level

PROTOCOLS = (Protocol("short", 1e-6, 2e-6, 0.5, 0.25), Protocol("long", 4e-6, 3e-6, 1.0, 0.9))


@st.composite
def wires(draw: st.DrawFn, latency: float) -> Wire:
    bandwidth = draw(st.sampled_from([1e9, 3e9, 1e10]))
    return Wire(bandwidth, latency, draw(st.booleans()))


@st.composite
def machines(draw: st.DrawFn, most: int = 64, links: tuple[str, ...] = ("switch", "all", "ring", "bus")) -> Machine:
    """Levels of any links and ports. Hubs are far enough that messages take the way the levels say."""
    levels: list[Level] = []
    depth = draw(st.integers(1, 3))
    for i in range(depth):
        latency = 1e-6 * 100 ** (depth - i)
        size = draw(st.sampled_from([2, 3, 4, 6, 8]))
        if size * prod(level.size for level in levels) > most:
            break
        link = draw(st.sampled_from(links))
        wire = draw(wires(latency))
        hub = draw(st.one_of(st.none(), wires(10 * latency))) if i else None
        port = draw(st.sampled_from(["device", "member"]))
        duplex = wire.duplex and link != "bus"
        levels.append(Level(f"level{i}", size, wire.bandwidth, latency, link, port, duplex, hub))
    levels = [replace(v, port="member") if v.link == "ring" and v is not levels[-1] else v for v in levels]
    while (inner := cut_off_level(levels)) is not None:
        levels[levels.index(inner)] = replace(inner, hub=Wire(2e9, 10 * inner.latency))
    protocols = draw(st.sampled_from([(), PROTOCOLS]))
    return replace(boxes(2, overhead=1e-6), levels=tuple(levels), protocols=protocols)


@st.composite
def axes(draw: st.DrawFn, machine: Machine) -> tuple[int, ...]:
    """Some mesh axes."""
    every = range(len(machine.mesh.sizes))
    return tuple(sorted(draw(st.sets(st.sampled_from(every), min_size=1))))
