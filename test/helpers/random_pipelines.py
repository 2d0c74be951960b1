"""Pipeline schedules drawn at random: orders with sizes they are for, and any valid order at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

from hypothesis import strategies as st

from unity_ir.plan.pipeline.actions import StageAction
from unity_ir.plan.pipeline.catalogue import ORDERS
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.simulate.pipeline import StageSeconds, split_seconds


@st.composite
def order_sizes(draw: st.DrawFn, names: tuple[str, ...] = tuple(ORDERS)) -> tuple[str, int, int, int]:
    """An order, with ranks, micro-batches and stages per rank that it is for."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, 6))
    v = ORDERS[name].chunks or draw(st.integers(1, 4))
    m = draw(st.integers(1, 20))
    if name == "interleaved":
        m -= m % max(1, m // p)
    m = max(m, {"dualpipe-v": 2 * p, "2bw": p}.get(name, 1))
    return name, p, m, v


def random_schedule(random: Random, is_split: bool, is_contiguous: bool) -> PipelineSchedule:
    """A random order of a random number of stages and micro-batches; each rank has one stage if `is_contiguous`."""
    stages = random.randint(1, 5)
    rank_of = range(stages) if is_contiguous else sorted_names([random.randrange(stages) for _ in range(stages)])
    return random_order(random, rank_of, random.randint(1, 7), is_split)


def random_order(random: Random, rank_of: Sequence[int], m: int, is_split: bool) -> PipelineSchedule:
    """
    Any order in which no rank waits for ever: what can be done next is drawn, one after the other. Backwards are whole,
    or if `is_split` some are in halves.
    """
    stages = len(rank_of)
    lists: list[list[StageAction]] = [[] for _ in range(max(rank_of) + 1)]
    ready = [StageAction(0, "F", k) for k in range(m)]
    # Some ranks and kinds are preferred, or all orders would be alike.
    taste = {(kind, stage): random.random() for kind in "FIBW" for stage in range(stages)}
    while ready:
        action = min(random.sample(ready, min(len(ready), random.randint(1, 4))), key=lambda a: taste[a.kind, a.stage])
        ready.remove(action)
        stage, kind, k = action
        lists[rank_of[stage]].append(action)
        if kind == "F" and stage < stages - 1:
            ready.append(StageAction(stage + 1, "F", k))
        back = stage if kind == "F" and stage == stages - 1 else stage - 1 if kind in ("B", "I") else -1
        if back >= 0:
            ready.append(StageAction(back, "I" if is_split and random.random() < 0.7 else "B", k))
        if kind == "I":
            ready.append(StageAction(stage, "W", k))
    return PipelineSchedule("random", m, tuple(map(tuple, lists)), tuple(rank_of))


def sorted_names(ranks: list[int]) -> list[int]:
    """Ranks, numbered anew from 0 in the order in which they appear."""
    names: dict[int, int] = {}
    return [names.setdefault(rank, len(names)) for rank in ranks]


def random_seconds(random: Random, stages: int) -> StageSeconds:
    """Exact seconds of stages, sends and updates; whole backwards may be quicker or slower than their halves."""

    def some(count: int, low: int, high: int) -> list[Fraction]:
        return [Fraction(random.randint(low, high), 8) for _ in range(count)]

    spread = random.choice([2, 20])
    forward, half, other = (some(stages, 8, 8 + spread) for _ in range(3))
    send = some(stages - 1, 0, random.choice([0, 4, 30]))
    update = some(stages, 0, random.choice([0, 40]))
    seconds = split_seconds(forward, half, other, send, update)
    saved = some(stages, random.choice([-8, 0]), random.choice([0, 8]))
    return replace(seconds, backward=tuple(b - s for b, s in zip(seconds.backward, saved, strict=True)))
