"""Machines that are not the same everywhere: links of their own, and several kinds of devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.errors import UnityError
from unity_ir.machine import Machine, described, load, machine_from
from unity_ir.machine.collectives import SCHEDULES
from unity_ir.machine.load import presets
from unity_ir.pcg.reshard import Move

CHIP = {"name": "chip", "flops": {"f32": 1e12, "f64": 5e11}, "memory_bandwidth": 1e11, "memory": 10**9, "launch": 1e-6}
FAST = {**CHIP, "efficiency": 0.8}
SLOW = {**CHIP, "name": "old", "flops": {"f32": 2e11}, "launch": 2e-6, "efficiency": 0.5}


def link(a: int | str, b: int | str, bandwidth: float = 1e9, **others: Any) -> dict[str, Any]:
    return {"between": [a, b], "bandwidth": bandwidth, "latency": 1e-6, **others}


def square(*more: dict[str, Any], count: int = 4) -> dict[str, Any]:
    """Four devices in a ring of links."""
    links = [link(0, 1), link(1, 2), link(2, 3), link(3, 0), *more]
    return {"overhead": 0.0, "devices": [{**FAST, "count": count}], "links": links}


def best(machine: Machine, kind: str, axes: tuple[int, ...]) -> float:
    return min(b for _, b in machine.lines_of_axes(kind, axes))


def test_devices_and_links_are_a_machine():
    machine = machine_from("square", square())
    assert (machine.devices, machine.mesh.sizes, machine.axis_levels) == (4, (2, 2), (0, 0))
    # Both ways around: of 3 pieces that each must get, half comes from either neighbour.
    assert best(machine, "all_gather", (0, 1)) == pytest.approx(1.5e-9)
    assert machine.link_keys((1,)) == ((0, "level"),)


def test_axes_of_a_level_differ():
    """Devices 0 and 1 are neighbours, 0 and 2 are not; `lines` takes the worst, `lines_of_axes` knows."""
    machine = machine_from("square", square())
    near, far = best(machine, "all_reduce", (1,)), best(machine, "all_reduce", (0,))
    assert near == pytest.approx(1e-9)
    assert far == pytest.approx(2 * near)
    assert min(b for _, b in machine.lines("all_reduce", {0: 2})) == pytest.approx(far)
    moves = [Move("all_reduce", (axis,), -2, -1, 2, 10**6) for axis in (0, 1)]
    assert machine.move_time(moves[0], "f32") == pytest.approx(4e6 * far + 2 * 2e-6)
    assert machine.move_time(moves[1], "f32") == pytest.approx(4e6 * near + 2 * 1e-6)


def test_a_link_of_its_own_is_used():
    machine = machine_from("square", square())
    more = machine_from("crossed", square(link(0, 2), link(1, 3)))
    assert best(more, "all_reduce", (0,)) < best(machine, "all_reduce", (0,))
    nodes = {"overhead": 0.0, "device": FAST, "levels": [{"name": "n", "size": 4, "bandwidth": 1e9, "latency": 1e-6}]}
    plain = machine_from("plain", nodes)
    joined = machine_from("joined", {**nodes, "links": [link(0, 1, 1e10, latency=0.0), link(2, 3, 1e10, latency=0.0)]})
    assert best(joined, "all_reduce", (1,)) == pytest.approx(best(plain, "all_reduce", (1,)) / 10)
    assert best(joined, "all_reduce", (0,)) == pytest.approx(best(plain, "all_reduce", (0,)))


def test_messages_take_the_quickest_way_then_the_widest():
    detour = [link(0, 2, 1e9, latency=1e-6), link(2, 3, 2e9, latency=1e-6), link(3, 1, 3e9, latency=1e-6)]
    for latency, bandwidth in ((2e-6, 8e9), (3e-6, 5e8), (4e-6, 8e9)):
        links = [link(0, 1, bandwidth, latency=latency), *detour]
        topology = machine_from("detour", {"devices": [{**FAST, "count": 4}], "links": links}).topology
        taken = len(topology.route(0, 1))
        assert taken == (1 if latency < 3e-6 else 3)
        assert topology.latency(0, 1, "plain", tree=False) == pytest.approx(min(latency, 3e-6))
        assert topology.busiest_link_seconds([(0, 1, 4.0)]) == pytest.approx(4 / (bandwidth if taken == 1 else 1e9))


def test_half_duplex_and_hubs():
    one = machine_from("one", {**square(), "devices": [{**FAST, "count": 2}], "links": [link(0, 1)]})
    half = machine_from("half", {**square(), "devices": [{**FAST, "count": 2}], "links": [link(0, 1, duplex=False)]})
    assert best(half, "all_reduce", (0,)) == pytest.approx(2 * best(one, "all_reduce", (0,)))
    star = machine_from("star", {**square(), "links": [link(i, "hub") for i in range(4)]})
    assert best(star, "all_gather", (0, 1)) == pytest.approx(3e-9)
    assert best(star, "send", (0,)) == pytest.approx(1e-9)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_no_estimate_beats_the_cut(data: st.DataObject):
    ends = st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda e: e[0] != e[1])
    extra = data.draw(st.lists(st.tuples(ends, st.sampled_from([1e9, 5e9]), st.booleans()), max_size=6))
    links = [link(i, i + 1) for i in range(5)] + [link(*e, b, duplex=d) for e, b, d in extra]
    machine = machine_from("random", {"overhead": 0.0, "devices": [{**FAST, "count": 6}], "links": links})
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from([0, 1]), min_size=1))))
    for kind in SCHEDULES:
        least = machine.least_seconds(kind, machine.sizes_of(axes), 1.0)
        # Along single axes, which of the devices are one group's is not known from the sizes.
        assert all(b >= least * (1 - 1e-9) for _, b in machine.lines_of_axes(kind, axes)), kind
        assert least > 0 or kind == "broadcast", kind
        assert machine.lines_of_axes(kind, ()) == machine.lines(kind, {}) == ((0.0, 0.0),), kind


def test_kinds_of_devices():
    levels = [{"name": "gpus", "size": 4, "kinds": ["chip", "chip", "old", "chip"], "bandwidth": 1e9, "latency": 0}]
    # The larger device has less left for a plan.
    fast, slow = {**FAST, "memory": 2000, "reserve": 1900}, {**SLOW, "memory": 1000, "reserve": 500}
    machine = machine_from("mixed", {"devices": [fast, slow], "levels": levels})
    assert machine.device.usable == 100
    assert machine_from("mixed", described(machine)) == machine
    assert [machine.device_of(i).name for i in range(4)] == ["chip", "chip", "old", "chip"]
    slowest = machine.device
    assert (slowest.name, dict(slowest.flops), slowest.launch, slowest.efficiency) == (
        "chip + old",
        {"f32": 2e11},
        2e-6,
        0.5,
    )
    nodes = {"name": "nodes", "size": 2, "kinds": ["old", "chip"], "bandwidth": 1e9, "latency": 0}
    machine = machine_from("nodes", {"devices": [FAST, SLOW], "levels": [nodes, {**levels[0], "kinds": []}]})
    assert [machine.device_of(i).name for i in (0, 3, 4, 7)] == ["old", "old", "chip", "chip"]
    listed = machine_from("listed", {**square(), "devices": [{**FAST, "count": 3}, SLOW]})
    assert [listed.device_of(i).name for i in range(4)] == ["chip", "chip", "chip", "old"]
    assert load("2gpu").device_of(1) is load("2gpu").device or load("2gpu").device_of(1) == load("2gpu").device


LEVEL = {"name": "gpus", "size": 4, "bandwidth": 1e9, "latency": 1e-6}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (square(count=5), "device 4 is not connected to device 0; add a link"),
        (square(link(0, 7)), "a link to device 7, but there are 4 devices"),
        (square(link(0, 0)), r"a link: is between \[0, 0\]; it must be between two devices"),
        (square(link(0, True)), r"a link: is between \[0, True\]"),
        (square(link(0, 1, 0.0)), "a link: bandwidth is 0.0; it must be a number above 0"),
        (square(link(0, 1, float("nan"))), "a link: bandwidth is nan; it must be a number above 0"),
        (square(link(0, 1, duplex=1)), "a link: duplex is 1; it must be true or false"),
        (square(link(0, 1, speed=1)), "a link: a link has no field 'speed'; it has between, bandwidth"),
        (square(link(0, "hub")), "only one link ends at 'hub'"),
        (square(link(0, "gpus:switch:9")), "only one link ends at 'gpus:switch:9'"),
        ({**square(), "devices": [{**FAST, "count": 3000}]}, "3000 devices are too many for a machine with links"),
        ({**square(), "devices": [FAST, {**SLOW, "name": "chip"}]}, "two kinds of devices have the same name"),
        ({"devices": [FAST, SLOW], "levels": [LEVEL]}, "2 kinds of devices; one level must say with kinds"),
        ({"device": FAST, "levels": [{**LEVEL, "kinds": ["chip"]}]}, "level gpus: 1 kinds for 4 members"),
        ({"device": FAST, "levels": [{**LEVEL, "kinds": ["a"] * 4}]}, "level gpus: there is no kind of device 'a'"),
        ({"devices": [FAST, SLOW], "levels": [{**LEVEL, "kinds": ["old"] * 4}]}, "no member is of the kind chip"),
        ({"device": FAST, "devices": [SLOW], "levels": [LEVEL]}, "devices must be a list of tables, in place of"),
        ({"device": FAST, "levels": [LEVEL, LEVEL]}, "two levels have the same name"),
        ({"device": FAST, "levels": [{**LEVEL, "link": "mesh"}]}, "level gpus: link is 'mesh'; it must be one of"),
        ({"device": FAST, "levels": [{**LEVEL, "link": "links"}]}, "level gpus is joined by links, but there are"),
        ({"device": FAST, "levels": [{**LEVEL, "port": "node"}]}, "level gpus: port is 'node'; it must be one of"),
        ({"device": FAST, "levels": [{**LEVEL, "link": "bus", "duplex": True}]}, "a bus is one medium; it cannot be"),
        ({"device": FAST, "levels": [{**LEVEL, "hub": {"bandwidth": 1}}]}, "level gpus: latency is missing"),
        ({"device": FAST, "levels": [{**LEVEL, "protocol_latency": {"LL": 1}}]}, "'LL', which is none of its"),
        ({"device": FAST, "levels": [LEVEL], "protocols": {"LL": {"ring": 0, "tree": 0, "ring_bandwidth": 2,
          "tree_bandwidth": 1}}}, "protocol LL: ring_bandwidth is 2; it must be at most 1"),
        ({"device": FAST, "levels": [{**LEVEL, "name": "n", "port": "member"}, {**LEVEL, "link": "all"}]},
         "level gpus: its members have no way to the port they share; give it a hub"),
        ({"device": FAST, "levels": [{**LEVEL, "name": "n", "link": "ring"}, LEVEL]}, "level n: a ring of members"),
        ({"devices": [FAST, {**SLOW, "flops": {"i8": 1}}], "levels": [{**LEVEL, "size": 2, "kinds": ["chip", "old"]}]},
         "no element type is common to all"),
        ({"levels": [LEVEL]}, "device is missing"),
        ({"device": CHIP, "levels": [LEVEL]}, "device chip: efficiency is missing"),
        ({"devices": 3, "levels": [LEVEL]}, "devices must be a list of tables"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(tables: dict[str, Any], message: str):
    with pytest.raises(UnityError, match=rf"^machine: bad: .*{message}") as error:
        machine_from("bad", tables)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", [*presets(), "summit:4", "dgx-h100:512", "k80:16"])
def test_description_makes_the_machine_again(text: str):
    machine = load(text)
    assert machine_from(text, described(machine)) == machine


def test_irregular_description_makes_the_machine_again():
    for tables in (square(link(0, "hub"), link("hub", 2)), {**square(), "devices": [{**FAST, "count": 3}, SLOW]}):
        machine = machine_from("square", tables)
        assert machine_from("square", described(machine)) == machine
