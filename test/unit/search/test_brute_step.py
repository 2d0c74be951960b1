"""
The two lower bounds and the plan that is given, on small graphs of which everything is tried.

Of the time (each operator a kernel of its own, every move waited for) `test_brute.py` tries every placement. Here it
is the emitted time: every placement, every way to join operators to kernels, every order of kernels and collectives.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from brute import Brute, Distances, TooMany
from brute_step import Step, Task, least
from extent import ALL, sample
from graphs import boxes
from small import FAMILIES, small

from unity_ir.cost.least import emitted_bound
from unity_ir.machine import Machine
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.lower import lower
from unity_ir.search import run
from unity_ir.simulate.report import as_emitted
from unity_ir.simulate.streams import TICKS, ticks


def in_f32(graph: Graph) -> Graph:
    """The graph with f32 in place of f64, since Triton has no kernels of f64."""
    made: dict[Value, Value] = {}
    inputs: dict[Node, Node] = {}
    for node in graph.nodes():
        if node.is_leaf:
            (type,) = node.types
            dtype = "f32" if type.dtype == "f64" else type.dtype
            new = inputs[node] = leaf(node.op, tensor_type(type.shape, dtype), **dict(node.attributes))
        else:
            new = apply(node.op, [made[v] for v in node.operands], dict(node.attributes))
        made.update(zip(node.results, new.results, strict=True))
    return Graph(graph.name, tuple(inputs[n] for n in graph.inputs), tuple(made[v] for v in graph.outputs))


SIZES = ((2,), (3,), (2, 2))

COSTS = {"slow links": (0.0, 1e9), "starts": (1e-6, 1e9), "fast links": (0.0, 1e11)}
"""Seconds that a kernel or collective takes to start, and bytes per second of the slowest level."""

MACHINES = [
    pytest.param(boxes(*sizes, overhead=overhead, bandwidth=bandwidth), id=f"{'x'.join(map(str, sizes))}, {name}")
    for sizes in SIZES
    for name, (overhead, bandwidth) in COSTS.items()
]

EACH = 24 if ALL else 5
"""Graphs on every machine: with 9 machines, 216 in all; in `make test` a few on 3 machines."""

ROOM = 300 if ALL else 60
"""Placements of one graph."""

FURTHEST = 1.5
"""How far the plan given may be from the best of all: three kernels where two do are 50% more."""


def chosen(seed: int, machine: Machine, optimizer: Optimizer) -> tuple[Graph, Brute]:
    """The plan given for the largest graph of this seed of whose rewritten form all placements can be tried."""
    for family in range(len(FAMILIES)):
        for size in range(Random(seed).randint(1, 4), 0, -1):
            graph = in_f32(small(seed + family, size))
            if not graph.weights():
                continue
            found = run(graph, machine, optimizer=optimizer).graph
            try:
                return found, Brute(erase(found), machine, optimizer, Distances(machine), ROOM)
            except TooMany:
                continue
    raise AssertionError("no room")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("machine", sample(MACHINES, 4))
def test_nothing_is_below_the_bound_nor_far_below_the_plan(machine: Machine):
    """
    Of the graph that rewrites lead to: in every placement, values stored where the sum of seconds is least, with every
    set of kernels and in every order.
    """
    for seed in range(EACH):
        optimizer = (Optimizer(), Optimizer("adamw"))[seed % 2]
        found, brute = chosen(seed, machine, optimizer)
        given = best = ticks(as_emitted(found, machine, optimizer)[0])
        for choice in np.ndindex(brute.seconds.shape):
            plan = brute.plan(choice)
            best = min(best, ticks(as_emitted(plan, machine, optimizer)[0]))
            best = Step(lower(training_step(plan, optimizer, machine.mesh), machine), machine).least(best)
        bounds = [emitted_bound(found, machine, optimizer, everywhere) * TICKS for everywhere in (False, True)]
        assert max(bounds) <= best + 1, seed
        assert given <= FURTHEST * best + 1, seed


def test_the_least_of_all_orders():
    """A collective beside kernels, two on one port, and one that is issued too late."""
    kernel, port, other = (), (0,), (1,)
    assert least([Task(5, kernel, ()), Task(3, kernel, (0,))], 100) == 8
    # The collective of task 0 runs beside task 2, and task 3 waits for it.
    assert least([Task(2, kernel, ()), Task(6, port, (0,)), Task(4, kernel, ()), Task(1, kernel, (1,))], 100) == 9
    assert least([Task(4, port, ()), Task(4, port, ())], 100) == 8
    assert least([Task(4, port, ()), Task(4, other, ())], 100) == 4
    # The longer of two collectives starts first, so its kernel has to run first.
    tasks = [Task(1, kernel, ()), Task(1, kernel, ()), Task(2, port, (0,)), Task(9, other, (1,))]
    assert least(tasks, 100) == 10
    assert least(tasks, 10) == 10
    # Kernels that read each other's results have no order.
    assert least([Task(1, kernel, (1,)), Task(1, kernel, (0,))], 100) == 100
