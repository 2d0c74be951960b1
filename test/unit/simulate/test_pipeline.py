"""Times of pipeline schedules: the closed forms of the papers, exactly, and a slower simulation of any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import pipelines
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import order_sizes, random_schedule, random_seconds

from unity_ir.errors import UnityError
from unity_ir.plan.pipeline.actions import StageAction
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.orders import double_buffered
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.plan.pipeline.sends import with_sends
from unity_ir.plan.pipeline.total_order import total_order
from unity_ir.simulate.makespan import LevelledSchedule
from unity_ir.simulate.pipeline import (
    PipelineTimes,
    StageSeconds,
    sends_waited_for,
    simulate_pipeline,
    split_seconds,
)

ONE = Fraction(1)


def equal_times(
    schedule: PipelineSchedule, f: Fraction, i: Fraction, w: Fraction, send: Fraction = 0 * ONE
) -> PipelineTimes:
    """Times where each rank takes `f`, `i`, `w` per micro-batch, its stages equally long."""
    stages = schedule.stages
    v = Fraction(stages, len(schedule.ranks))
    parts = ([each / v] * stages for each in (f, i, w))
    return simulate_pipeline(schedule, split_seconds(*parts, send=[send] * (stages - 1)))


def bubble(name: str, p: int, v: int, f: Fraction, i: Fraction, w: Fraction) -> Fraction:
    return (p - 1) * {
        "gpipe": f + i + w,
        "1f1b": f + i + w,
        "eager-1f1b": f + i + w,
        "interleaved": (f + i + w) / v,
        "looped-bfs": (f + i + w) / v,
        "zb-h1": f + i - w,
        "zb-h2": f + max(i - 2 * w, 0),
        "zb-v": f / 2,
        "dualpipe-v": f / 2,
    }[name]


EQUAL_ONLY = ("zb-v", "dualpipe-v")
"""Orders whose closed form is for F = I = W."""

SYNCHRONOUS = tuple(name for name in ORDERS if name != "2bw")

part = st.integers(1, 30).map(lambda n: Fraction(n, 10))


@given(st.sampled_from(SYNCHRONOUS), st.integers(1, 8), st.integers(1, 4), st.integers(2, 4), part, part, part)
def test_bubbles_of_equal_stages_are_the_papers(
    name: str, p: int, v: int, rounds: int, f: Fraction, i: Fraction, w: Fraction
):
    """At least 2p micro-batches; zero-bubble orders need weight gradients that take no longer than the rest."""
    v = ORDERS[name].chunks or v
    if name.startswith("zb"):
        w = min(f, i, w)
    if name in EQUAL_ONLY:
        f = i = w
    times = equal_times(pipeline_schedule(name, p, rounds * p, v), f, i, w)
    assert times.makespan == rounds * p * (f + i + w) + bubble(name, p, v, f, i, w)
    assert times.bubble == bubble(name, p, v, f, i, w)
    if name == "zb-h2":
        assert times.idle_inside == (p - 1) * (f + i - 2 * w)
    elif name == "zb-v":
        assert times.idle_inside == 0
    else:
        assert times.idle_inside == times.bubble


@pytest.mark.parametrize(
    ("name", "p", "m", "seconds", "send", "expected"),
    [
        ("zb-h1", 4, 16, "1 1 1", "0", "3.0"),
        ("zb-h1", 4, 16, "1 1.2 0.8", "0", "4.2"),
        ("zb-v", 4, 16, "1 1.2 0.8", "0", "1.8"),
        ("zb-v", 8, 32, "1 1.2 0.8", "0", "4.2"),
        ("dualpipe-v", 4, 16, "1 1 1", "0", "1.5"),
        ("dualpipe-v", 8, 32, "1 1 1", "0", "3.5"),
        ("dualpipe-v", 4, 16, "1 1.2 0.8", "0", "2.1"),
        ("1f1b", 8, 32, "1 1 1", "0.1", "27.8"),
        ("eager-1f1b", 8, 32, "1 1 1", "0.1", "22.4"),
        ("interleaved", 8, 32, "1 1 1", "0.1", "13.5"),
        ("looped-bfs", 8, 32, "1 1 1", "0.1", "11.9"),
        ("zb-v", 8, 32, "1 1 1", "0.1", "6.8"),
    ],
)
def test_bubbles_of_unequal_parts_and_with_sends(name: str, p: int, m: int, seconds: str, send: str, expected: str):
    """Figures found by other simulators."""
    f, i, w = map(Fraction, seconds.split())
    times = equal_times(
        pipeline_schedule(name, p, m, ORDERS[name].chunks or 2 - ("1f1b" in name)), f, i, w, Fraction(send)
    )
    assert times.bubble == Fraction(expected)


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(0, 8), st.integers(2, 4), part, part)
def test_double_buffering_has_no_bubble_between_steps(p: int, more: int, steps: int, f: Fraction, b: Fraction):
    """One step more takes as long as its work."""
    m = p + more
    one, other = (equal_times(double_buffered(p, m, s), f, b / 2, b / 2) for s in (steps, steps + 1))
    assert other.makespan - one.makespan == m * (f + b)


@pytest.mark.slow
@given(st.integers(2, 6), st.integers(0, 6), st.data())
def test_steps_that_overlap_update_between_them(p: int, more: int, given: st.DataObject):
    """
    A step takes at least as long as the rank with most to do, updates included; and as long if all do as much, and
    sends take no time.
    """
    row = st.lists(st.integers(0, 20).map(Fraction), min_size=p, max_size=p)
    forward, backward, update, before, send = (given.draw(row) for _ in range(5))
    m, hops = p + more, send[1:]
    seconds = StageSeconds(*map(tuple, (forward, backward)), update=tuple(update), before=tuple(before))
    most = max(m * (f + b) + u + o for f, b, u, o in zip(forward, backward, update, before, strict=True))
    times = simulate_pipeline(double_buffered(p, m, 8), replace(seconds, send=tuple(hops)))
    assert times.period >= most
    assert times.bubble == times.period - most
    same = replace(seconds, forward=(forward[0],) * p, backward=(backward[0],) * p, update=(update[0],) * p)
    alike = simulate_pipeline(double_buffered(p, m, 4), replace(same, before=(before[0],) * p))
    assert alike.period == m * (forward[0] + backward[0]) + update[0] + before[0]


@given(st.integers(1, 8), st.integers(1, 20), part, part, part)
def test_eager_order_hides_sends_but_for_fill_and_drain(p: int, m: int, f: Fraction, i: Fraction, w: Fraction):
    send = min(f, i + w) / 2
    times = equal_times(pipeline_schedule("eager-1f1b", p, m), f, i, w, send)
    assert times.makespan == (m + p - 1) * (f + i + w) + 2 * (p - 1) * send


def relaxed(schedule: PipelineSchedule, seconds: StageSeconds) -> dict[StageAction, float]:
    """When each action ends: ends are raised until they fit all that comes before, over and over."""
    takes = {
        "F": seconds.forward,
        "B": seconds.backward,
        "I": seconds.input_gradient,
        "W": seconds.weight_gradient,
    }
    sending = with_sends(schedule)
    ends: dict[StageAction, float] = {}
    changed = True
    while changed:
        changed = False
        links: dict[tuple[int, int], StageAction] = {}
        for rank, actions in enumerate(sending.ranks):
            last: StageAction | None = None
            for action in actions:
                stage, kind, k = action
                after = [last] if last else []
                if kind == "SEND_F":
                    reader, boundary, source = sending.rank_of[stage + 1], stage, [StageAction(stage, "F", k)]
                elif kind == "SEND_B":
                    reader, boundary = sending.rank_of[stage - 1], stage - 1
                    source = [StageAction(stage, "B", k), StageAction(stage, "I", k)]
                elif kind.startswith("RECV"):
                    continue
                else:
                    if kind == "F":
                        after += [StageAction(stage - 1, "F", k), StageAction(stage - 1, "SEND_F", k)]
                    elif kind in ("B", "I"):
                        after += [StageAction(stage + 1, each, k) for each in ("B", "I", "SEND_B")]
                    end = max((ends.get(a, 0) for a in after), default=0) + takes[kind][stage]
                    last = action
                    changed |= ends.get(action) != end
                    ends[action] = end
                    continue
                before = [*source, links[rank, reader]] if (rank, reader) in links else source
                end = max(ends.get(a, 0) for a in before) + seconds.send[boundary]
                links[rank, reader] = action
                changed |= ends.get(action) != end
                ends[action] = end
    return ends


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_any_order_takes_as_long_as_its_longest_path(seed: int, is_split: bool, is_contiguous: bool):
    random = Random(seed)
    schedule = random_schedule(random, is_split, is_contiguous)
    seconds = random_seconds(random, schedule.stages)
    times = simulate_pipeline(schedule, seconds)
    expected = relaxed(schedule, seconds)
    for actions, starts, ends in zip(schedule.ranks, times.starts, times.ends, strict=True):
        assert ends == [expected[action] for action in actions]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    finish = [
        max(ends, default=0) + sum(seconds.update[s] for s in schedule.stages_of(rank))
        for rank, ends in enumerate(times.ends)
    ]
    assert times.makespan == max(finish)
    alone = simulate_pipeline(in_turn(schedule), seconds)
    assert alone.work == (sum(times.work),)
    assert alone.bubble == 0
    clipped = simulate_pipeline(schedule, seconds, is_clipped=True)
    levelled = LevelledSchedule(schedule)
    cases = [random_seconds(random, schedule.stages), seconds]
    for is_clipped, wanted in ((False, times.makespan), (True, clipped.makespan)):
        assert levelled.makespan(seconds, is_clipped) == wanted
        assert levelled.makespans(cases, is_clipped) == [levelled.makespan(each, is_clipped) for each in cases]
    last = max(max(ends) for ends in times.ends)
    assert clipped.makespan == last + max(
        sum(seconds.update[s] for s in schedule.stages_of(rank)) for rank in range(len(schedule.ranks))
    )


def in_turn(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule on one rank, in some order in which it ends."""
    return replace(
        schedule, ranks=(tuple(action for _, action in total_order(schedule)),), rank_of=(0,) * schedule.stages
    )


