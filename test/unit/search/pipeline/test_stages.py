"""Stages chosen by dynamic programming are the best of all there are, and no simulated pipeline beats the bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pipelines import random_order

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.search.pipeline.bound import makespan_bound
from unity_ir.search.pipeline.problem import Stage, StageChoice, StageProblem
from unity_ir.search.pipeline.stages import choose_stages, least_bound
from unity_ir.search.pipeline.table import StageOption, tabulate
from unity_ir.simulate.pipeline import simulate_pipeline


def random_problem(random: Random) -> StageProblem:
    """
    Layers, options and layouts of whole seconds, so that sums are exact; some options are missing or do not fit. Or
    more layers, with one option each.
    """
    is_long = random.random() < 0.2
    layers, devices = random.randint(6, 7) if is_long else random.randint(1, 5), random.randint(1, 5)
    layouts = 1 if is_long else random.randint(1, 2)
    parts = [1, 2] if is_long else random.sample(range(1, 6), random.randint(1, 4))
    spread = random.choice([1, 3, 20])
    missing = random.choice([0, 0 if is_long else 0.3])
    tables: dict[tuple[int, int, int], list[StageOption]] = {}
    for i in range(layers):
        for j in range(i + 1, layers + 1):
            for size in parts:
                tables[i, j, size] = [
                    StageOption(
                        forward=(j - i) * random.randint(4, 4 + spread),
                        backward=(j - i) * random.randint(4, 4 + spread),
                        once=random.choice([0, random.randint(0, 40)]),
                        held=random.randint(0, 6),
                        live=random.randint(0, 4),
                        layout_in=random.randrange(layouts),
                        layout_out=random.randrange(layouts),
                        input_gradient=1,
                    )
                    for _ in range(1 if is_long else random.randint(1, 3))
                    if random.random() >= missing
                ]
    sends = np.array([[random.choice([0, 1, 5]) for _ in range(layouts)] for _ in range(layers + 1)], dtype=float)
    table = tabulate(layers, parts, lambda i, j, size: tables[i, j, size], layouts)
    most = random.choice([None, random.randint(1, min(layers, devices))])
    memory = random.choice([float("inf"), random.randint(4, 16)])
    fewest = random.choice([1, random.randint(1, most or min(layers, devices))])
    return StageProblem(table, devices, random.randint(1, 8), memory, random.choice([None, sends]), most, fewest)


def all_stages(problem: StageProblem, first: int = 0, left: int | None = None) -> Iterator[list[Stage]]:
    """All ways to cut the layers from `first` on into stages, whatever fits."""
    table = problem.table
    left = problem.devices if left is None else left
    if first == table.layers:
        yield []
        return
    for last in range(first + 1, table.layers + 1):
        for size in table.parts:
            if size <= left:
                for option in table.options(first, last, size):
                    for rest in all_stages(problem, last, left - size):
                        if not rest or rest[0].option.layout_in == option.layout_out:
                            yield [Stage(first, last, size, option), *rest]


def sends_of(problem: StageProblem, stages: Sequence[Stage]) -> list[float]:
    return [float(problem.send_seconds[s.first, s.option.layout_in]) for s in stages[1:]]


def fits(problem: StageProblem, stages: Sequence[Stage], live: Sequence[int]) -> bool:
    """Whether each stage fits with its number of live micro-batches, and the number of stages is allowed."""
    return problem.fewest_stages <= len(stages) <= problem.stages and all(
        s.option.held + k * s.option.live <= problem.memory for s, k in zip(stages, live, strict=True)
    )


def live_1f1b(problem: StageProblem, stages: Sequence[Stage]) -> list[int]:
    schedule = pipeline_schedule("1f1b", len(stages), problem.micro_batches)
    return list(map(int, peak_live(schedule)))


def formula(problem: StageProblem, stages: Sequence[Stage]) -> float:
    t = [s.option.forward + s.option.backward for s in stages]
    sends = sends_of(problem, stages)
    return sum(t) + 2 * sum(sends) + (problem.micro_batches - 1) * max(t) + stages[0].option.once


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_the_stages_are_the_best_of_all(seed: int):
    problem = random_problem(Random(seed))
    fitting = [s for s in all_stages(problem) if fits(problem, s, live_1f1b(problem, s))]
    if not fitting:
        with pytest.raises(UnityError, match=r"^pipeline: no stages of \d layers fit \d devices of .* bytes; use more"):
            choose_stages(problem)
        assert least_bound(problem, "1f1b") == float("inf")
        return
    found = choose_stages(problem)
    assert list(found.stages) in fitting
    assert list(found.send) == sends_of(problem, found.stages)
    assert found.formula == formula(problem, found.stages) == min(formula(problem, s) for s in fitting)


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=250)
def test_no_cap_between_the_best_and_the_least_is_left_out(seed: int):
    """Ranges take anything at all, so sums and largest stages are traded in many ways."""
    random = Random(seed)
    layers, m = random.randint(6, 9), random.randint(2, 6)
    high = random.choice([30, 100])
    t = {(i, j): random.randint(10, high) for i in range(layers) for j in range(i + 1, layers + 1)}
    table = tabulate(layers, [1], lambda i, j, size: [StageOption(t[i, j], 0)])
    cuts = [list(compress(range(1, layers), chosen)) for chosen in product([0, 1], repeat=layers - 1)]
    stages = [list(zip([0, *cut], [*cut, layers], strict=True)) for cut in cuts]
    taken = [[t[s] for s in each] for each in stages]
    best = min(sum(each) + (m - 1) * max(each) for each in taken)
    assert choose_stages(StageProblem(table, layers, m)).formula == best


def of_stages(problem: StageProblem, stages: Sequence[Stage]) -> StageChoice:
    return StageChoice(tuple(stages), 0, tuple(sends_of(problem, stages)))


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_the_bound_is_the_least_of_all(seed: int):
    """Of updates, only that of the first stage is in it."""
    problem = random_problem(Random(seed))
    m = problem.micro_batches
    least: dict[str, float] = dict.fromkeys(("1f1b", "whole", "split"), float("inf"))
    for stages in all_stages(problem):
        t = [s.option.seconds for s in stages]
        before = [sum(t[:i]) + 2 * sum(sends_of(problem, stages)[:i]) for i in range(len(t))]
        value = max(m * t[0] + stages[0].option.once, *(b + m * s for b, s in zip(before, t, strict=True)))
        if fits(problem, stages, live_1f1b(problem, stages)):
            least["1f1b"] = min(least["1f1b"], value)
        if fits(problem, stages, [1] * len(stages)):
            least["whole"] = min(least["whole"], value)
            assert value <= makespan_bound(of_stages(problem, stages).seconds, m)
            f = [s.option.forward for s in stages]
            before = [sum(f[:i]) + sum(sends_of(problem, stages)[:i]) for i in range(len(t))]
            value = max(m * t[0] + stages[0].option.once, *(b + m * s for b, s in zip(before, t, strict=True)))
            least["split"] = min(least["split"], value)
            assert value <= makespan_bound(of_stages(problem, stages).seconds, m, is_split=True)
    assert least_bound(problem, "1f1b") == least["1f1b"]
    assert least_bound(problem, "whole") == least["whole"]
    # Options of one range may be mixed in it, forward of one and backward of another.
    if problem.table.layers > 5:
        assert least_bound(problem, "split") == least["split"]
    assert least_bound(problem, "split") <= least["split"]


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_no_simulated_pipeline_beats_the_bound(seed: int):
    """Any stages, in any order: one that holds less than 1F1B must beat only the weaker bound."""
    random = Random(seed)
    problem = random_problem(random)
    found = list(all_stages(problem))
    for stages in random.sample(found, min(len(found), 5)):
        seconds = of_stages(problem, stages).seconds
        for is_split in (False, True):
            schedule = random_order(random, range(len(stages)), problem.micro_batches, is_split)
            if fits(problem, stages, list(map(int, peak_live(schedule)))):
                makespan = simulate_pipeline(schedule, seconds).makespan
                assert makespan >= least_bound(problem, "split" if is_split else "whole")
        if fits(problem, stages, live_1f1b(problem, stages)):
            one = simulate_pipeline(pipeline_schedule("1f1b", len(stages), problem.micro_batches), seconds)
            assert one.makespan >= least_bound(problem, "1f1b")


def uniform(i: int, j: int, size: int) -> list[StageOption]:
    return [StageOption((j - i) / size, 2 * (j - i) / size, held=(j - i) / size, live=(j - i) / size)]


def test_recompute_is_chosen_where_micro_batches_wait():
    """First stages hold the most micro-batches: they recompute, last ones need not."""

    def options(i: int, j: int, size: int) -> list[StageOption]:
        layers = j - i
        return [StageOption(layers, 2 * layers, live=2 * layers), StageOption(layers, 2.5 * layers, live=layers)]

    problem = StageProblem(tabulate(16, [1], options), 4, 16, memory=18, most_stages=4)
    backward = [s.option.backward / (s.last - s.first) for s in choose_stages(problem).stages]
    assert backward == sorted(backward, reverse=True)
    assert (backward[0], backward[-1]) == (2.5, 2)


@pytest.mark.parametrize(
    ("devices", "m", "most", "error"),
    [
        (16, 4, 9, r"9 stages for 8 layers; use at most 8"),
        (4, 4, 5, r"5 stages for 4 devices; use at most 4"),
        (0, 4, None, r"devices, micro-batches and stages must be at least 1"),
        (4, 0, None, r"devices, micro-batches and stages must be at least 1"),
        (4, 4, 0, r"devices, micro-batches and stages must be at least 1"),
    ],
)
def test_problems_without_sense_are_refused(devices: int, m: int, most: int | None, error: str):
    table = tabulate(8, [1, 2], uniform)
    with pytest.raises(UnityError, match=f"^pipeline: {error}$"):
        StageProblem(table, devices, m, most_stages=most)


def test_sends_and_options_without_sense_are_refused():
    table = tabulate(2, [1], uniform)
    with pytest.raises(UnityError, match=r"^pipeline: sends must be 3 by 1 numbers of at least 0$"):
        StageProblem(table, 2, 2, sends=np.zeros((2, 1)))
    with pytest.raises(UnityError, match=r"^pipeline: seconds and bytes of stages must be numbers of at least 0$"):
        tabulate(2, [1], lambda i, j, size: [StageOption(float("nan"), 1)])
    with pytest.raises(UnityError, match=r"^pipeline: layouts of stages are numbered from 0 to 1; one has another"):
        tabulate(2, [1], lambda i, j, size: [StageOption(1, 1, layout_in=2)], layouts=2)
    with pytest.raises(UnityError, match=r"^pipeline: 0 layers on parts of \[1\] devices; give at least 1 of each$"):
        tabulate(0, [1], uniform)
