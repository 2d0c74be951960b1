"""Exhaustive search finds what trying every plan finds."""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random

import pytest
from exhaustive import Space, exhaustive, space_of
from graphs import RandomGraph, boxes

from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import build
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.flexflow.mcmc import Settings, mcmc
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.streams import TICKS

SGD = Optimizer()


def least(graph: Graph, machine: Machine, space: Space) -> tuple[int, int]:
    """The makespans of the best and the worst plan."""
    simulation = Simulation(graph, machine, {n: space[n][0] for n in space}, SGD)
    found: list[int] = []
    for plan in product(*space.values()):
        for node, assignment in zip(space, plan, strict=True):
            if simulation.assignment(node) != assignment:
                simulation.propose(node, assignment)
                simulation.accept()
        found.append(simulation.makespan)
    return min(found), max(found)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("overhead", [1e-6, 1e-4])
@pytest.mark.parametrize("seed", range(6))
def test_is_what_trying_every_plan_finds(seed: int, overhead: float):
    random = Random(seed)
    grown = RandomGraph(random, 5, dims=(64, 128), dtype="f32")
    graph, machine = grown.graph(), boxes(2, 2, overhead=overhead, bandwidth=1e8)
    nodes = [n for n in graph.nodes() if n.is_compute]
    every = space_of(graph, machine)
    keep = max(2, int(4000 ** (1 / len(nodes))))
    space: dict[Node, list[tuple[object, ...]]] = {n: random.sample(every[n], min(keep, len(every[n]))) for n in nodes}
    if (worst := prod(map(len, space.values()))) > 20_000:
        pytest.skip(f"{worst} plans are too many to try")
    best, _ = least(graph, machine, space)
    for start in (0, -1):
        known = {n: space[n][start] for n in nodes}
        found = exhaustive(graph, machine, SGD, space, known)
        assert round(found.seconds * TICKS) == best
        assert Simulation(graph, machine, found.assignments, SGD).makespan == best
        assert all(found.assignments[n] in space[n] for n in nodes)


@pytest.mark.slow
def test_mcmc_reaches_the_optimum_of_lenet():
    graph, machine = build("lenet", batch=256), boxes(2, overhead=1e-6, bandwidth=1e10)
    space = space_of(graph, machine)
    found = mcmc(graph, machine, SGD, Settings(budget=3000), space=space)
    proved = exhaustive(graph, machine, SGD, space, found.assignments)
    assert proved.seconds == found.seconds
    worse = exhaustive(graph, machine, SGD, space, {n: space[n][0] for n in space})
    assert worse.seconds == proved.seconds


def test_stops_when_time_is_up():
    graph, machine = build("lenet", batch=16), boxes(2, overhead=1e-6)
    space = space_of(graph, machine)
    with pytest.raises(UnityError, match=r"^exhaustive: \d+ of 20 operators are done when time is up"):
        exhaustive(graph, machine, SGD, space, {n: space[n][0] for n in space}, seconds=1e-9)
