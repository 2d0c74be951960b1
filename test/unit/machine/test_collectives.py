"""Collectives cost no less than what must cross the links, and what an explicit graph of every message says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import axes, machines

from unity_ir.machine import Machine, load
from unity_ir.machine.collectives import SCHEDULES
from unity_ir.machine.graph import Topology
from unity_ir.machine.link_traffic import line
from unity_ir.machine.load import presets
from unity_ir.pcg.collectives import BETWEEN_DEVICES, HALO_EXCHANGES, ON_DEVICE


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_no_estimate_beats_the_cut(data: st.DataObject):
    machine = data.draw(machines(most=512))
    sizes = machine.sizes_of(data.draw(axes(machine)))
    # Of all kinds at each machine, since a machine takes longer to draw than to ask.
    for kind in BETWEEN_DEVICES:
        for seconds_at_0, per_byte in machine.lines(kind, sizes):
            assert seconds_at_0 > 0, kind
            assert per_byte >= machine.least_seconds(kind, sizes, 1.0) * (1 - 1e-9) > 0, kind


@pytest.mark.parametrize("name", presets())
def test_no_estimate_on_a_preset_beats_the_cut(name: str):
    for text in (name,) if name in ("2gpu", "p2.8xlarge") else (f"{name}:4", f"{name}:512"):
        machine = load(text)
        for level in range(len(machine.levels)):
            sizes = {i: machine.levels[i].size for i in range(level, len(machine.levels))}
            if prod(sizes.values()) == 1:
                continue
            for kind in BETWEEN_DEVICES:
                least = machine.least_seconds(kind, sizes, 1e6)
                assert min(b for _, b in machine.lines(kind, sizes)) * 1e6 >= least * (1 - 1e-9) > 0


@pytest.mark.slow
@settings(max_examples=80)
@given(st.data())
def test_levels_and_graph_agree(data: st.DataObject):
    """Where only the groups' own links are used, to the last byte; and never is the graph busier."""
    machine = data.draw(machines(most=24))
    chosen = data.draw(axes(machine))
    topology = Topology.of("random", machine.levels, ())
    for kind in BETWEEN_DEVICES:
        check_levels_and_graph(kind, machine, chosen, topology)


def check_levels_and_graph(kind: str, machine: Machine, chosen: tuple[int, ...], topology: Topology) -> None:
    sizes = machine.sizes_of(chosen)
    spans = tuple(sorted(sizes.items()))
    spoken = machine.protocols or machine._spoken
    found = topology.lines(kind, machine.mesh, chosen, machine.axis_levels, spoken)
    schedules = [s for s in SCHEDULES[kind](spans) for _ in spoken]
    for schedule, protocol, (start, per_byte) in zip(
        schedules, spoken * len(SCHEDULES[kind](spans)), found, strict=True
    ):
        if schedule.tree and machine.levels[spans[0][0]].link == "ring":
            continue
        what = kind, schedule.algorithm
        expected_start, expected = line(machine.levels, sizes, schedule, protocol)
        assert per_byte <= expected * (1 + 1e-9), what
        assert start <= expected_start * (1 + 1e-9), what
        assert per_byte >= machine.least_seconds(kind, sizes, 1.0) * (1 - 1e-9), what
        exact = all(level.link == "switch" for level in machine.levels)
        if exact and kind not in HALO_EXCHANGES and schedule.algorithm in ("hierarchical", "direct", "ring"):
            assert per_byte == pytest.approx(expected), what
            assert start == pytest.approx(expected_start), what


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_more_bytes_and_faster_links(data: st.DataObject):
    machine = data.draw(machines())
    sizes = machine.sizes_of(data.draw(axes(machine)))
    faster = replace(machine, levels=tuple(replace(level, bandwidth=2 * level.bandwidth) for level in machine.levels))
    for kind in BETWEEN_DEVICES:
        times = [machine.collective_time(kind, sizes, b) for b in (0.0, 1e3, 1e6, 2e6)]
        assert times == sorted(times), kind
        assert faster.collective_time(kind, sizes, 1e6) <= times[2], kind


@pytest.mark.slow
@given(st.data())
def test_an_all_reduce_is_no_cheaper_than_half_of_it(data: st.DataObject):
    machine = replace(data.draw(machines()), protocols=())
    sizes = machine.sizes_of(data.draw(axes(machine)))
    size = data.draw(st.sampled_from([0.0, 1e3, 1e6, 1e9]))
    n = prod(sizes.values())
    scattered = machine.collective_time("reduce_scatter", sizes, size)
    gathered = machine.collective_time("all_gather", sizes, size / n)
    assert scattered == pytest.approx(gathered)
    whole = machine.collective_time("all_reduce", sizes, size)
    assert whole <= (scattered + gathered) * (1 + 1e-9)
    trees = [b for _, b in machine.lines("all_reduce", sizes)]
    assert min(trees) >= min(b for _, b in machine.lines("all_gather", sizes)) / n * (1 - 1e-9)


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather_when_there_is_much():
    machine = boxes(4, 2)
    whole = machine.collective_time("all_reduce", {0: 4, 1: 2}, 1e9)
    halves = [machine.collective_time("reduce_scatter", {0: 4, 1: 2}, 1e9)]
    halves.append(machine.collective_time("all_gather", {0: 4, 1: 2}, 1e9 / 8))
    assert whole == pytest.approx(sum(halves))


def test_devices_share_the_port_of_their_node():
    """Summit's six GPUs share a node's two rails: data parallel over nodes is what the rails carry."""
    machine = load("summit:4")
    nodes = {0: 4}
    per_byte = min(b for _, b in machine.lines("all_reduce", nodes))
    assert per_byte == pytest.approx(6 * 2 * 3 / 4 / 25e9)
    assert machine.link_keys((0, 2, 3)) == ((0, "member"), (1, "member"), (2, "device"))


def test_lines_are_for_arrays():
    machine = load("dgx-h100:512")
    sizes = {0: 512, 1: 8}
    bytes = np.array([0.0, 1e3, 1e6, 1e9])
    lines = np.array(machine.lines("all_reduce", sizes))
    priced = (lines[:, :1] + lines[:, 1:] * bytes).min(axis=0)
    assert priced.tolist() == pytest.approx([machine.collective_time("all_reduce", sizes, b) for b in bytes])
    assert all(a <= b for a, b in pairwise(priced))


def test_moves_that_stay_on_a_device_cost_no_message():
    machine = boxes(2, overhead=1e-3)
    assert machine.move_seconds("retype", {0: 2}, 100, 100, 4) == 0.0
    for kind in ON_DEVICE:
        assert machine.move_seconds(kind, {0: 2}, 0, 0, 4) == machine.device.launch
