"""No synchronous order is faster than the bound, and some are as fast."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import order_sizes, random_schedule, random_seconds

from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.search.pipeline.bound import makespan_bound
from unity_ir.simulate.pipeline import StageSeconds, simulate_pipeline, split_seconds

SYNCHRONOUS = tuple(name for name in ORDERS if name != "2bw")

part = st.integers(1, 30).map(lambda n: Fraction(n, 10))


def holds(schedule: PipelineSchedule, seconds: StageSeconds) -> None:
    for is_clipped in (False, True):
        makespan = simulate_pipeline(schedule, seconds, is_clipped).makespan
        m, ranks = schedule.micro_batches, schedule.rank_of
        split = makespan_bound(seconds, m, ranks, is_split=True, is_clipped=is_clipped)
        assert split <= makespan
        if not schedule.splits_backward:
            whole = makespan_bound(seconds, m, ranks, is_clipped=is_clipped)
            assert split <= whole <= makespan


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_no_order_at_all_is_faster(seed: int, is_split: bool, is_contiguous: bool):
    random = Random(seed)
    schedule = random_schedule(random, is_split, is_contiguous)
    holds(schedule, random_seconds(random, schedule.stages))


@pytest.mark.slow
@given(order_sizes(SYNCHRONOUS), st.integers(0, 10**6))
def test_no_order_of_the_catalogue_is_faster(size: tuple[str, int, int, int], seed: int):
    schedule = pipeline_schedule(*size)
    holds(schedule, random_seconds(Random(seed), schedule.stages))


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(1, 20), part, part, part)
def test_orders_of_equal_stages_are_as_fast(p: int, m: int, f: Fraction, i: Fraction, w: Fraction):
    """1F1B of all whole backwards, for any number of micro-batches; ZB-H2 of all, for enough of them and of weights."""
    seconds = split_seconds([f] * p, [i] * p, [w] * p)
    one_f_one_b = simulate_pipeline(pipeline_schedule("1f1b", p, m), seconds)
    assert makespan_bound(seconds, m) == one_f_one_b.makespan
    w = min(f, i)
    seconds = split_seconds([f] * p, [min(i, 2 * w)] * p, [w] * p)
    zb_h2 = simulate_pipeline(pipeline_schedule("zb-h2", p, m + 2 * p), seconds)
    assert makespan_bound(seconds, m + 2 * p, is_split=True) == zb_h2.makespan


@given(st.integers(0, 10**6), st.booleans())
def test_the_bound_is_the_formula(seed: int, is_split: bool):
    """Of one stage per rank without sends; the formula counts no updates of ranks that others wait for."""
    random = Random(seed)
    p, m = random.randint(1, 6), random.randint(1, 12)
    f, i, w = ([Fraction(random.randint(1, 9)) for _ in range(p)] for _ in range(3))
    b = [x + y for x, y in zip(i, w, strict=True)]
    if is_split:
        expected = max(sum(f[:s]) + max(m * (f[s] + b[s]), m * (f[s] + i[s]) + sum(i[:s])) for s in range(p))
        assert makespan_bound(split_seconds(f, i, w), m, is_split=True) >= expected
    else:
        expected = max(sum(f[:s]) + m * (f[s] + b[s]) + sum(b[:s]) for s in range(p))
        assert makespan_bound(split_seconds(f, i, w), m) == max(expected, sum(f) + sum(b))
