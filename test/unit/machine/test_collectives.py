"""Collectives cost no less than what must cross the links, and no more than the obvious way to do them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from graphs import boxes
from hypothesis import given
from hypothesis import strategies as st

from unity_ir.machine import Level, Machine
from unity_ir.pcg.reshard import KINDS

RECEIVED = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Pieces of the given size that each of n devices must receive, as a ring does it."""


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    bandwidth = st.sampled_from([1e9, 1e9, 3e9, 1e10])
    levels = tuple(
        Level(f"level{i}", draw(st.sampled_from([2, 3, 4, 8])), draw(bandwidth), draw(st.sampled_from([0.0, 1e-6])))
        for i in range(draw(st.integers(1, 3)))
    )
    return replace(boxes(2, overhead=1e-6), levels=levels)


@st.composite
def groups(draw: st.DrawFn, machine: Machine) -> dict[int, int]:
    """Devices along each level."""
    sizes = {i: draw(st.sampled_from([1, level.size])) for i, level in enumerate(machine.levels)}
    if prod(sizes.values()) == 1:
        sizes[0] = machine.levels[0].size
    return sizes


@pytest.mark.parametrize("kind", RECEIVED)
@given(st.data(), st.sampled_from([0.0, 4.0, 1e6, 1e9]))
def test_never_below_what_must_be_received(kind: str, data: st.DataObject, size: float):
    machine = data.draw(machines())
    sizes = data.draw(groups(machine))
    seconds = machine.collective_time(kind, sizes, size)
    n = prod(sizes.values())
    used = [machine.levels[i] for i, k in sizes.items() if k > 1]
    assert seconds >= machine.overhead + RECEIVED[kind](n) * size / max(level.bandwidth for level in used) * (1 - 1e-9)
    # Into every part of the outermost level used, its devices together must bring what its devices lack.
    outer = min(i for i, k in sizes.items() if k > 1)
    inside = n // sizes[outer]
    lacking = {
        "all_gather": (sizes[outer] - 1) * inside * size,
        "reduce_scatter": (sizes[outer] - 1) / sizes[outer] * size,
        "all_reduce": 2 * (sizes[outer] - 1) / sizes[outer] * size,
        "all_to_all": (sizes[outer] - 1) / sizes[outer] * size * inside,
    }[kind]
    assert seconds >= lacking / inside / machine.levels[outer].bandwidth * (1 - 1e-9)
    # One flat ring over the slowest link, whose every step waits for the slowest hop, is always possible.
    slowest = min(level.bandwidth for level in used)
    latency = max(level.latency for level in used)
    steps = 2 * (n - 1) if kind == "all_reduce" else n - 1
    assert seconds <= machine.overhead + steps * latency + RECEIVED[kind](n) * size / slowest * (1 + 1e-9)


@pytest.mark.parametrize("kind", RECEIVED)
@given(st.data())
def test_more_bytes_and_faster_links(kind: str, data: st.DataObject):
    machine = data.draw(machines())
    sizes = data.draw(groups(machine))
    times = [machine.collective_time(kind, sizes, b) for b in (0.0, 1e3, 1e6, 2e6)]
    assert times == sorted(times)
    faster = replace(machine, levels=tuple(replace(level, bandwidth=2 * level.bandwidth) for level in machine.levels))
    assert faster.collective_time(kind, sizes, 1e6) <= machine.collective_time(kind, sizes, 1e6)


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather_when_there_is_much():
    machine = boxes(4, 2)
    whole = machine.collective_time("all_reduce", {0: 4, 1: 2}, 1e9)
    halves = [machine.collective_time("reduce_scatter", {0: 4, 1: 2}, 1e9)]
    halves.append(machine.collective_time("all_gather", {0: 4, 1: 2}, 1e9 / 8))
    assert whole == pytest.approx(sum(halves))


def test_moves_that_stay_on_a_device_cost_no_message():
    machine = boxes(2, overhead=1e-3)
    assert machine.move_seconds("retype", {0: 2}, 100, 100, 4) == 0.0
    for kind in set(KINDS) - RECEIVED.keys() - {"retype"}:
        assert machine.move_seconds(kind, {0: 2}, 0, 0, 4) == machine.device.launch
