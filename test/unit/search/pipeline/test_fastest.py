"""The schedule taken is the fastest that fits, as simulated."""

from __future__ import annotations

from random import Random

import pytest
from extent import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pipelines import random_seconds

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.search.pipeline.bound import makespan_bound
from unity_ir.search.pipeline.fastest import StageLoads, fastest_schedule, loads_of_choice, simulated_schedules
from unity_ir.search.pipeline.problem import StageProblem
from unity_ir.search.pipeline.stages import choose_stages
from unity_ir.search.pipeline.table import StageOption, tabulate
from unity_ir.simulate.pipeline import StageSeconds, simulate_pipeline, split_seconds


def equal(stages: int, send: float = 0, live: float = 1) -> StageLoads:
    one = [4 / stages] * stages
    seconds = split_seconds(one, one, one, [send] * (stages - 1))
    return StageLoads(seconds, (0.0,) * stages, (live * 4 / stages,) * stages)


@pytest.mark.parametrize(
    ("memory", "send", "name"),
    [(100, 0, "zb-v"), (7, 0, "zb-v"), (100, 0.5, "zb-h2"), (6.9, 0.5, "zb-v"), (3.9, 0, None)],
)
def test_of_equal_stages_the_papers_best_is_taken(memory: float, send: float, name: str | None):
    """ZB-V has the least bubble and holds 4 micro-batches as 1F1B does; sends cost ZB-H2 less, which holds 7."""
    by_chunks = {1: equal(4, send), 2: equal(8, send)}
    if name is None:
        with pytest.raises(
            UnityError, match=r"^pipeline: no schedule fits devices of 4 bytes, the least peak is 4; use"
        ):
            fastest_schedule(by_chunks, 8, memory)
    else:
        assert fastest_schedule(by_chunks, 8, memory).schedule.name == name


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(st.integers(0, 10**6), st.booleans())
def test_the_fastest_that_fits_is_taken(seed: int, is_clipped: bool):
    random = Random(seed)
    p, m = random.randint(1, 5), random.randint(1, 16)
    by_chunks: dict[int, StageLoads] = {}
    for v in random.sample([1, 2, 3], random.randint(1, 3)):
        seconds = random_seconds(random, p * v)
        if random.random() < 0.5:  # no halves
            seconds = StageSeconds(seconds.forward, seconds.backward, send=seconds.send, update=seconds.update)
        sizes = [tuple(random.randint(0, 5) for _ in range(p * v)) for _ in range(2)]
        by_chunks[v] = StageLoads(seconds, *sizes)
    memory = random.randint(10, 60)
    expected: dict[tuple[str, int], float] = {}
    for v, load in by_chunks.items():
        for name, order in ORDERS.items():
            if name == "2bw" or (order.chunks or max(v, 2)) != v:
                continue
            try:
                schedule = pipeline_schedule(name, p, m, v)
                makespan = simulate_pipeline(schedule, load.seconds, is_clipped).makespan
            except UnityError:
                continue
            live = peak_live(schedule, load.live)
            if all(sum(load.held[s] for s in schedule.stages_of(r)) + live[r] <= memory for r in range(p)):
                expected[name, v] = makespan
    if not expected:
        with pytest.raises(UnityError, match=r"^pipeline: no schedule fits"):
            fastest_schedule(by_chunks, m, memory, is_clipped)
        return
    found = fastest_schedule(by_chunks, m, memory, is_clipped)
    at = (found.schedule.name, found.schedule.stages // p)
    assert found.times.makespan == expected[at] == min(expected.values())
    for outcome in simulated_schedules(by_chunks, m, is_clipped):
        load = by_chunks[outcome.schedule.stages // p]
        bound = makespan_bound(load.seconds, m, outcome.schedule.rank_of, is_split=True, is_clipped=is_clipped)
        assert outcome.times.makespan >= bound


def test_stages_that_were_chosen_are_simulated():
    """Of stages that 1F1B fits, the schedule taken is never slower than 1F1B."""

    def options(i: int, j: int, size: int) -> list[StageOption]:
        layers = (j - i) / size
        return [StageOption(layers, 2 * layers, held=3 * layers, live=layers, input_gradient=layers)]

    problem = StageProblem(tabulate(12, [1, 2, 4], options), 8, 16, memory=24)
    choice = choose_stages(problem)
    found = fastest_schedule({1: loads_of_choice(choice)}, 16, problem.memory)
    one = simulate_pipeline(pipeline_schedule("1f1b", len(choice.stages), 16), choice.seconds)
    assert found.times.makespan <= one.makespan
    assert found.fits(24)
