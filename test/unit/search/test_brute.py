"""
The joint search finds the least cost there is: on small graphs of every family, everything is tried.

That the tables of everything are right is checked, too: what they say of a choice is what `cost` says of its plan.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from brute import Brute, Distances, TooMany
from extent import examples
from graphs import boxes
from small import FAMILIES, op, small, weight, whole

from unity_ir.cost.plan import cost
from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import has_shared_moves
from unity_ir.search.exact.solver import Solver
from unity_ir.search.joint.best_first import joint
from unity_ir.search.layouts.space import FREE_MOVE, Spaces

OPTIMIZERS = (Optimizer(), Optimizer("adam"))

SIZES = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2), (3, 2, 2))

LINKS = {"slow": (1e-6, 1e9), "fast": (1e-9, 1e12)}
"""Seconds a kernel or collective takes to start, and bytes per second of the slowest level."""

MACHINES = [
    pytest.param(boxes(*sizes, overhead=overhead, bandwidth=bandwidth), id=f"{'x'.join(map(str, sizes))}-{name}")
    for name, (overhead, bandwidth) in LINKS.items()
    for sizes in SIZES
]

EACH = examples(12)
"""Graphs of every family on every machine: with 12 machines, 288 in all, and three times as many in `make zoo`."""

ROOM = 300_000
"""Combinations of configurations of one graph."""


def largest(seed: int, machine: Machine, optimizer: Optimizer, distances: Distances) -> Brute:
    """
    Everything about the largest graph of this seed for which there is room; on three axes there may be none, for a
    layer and its loss, say: then of another family.
    """
    most = Random(seed).randint(1, 5)
    for family in range(len(FAMILIES)):
        for size in range(most, 0, -1):
            try:
                brute = Brute(small(seed + family, size), machine, optimizer, distances, ROOM)
                assert brute.seconds.size
            except TooMany:
                continue
            return brute
    raise AssertionError("no room")


def near(seconds: float, graph: Graph) -> float:
    """How far from the least a plan may be, for each free move counts a little in the search."""
    return 1e-9 * seconds + FREE_MOVE * 12 * len(graph.nodes())


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_faster(machine: Machine):
    distances = Distances(machine)
    for seed in range(EACH * len(FAMILIES)):
        optimizer = OPTIMIZERS[seed // 2 % 2]
        brute = largest(seed, machine, optimizer, distances)
        graph, least = brute.graph, float(brute.seconds.min())
        found = joint(graph, machine, (), optimizer)
        assert erase(found.graph) == graph
        assert cost(found.graph, machine, optimizer).time == pytest.approx(least, rel=1e-9, abs=near(least, graph)), (
            seed
        )
        assert found.bound is not None
        assert found.bound <= least
        # Of three axes, a value with many users may have more layouts than there is room to tell apart.
        assert found.plan.bound >= least * (1 - 1e-9) or len(machine.mesh.sizes) == 3, seed
        random = np.random.default_rng(seed)
        for choice in (
            np.unravel_index(brute.seconds.argmin(), brute.seconds.shape),
            tuple(int(random.integers(n)) for n in brute.seconds.shape),
        ):
            choice = tuple(map(int, choice))
            priced = cost(brute.plan(choice), machine, optimizer).time
            assert priced == pytest.approx(float(brute.seconds[choice]), rel=1e-9), seed


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine", [boxes(2, overhead=1e-6), boxes(2, overhead=1e-9, bandwidth=1e12)], ids=["slow", "fast"]
)
def test_nothing_is_faster_of_what_rewrites_lead_to(machine: Machine):
    distances, rewritten = Distances(machine), 0
    for seed in range(100, 100 + examples(54)):
        brute = largest(seed, machine, OPTIMIZERS[0], distances)
        found = run(brute.graph, machine)
        assert found.joint is not None
        time = (found.proved or found.cost).time
        assert time <= float(brute.seconds.min()) + near(time, brute.graph)
        rewritten += bool(found.derivation)
        after = Brute(found.joint.rewritten, machine, OPTIMIZERS[0], distances)
        assert time == pytest.approx(float(after.seconds.min()), abs=near(time, after.graph))
    assert rewritten


def test_users_that_read_alike_share_the_move():
    """A value made in rows that one user wants in rows and two in columns is brought to columns once."""
    machine, optimizer = boxes(2, overhead=1e-9, bandwidth=1e12), OPTIMIZERS[0]
    x = op("cumsum", weight("x", 12, 24), dim=1)
    users = (op("softmax", x), op("cumsum", x, dim=0), op("reduce_max", x, dim=0))
    graph = whole(*users)
    assert has_shared_moves(graph)
    solver = Solver(Spaces(machine), optimizer)
    alone = solver.solve(graph)
    priced = cost(realise(graph, alone, solver), machine, optimizer).time
    found = joint(graph, machine, (), optimizer)
    least = float(Brute(graph, machine, optimizer, Distances(machine)).seconds.min())
    # Each user charged for itself, that looks dearer than a plan in which nothing is moved at all.
    assert alone.bound > least * 1.01
    assert priced > least * 1.01
    assert cost(found.graph, machine, optimizer).time == pytest.approx(least, rel=1e-9)
    assert found.bound == pytest.approx(least, rel=1e-2)
    assert not has_shared_moves(whole(*users[:2]))