@given(order_sizes(SYNCHRONOUS), st.integers(0, 10**6))
def test_a_longer_part_never_makes_a_step_shorter(size: tuple[str, int, int, int], seed: int):
    random = Random(seed)
    schedule = pipeline_schedule(*size)
    seconds = random_seconds(random, schedule.stages)
    longer = list(seconds.forward)
    longer[random.randrange(schedule.stages)] += Fraction(1, 2)
    one, other = (simulate_pipeline(schedule, s) for s in (seconds, replace(seconds, forward=tuple(longer))))
    assert one.makespan <= other.makespan <= one.makespan + schedule.micro_batches * Fraction(1, 2)
    assert one.makespan >= max(one.work)


def test_a_stage_that_waits_for_its_sends_starts_later():
    """Of two micro-batches on two ranks: the second forward, and the second backward, are half a second later each."""
    schedule, stages = pipeline_schedule("gpipe", 2, 2), StageSeconds((1.0, 1.0), (2.0, 2.0), send=(0.5,))
    waited = sends_waited_for(stages, schedule.rank_of)
    assert simulate_pipeline(schedule, stages).makespan == 10
    assert simulate_pipeline(schedule, waited).makespan == 11
    # A rank sends itself nothing, and what is sent back may take longer.
    assert sends_waited_for(replace(stages, send_back=(4.0,)), (0, 1)).backward == (2.0, 6.0)
    assert sends_waited_for(stages, (0, 0)) == replace(stages, send=())


