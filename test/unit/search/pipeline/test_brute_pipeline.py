"""Try all pipelines of small graphs: the search finds the fastest, and its bound is not above that."""

from __future__ import annotations

import pytest
from brute import TooMany
from brute_pipeline import Pair, least_by_schedule, least_pipelines, trunk
from extent import ALL
from graphs import boxes, with_memory

from unity_ir.machine import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.pipeline.best_cuts import GAIN
from unity_ir.search.pipeline.choice import best_pipeline, bound
from unity_ir.search.pipeline.equal import PipelineSearch
from unity_ir.search.pipeline.layout_bound import LayoutBounds

OPTIMIZER = Optimizer("adamw")

COSTS = {"slow links": (0.0, 1e9), "starts": (1e-6, 1e9), "fast links": (0.0, 1e11)}
"""Seconds that a kernel or collective takes to start, and bytes per second of the slowest level."""

MACHINES = [
    pytest.param(boxes(*sizes, overhead=overhead, bandwidth=bandwidth), id=f"{'x'.join(map(str, sizes))}, {name}")
    for sizes in ((2, 2), (2, 3), (4,))
    for name, (overhead, bandwidth) in COSTS.items()
]

EACH = 23 if ALL else 1
"""Graphs on every machine: 207 in all; in `make test` a few."""

WHOLE = ("gpipe", "1f1b", "eager-1f1b")
"""Schedules of one stage per part that run backwards whole."""

ROOM = 400 if ALL else 60
"""Placements of one graph."""


def small_trunk(seed: int, machine: Machine) -> tuple[Graph, dict[Pair, float]]:
    """The largest graph of this seed of which everything can be tried, and the least makespan of each pair."""
    for size in (5, 4, 3, 2):
        graph = trunk(seed, size)
        try:
            found = least_pipelines(graph, machine, OPTIMIZER, ROOM)
        except TooMany:
            continue
        if found:
            return graph, found
    raise AssertionError("no room")


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("machine", MACHINES)
def test_no_pipeline_is_faster_and_none_below_the_bound(machine: Machine, seed: int):
    graph, found = small_trunk(seed, machine)
    choice = best_pipeline(PipelineSearch(graph, machine, OPTIMIZER))
    assert choice is not None
    assert set(choice.tried) == set(found)
    least = min(found.values())
    assert least * (1 - 1e-9) <= choice.plan.makespan <= least / GAIN
    assert 0 < bound(choice)[0] <= least * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("machine", MACHINES)
def test_no_bound_is_above_what_any_schedule_takes(machine: Machine, seed: int):
    """The bound of a kind of schedule is at most the least makespan of that kind, with and without enough memory."""
    graph, _ = small_trunk(seed, machine)
    choice = best_pipeline(PipelineSearch(graph, machine, OPTIMIZER))
    assert choice is not None
    for on in (machine, with_memory(machine, int(0.8 * max(choice.plan.peaks)))):
        search = PipelineSearch(graph, on, OPTIMIZER)
        whole, split = LayoutBounds(search, is_split=False), LayoutBounds(search, is_split=True)
        for pair, found in least_by_schedule(graph, on, OPTIMIZER, ROOM).items():
            for (name, chunks), least in found.items():
                bounds = [split.work_of_kernels, split.work_of_layouts]
                if chunks == 1:
                    bounds += [split.of_kernels_that_fit, split.of_some_layouts, split.of_layouts]
                if chunks == 1 and name in WHOLE:
                    bounds += [whole.of_kernels_that_fit, whole.of_some_layouts, whole.of_layouts]
                assert all(of(*pair) <= least * (1 + 1e-9) for of in bounds), (pair, name, chunks)
