"""Choose the cuts between stages, and the schedule, for given layouts of all units: by simulation, cut after cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import comb, inf
from typing import NamedTuple

from unity_ir.errors import UnityError
from unity_ir.search.pipeline.fastest import ScheduleOutcome
from unity_ir.search.pipeline.ranges import CountedSchedule, Cuts, FittedStages, StageRanges
from unity_ir.search.pipeline.stages import choose_stages

SPREAD = 1.5
"""Stages of more than this many times the mean, or of less than the mean by it, are chosen only if no others fit."""

GAIN = 1 - 1e-4
"""Part of a makespan at most that other stages must take to be preferred: each step is a simulation or more."""

FEW_CUTS = 200
"""Ways to cut a graph up to which all are simulated."""


def fastest_stages(
    ranges: StageRanges,
    orders: Sequence[CountedSchedule],
    is_clipped: bool,
    cuts: Cuts | None = None,
    is_fixed: bool = False,
) -> tuple[FittedStages, ScheduleOutcome] | None:
    """
    Return (stages, simulated schedule) with the least makespan found, over the places where stages begin and over the
    schedules `orders`; None if nothing fits the memory.

    `ranges` says what any range of units takes as a stage. `cuts` has the first unit of each stage but the first. The
    search starts from `cuts`, and moves one border between stages by one unit, or it and all later ones, as long as
    that makes the step faster. If `cuts` is None, it starts from the stages that `choose_stages` returns or, for
    schedules with several stages per part, from stages of about equal seconds (`StageRanges.equal_cuts`). Where there
    are at most `FEW_CUTS` ways to cut the units, all of them are tried instead.

    With `is_fixed` no border is moved: `cuts` alone are tried or, if None, all ways to cut. With `is_clipped`
    (gradients are clipped by their norm), updates wait for all ranks.
    """
    best: _Found | None = None
    by_stages: dict[int, list[CountedSchedule]] = {}
    for order in orders:
        by_stages.setdefault(order.schedule.stages, []).append(order)
    for of_one in by_stages.values():
        best = _fastest_cuts(ranges, of_one, is_clipped, cuts, is_fixed, best) or best
    return None if best is None else (best.stages, ranges.outcome(best.stages, best.order, is_clipped))


def _fastest_cuts(
    ranges: StageRanges,
    orders: Sequence[CountedSchedule],
    is_clipped: bool,
    cuts: Cuts | None,
    is_fixed: bool,
    than: _Found | None,
) -> _Found | None:
    """Return what `fastest_stages` does, of schedules of as many stages; None if none takes less than another."""
    best: _Found | None = None

    def faster(cuts: Cuts, order: CountedSchedule) -> _Found | None:
        limit = min((found.makespan * GAIN for found in (best, than) if found is not None), default=inf)
        found = ranges.makespan(cuts, order, is_clipped, limit)
        return None if found is None or found[1] >= limit else _Found(*found, order)

    stages, micro_batches = orders[0].schedule.stages, orders[0].schedule.micro_batches
    if is_fixed or comb(ranges.count - 1, stages - 1) <= FEW_CUTS:
        every = [cuts] if is_fixed and cuts is not None else combinations(range(1, ranges.count), stages - 1)
        for order, each in product(orders, every):
            best = faster(each, order) or best
        return best
    if cuts is None:
        is_one_each = stages == ranges.parts
        cuts = _least_formula(ranges, micro_batches) if is_one_each else ranges.equal_cuts(stages)
    if cuts is None:
        return None
    for order in orders:
        better = faster(cuts, order)
        while better is not None:
            best = better
            around = (faster(each, order) for each in _neighbours(best.stages.cuts, ranges.count))
            better = next(filter(None, around), None)
        cuts = cuts if best is None else best.stages.cuts
    return best


class _Found(NamedTuple):
    stages: FittedStages
    makespan: float
    order: CountedSchedule


def _least_formula(ranges: StageRanges, micro_batches: int) -> Cuts | None:
    for spread in (SPREAD, SPREAD**3, inf):
        try:
            stages = choose_stages(ranges.problem(micro_batches, spread)).stages
        except UnityError:
            continue
        return tuple(stage.first for stage in stages[1:])
    return None


def _neighbours(cuts: Cuts, count: int) -> Iterable[Cuts]:
    """Yield cuts with one of them, or one and all behind it, moved by one unit."""
    edges = (0, *cuts, count)
    for i in range(len(cuts)):
        for by in (1, -1):
            if edges[i] < cuts[i] + by < edges[i + 2]:
                yield (*cuts[:i], cuts[i] + by, *cuts[i + 1 :])
            shifted = tuple(cut + by for cut in cuts[i:])
            if i + 1 < len(cuts) and edges[i] < shifted[0] and shifted[-1] < count:
                yield (*cuts[:i], *shifted)