def test_sends_of_a_schedule_read_from_text_are_not_done_twice():
    schedule = pipeline_schedule("zb-h1", 3, 6)
    seconds = random_seconds(Random(1), 3)
    assert simulate_pipeline(with_sends(schedule), seconds).ends == simulate_pipeline(schedule, seconds).ends


def given_for(stages: int, **changed: Sequence[float]) -> StageSeconds:
    return replace(split_seconds([1] * stages, [1] * stages, [1] * stages), **{k: tuple(v) for k, v in changed.items()})


@pytest.mark.parametrize(
    ("name", "seconds", "error"),
    [
        ("1f1b", given_for(3), r"1f1b: it has 4 stages, seconds of forwards are given for 3; give 4"),
        ("1f1b", given_for(4, send=[1]), r"1f1b: it has 4 stages, seconds of sends are given for 1; give 3"),
        ("1f1b", given_for(4, backward=[1, 1]), r"1f1b: it has 4 stages, seconds of backwards are given for 2; give 4"),
        ("zb-h1", given_for(4, weight_gradient=[]), r"zb-h1: .* weight gradients are given for 0; give 4"),
        ("1f1b", given_for(4, forward=[1, 1, -1, 1]), r"1f1b: seconds must be numbers of at least 0"),
        ("1f1b", given_for(4, forward=[1, 1, float("nan"), 1]), r"1f1b: seconds must be numbers of at least 0"),
    ],
)
def test_seconds_of_other_stages_are_refused(name: str, seconds: StageSeconds, error: str):
    with pytest.raises(UnityError, match=f"^pipeline schedule {error}"):
        simulate_pipeline(pipeline_schedule(name, 4, 8), seconds)


def test_orders_that_never_end_are_refused():
    schedule = pipeline_schedule("1f1b", 2, 2)
    first, second = schedule.ranks
    with pytest.raises(UnityError, match=r"1f1b, rank 0: 0F1 waits|1f1b, rank 0: 0B0 waits for ever; check its order"):
        simulate_pipeline(replace(schedule, ranks=((first[2], *first[:2], first[3]), second)), given_for(2))


@pytest.mark.slow
def test_the_docs_show_the_table_as_it_is():
    assert pipelines.table(pipelines.rows()) in (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
