"""Whatever stages hold, no order is faster than the bound by the number of micro-batches live."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import random_order

from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.pipeline.live_bound import LiveTables, least_makespan
from unity_ir.simulate.pipeline import StageSeconds, simulate_pipeline

WHOLE = ("gpipe", "1f1b", "eager-1f1b")


def ranges(each: Floats) -> Floats:
    """Seconds [first, unit behind the last] of ranges of units that take these seconds."""
    sums = np.concatenate([[0.0], np.cumsum(each)])
    return sums[None, :] - sums[:, None]


def simulated(
    schedule: PipelineSchedule, tables: LiveTables, cuts: tuple[int, ...], sends: Floats, forward: float
) -> float:
    """Seconds of stages that take just what the tables say with the micro-batches that the schedule holds there."""
    edges = (0, *cuts, len(tables.free) - 1)
    live = [int(each) for each in peak_live(schedule, [1] * schedule.stages)]
    each = [tables.of(n)[i, j] for n, i, j in zip(live, edges, edges[1:], strict=False)]
    seconds = StageSeconds(
        tuple(forward * t for t in each),
        tuple((1 - forward) * t for t in each),
        send=tuple(sends[cut] for cut in cuts),
    )
    return simulate_pipeline(schedule, seconds).makespan


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_no_order_is_faster_whatever_is_live(seed: int):
    random = Random(seed)
    units, p, m = random.randint(2, 5), random.randint(1, 4), random.randint(1, 9)
    p = min(p, units)
    tables = LiveTables(ranges(np.array([random.uniform(1, 2) for _ in range(units)])))
    for live in sorted(random.sample(range(1, 9), random.randint(0, 3))):
        tables.add(live, random.choice((1.0, 2.0)), tables.free * random.uniform(0.9, 1.6) - random.uniform(0, 1))
    sends = np.array([0.0, *(random.choice((0.0, random.random())) for _ in range(units - 1)), 0.0])
    least = least_makespan(tables, sends, p, m, is_split=False)
    forward = random.uniform(0.2, 0.5)
    orders = [pipeline_schedule(name, p, m, 1) for name in WHOLE]
    orders += [random_order(random, range(p), m, is_split=False) for _ in range(3)]
    for cuts in combinations(range(1, units), p - 1):
        for order in orders:
            assert least <= simulated(order, tables, cuts, sends, forward) * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 64), (8, 128)])
def test_a_long_first_stage_waits_for_what_it_cannot_hold(p: int, m: int):
    """It takes 1.2, others 1: of 1F1B's p micro-batches live it begins the next when one is back."""
    tables, sends = LiveTables(ranges(np.array([1.2, *[1.0] * (p - 1)]))), np.zeros(p + 1)
    free = least_makespan(tables, sends, p, m, is_split=False)
    tables.add(p + 1, 1.0, tables.free + 100.0)  # no more fit
    found = least_makespan(tables, sends, p, m, is_split=False)
    assert found == pytest.approx(2 * (p + 0.2) + 1.2 * (m - p - 1))
    assert free < found
    cuts = tuple(range(1, p))
    assert found <= simulated(pipeline_schedule("1f1b", p, m, 1), tables, cuts, sends, 0.5) * (1 + 1e-9)


def test_bounds_between_two_prices_of_a_byte_are_of_the_mixture():
    """At shares 1 - w and w of prices 1 and 3, with 2 and 6 live, those of 4 live have w = 1/4."""
    tables = LiveTables(np.zeros((2, 2)))
    tables.add(2, 1.0, np.full((2, 2), 8.0))
    tables.add(6, 3.0, np.full((2, 2), 16.0))
    assert [float(tables.of(live)[0, 1]) for live in (1, 2, 4, 6, 9)] == [0.0, 8.0, 10.0, 16.0, 16.0]
