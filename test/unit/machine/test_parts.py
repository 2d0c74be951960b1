"""A part of a machine is what its stage has: the trailing mesh axes, at what collectives cost on the whole machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machines

from unity_ir.errors import UnityError
from unity_ir.machine import Level, Link, Machine, Wire, load, part, part_counts, send_seconds
from unity_ir.machine.load import presets
from unity_ir.pcg.collectives import BETWEEN_DEVICES


def check_part(machine: Machine, count: int) -> None:
    """Axes are the trailing ones; a collective along some of them costs what it does on the whole machine."""
    found = part(machine, count)
    whole = machine.mesh.sizes
    assert found.mesh.sizes == whole[len(whole) - len(found.mesh.sizes) :]
    assert found.devices * count == machine.devices
    assert found.device is machine.device
    taken = len(whole) - len(found.mesh.sizes)
    own = range(len(found.mesh.sizes))
    for axes in (c for n in range(1, len(own) + 1) for c in combinations(own, n)):
        for kind in BETWEEN_DEVICES:
            alone = found.lines_of_axes(kind, axes)
            together = machine.lines_of_axes(kind, [taken + axis for axis in axes])
            assert np.allclose(alone, together, rtol=1e-9, atol=0), (kind, axes)


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_parts_of_presets(name: str):
    machine = load(name if name in ("2gpu", "p2.8xlarge") else f"{name}:4")
    for count in part_counts(machine):
        check_part(machine, count)


@settings(max_examples=20)
@given(st.data())
def test_parts_of_random_machines(data: st.DataObject):
    machine = data.draw(machines(links=("switch", "all", "bus")))
    check_part(machine, data.draw(st.sampled_from(part_counts(machine))))


def test_levels_are_taken_off_and_divided():
    cluster = load("dgx-h100:8")
    assert [(level.name, level.size) for level in part(cluster, 4).levels] == [("nodes", 2), ("gpus", 8)]
    assert [(level.name, level.size) for level in part(cluster, 16).levels] == [("gpus", 4)]
    assert part(cluster, 64).levels == ()
    assert part(cluster, 1) is cluster
    assert part_counts(load("summit:4")) == [1, 2, 4, 8, 24]


def test_a_send_crosses_the_level_in_which_neighbours_differ():
    cluster = load("dgx-h100:2")
    between_nodes = cluster.move_seconds("send", {0: 2}, 1e6, 1e6, 2)
    inside = cluster.move_seconds("send", {1: 2}, 1e6, 1e6, 2)
    assert [send_seconds(cluster, 4, source, source + 1, 1e6, 2) for source in range(3)] == [
        inside,
        between_nodes,
        inside,
    ]
    assert send_seconds(cluster, 4, 3, 0, 1e6, 2) == between_nodes
    assert inside < between_nodes
    # Nothing is sent from a part to itself, be it the whole machine.
    assert send_seconds(cluster, 4, 2, 2, 1e6, 2) == send_seconds(cluster, 1, 0, 0, 1e6, 2) == 0.0


@pytest.mark.parametrize(
    ("machine", "count", "said"),
    [
        (
            load("dgx-h100:8"),
            3,
            "3 parts: its leading mesh axes make no such number; use one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (replace(boxes(2, 2), links=(Link((0, 3), Wire(1e9)),)), 2, "2 parts: its links are listed one by one"),
        (replace(boxes(2), levels=(Level("gpus", 8, 1e9, 1e-6, "ring"),)), 2, "cut the ring of 8 gpus open"),
        (
            replace(boxes(2), levels=(Level("gpus", 4, 1e9, 1e-6, kinds=("a", "a", "b", "b")),)),
            2,
            "2 parts: not all would have the same kinds of gpus",
        ),
    ],
)
def test_no_equal_parts(machine: Machine, count: int, said: str):
    with pytest.raises(UnityError, match=f"cannot be divided into {count} parts") as raised:
        part(machine, count)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
