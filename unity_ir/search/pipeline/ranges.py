"""
What ranges of units take as stages on equal parts of a machine: as options of `stages`, and as the loads of stages that
are chosen, with as little recompute as makes each fit beside the micro-batches that its schedule holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import inf

import numpy as np

from unity_ir.machine.model import Machine
from unity_ir.machine.parts import send_seconds
from unity_ir.plan.pipeline.live import live_counts
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.search.pipeline.balance import balanced
from unity_ir.search.pipeline.bound import makespan_bound
from unity_ir.search.pipeline.fastest import ScheduleOutcome, StageLoads, peaks
from unity_ir.search.pipeline.problem import StageProblem
from unity_ir.search.pipeline.rows import UnitRows
from unity_ir.search.pipeline.table import Floats, StageOption, tabulate
from unity_ir.simulate.makespan import LevelledSchedule
from unity_ir.simulate.pipeline import StageSeconds, simulate_pipeline

Cuts = tuple[int, ...]
"""The first unit of each stage but the first, ascending."""


@dataclass(frozen=True, eq=False)
class RankCounts:
    """
    How many micro-batches a rank holds at each moment when its memory may peak (`live_counts`). The array `of` [moment,
    column] has two columns for each of the rank's stages, in order: the number of micro-batches held whole, from the
    forward until the gradient of the stage's input is made; and the number of which only a rest is held, from then
    until the gradients of the stage's weights are made. Ranks with equal counts share one object.
    """

    of: Floats

    def most(self, live: Sequence[float], late: Sequence[float]) -> float:
        """
        Return the most bytes that micro-batches take on the rank at any moment. For each of the rank's stages, `live`
        has the bytes of a micro-batch that is held whole, and `late` those of one of which only a rest is held.
        """
        each = [bytes for pair in zip(live, late, strict=True) for bytes in pair]
        return float((self.of @ np.array(each)).max())


@dataclass(frozen=True)
class CountedSchedule:
    """
    A pipeline schedule with how many micro-batches each rank holds at its peaks (`held`), and whether it runs backwards
    in halves.
    """

    schedule: PipelineSchedule
    held: tuple[RankCounts, ...]
    is_split: bool

    @cached_property
    def levelled(self) -> LevelledSchedule:
        """
        The schedule prepared for computing makespans only: for many sets of stage seconds that is quicker than a
        simulation, which returns the times of all actions.
        """
        return LevelledSchedule(self.schedule)

    @staticmethod
    def of(schedule: PipelineSchedule) -> CountedSchedule:
        """Return `schedule` with the counts of micro-batches that each of its ranks holds."""
        every = [live_counts(schedule, rank) for rank in range(len(schedule.ranks))]
        same = {counts: RankCounts(np.array(counts, dtype=float).reshape(len(counts), -1)) for counts in set(every)}
        return CountedSchedule(schedule, tuple(map(same.__getitem__, every)), schedule.splits_backward)


@dataclass(frozen=True)
class FittedStages:
    """Stages that fit the memory, each with as little recompute as that takes."""

    cuts: Cuts
    variants: tuple[int, ...]
    """For each stage, the index of the variant (layouts of all units) that it takes."""
    loads: StageLoads
    levels: tuple[int, ...]
    """For each unit, its level of recompute (`UnitRows.again`); 0 recomputes nothing."""


@dataclass(frozen=True)
class _Recompute:
    """
    The least recompute with which a stage fits: units before `border` at `level`, those behind at one level less.
    """

    level: int
    border: int
    again: float
    """Seconds."""
    working: float
    """Bytes, and those per live micro-batch."""
    live: float


class _Prefixes:
    """Rows of a variant as sums over the units before each."""

    def __init__(self, rows: UnitRows):
        self.rows = rows
        self.forward, self.input, self.weight, self.once, self.held = (
            _prefixes(a) for a in (rows.forward, rows.input_gradient, rows.weight_gradient, rows.once, rows.held)
        )
        self.again, self.live, self.late = _prefixes(rows.again), _prefixes(rows.live), _prefixes(rows.late)

    def seconds(self, first: int, last: int) -> tuple[float, float, float]:
        """Return the seconds of forward, input gradient and weight gradient of some units, without recompute."""
        forward, half, rest = (float(a[last] - a[first]) for a in (self.forward, self.input, self.weight))
        return forward, half, rest

    def recompute(self, first: int, last: int, room: float, count: int) -> _Recompute | None:
        """
        Return the least recompute with which units fit into `room` bytes with `count` micro-batches live; None if they
        do not.
        """
        working: Floats = self.rows.working[:, first:last].max(axis=1)
        live = self.live[:, last] - self.live[:, first]
        fits = working + count * live <= room
        level = int(fits.argmax())
        if not fits[level]:
            return None
        if level == 0:
            return _Recompute(0, last - first, 0.0, float(working[0]), float(live[0]))
        low, high = self.live[level - 1], self.live[level]
        saved = (low - high)[first + 1 : last + 1] - (low - high)[first]
        most = float(working[level - 1 : level + 1].max())
        needed = float(live[level - 1]) - (room - most) / count
        border = min(int((saved < needed).sum()) + 1, last - first)
        if border == last - first:
            most = float(working[level])
        again, bytes = (
            float(of[level, first + border] - of[level, first] + of[level - 1, last] - of[level - 1, first + border])
            for of in (self.again, self.live)
        )
        return _Recompute(level, border, again, most, bytes)


_StageRange = tuple[int, int]
"""First unit, unit behind the last."""

_FittedStage = tuple[int, tuple[float, float, float, float], float, _Recompute]
"""Variant, seconds (forward, input gradient, weight gradient, once), bytes held, recompute."""


class StageRanges:
    """
    Says what ranges of units (contiguous runs of operators, `cuts`) take as stages, on `parts` equal parts of `machine`
    with one stage or more each, and `memory` bytes per device. Each of `variants` is one choice of layouts for all
    units, as seconds and bytes; all stages of a part take the same one. `last` are seconds that every part spends once
    per step, after all micro-batches, beside its own.
    """

    def __init__(self, variants: Sequence[UnitRows], machine: Machine, parts: int, memory: float, last: float = 0.0):
        self.variants = [_Prefixes(rows) for rows in variants]
        self.count = variants[0].count
        self.machine, self.parts, self.memory, self.last = machine, parts, memory, last
        self._send = cache(self._send_seconds)
        self._best: dict[object, tuple[_FittedStage, ...] | None] = {}

    def stages(self, cuts: Cuts) -> Iterator[tuple[int, int]]:
        """
        Yield (first unit, unit behind the last) of each stage. `cuts` are the first units of all stages but the first.
        """
        return zip((0, *cuts), (*cuts, self.count), strict=True)

    def own(self, variant: int, first: int, last: int) -> tuple[float, float, float]:
        """
        Return what units `first` .. `last` - 1 take as a stage, in the layouts of variant number `variant`: (seconds
        once per step, bytes held whatever the number of micro-batches, seconds per micro-batch of adding up gradients
        of weights that are stored on an earlier stage).
        """
        rows = self.variants[variant]
        once = float(rows.once[last] - rows.once[first]) + self.last
        held = float(rows.held[last] - rows.held[first])
        added = 0.0
        for unit, reader, (elements, item), copy, addition in rows.rows.tied:
            if unit < first <= reader < last:
                added += addition
                once += 2 * max(self._send(b, b + 1, elements, item) for b in range(self.parts - 1))
                held += copy
        return once, held, added

    def send(self, variant: int, cut: int, source: int, target: int) -> float:
        """
        Return the seconds of sending one micro-batch's values, or their gradients, between part `source` and part
        `target`, at the border before unit number `cut`; 0 if the parts are the same. `variant` is the number of the
        layouts of the stage before the border.
        """
        if source == target:
            return 0.0
        sent = self.variants[variant].rows.sent[cut - 1]
        return sum(self._send(source, target, elements, item) for elements, item in sent)

    def _send_seconds(self, source: int, target: int, elements: float, item: int) -> float:
        return send_seconds(self.machine, self.parts, source, target, elements, item)

    # --- choosing stages ----------------------------------------------------------------------------------------------

    def problem(self, micro_batches: int, spread: float) -> StageProblem:
        """
        Return the problem, for `choose_stages`, of cutting the units into exactly one stage per part. The options of a
        range of units are, for each variant (choice of layouts), the least recompute with which it fits while n
        micro-batches are held, for several n up to what 1F1B's first stage holds. `micro_batches` is their number in a
        step.

        Left out are ranges far from a fair share: with a = (seconds per micro-batch of all units in a variant, without
        recompute) / (number of parts), those that take less than a / `spread` or more than a * `spread` in it.
        """
        counts = _spaced(min(micro_batches, self.parts))
        totals = [sum(rows.seconds(0, self.count)) / self.parts for rows in self.variants]
        longest = self.count - self.parts + 1  # each other stage has a unit, too

        def options(first: int, last: int, devices: int) -> list[StageOption]:
            found: list[StageOption] = []
            if last - first > longest:
                return found
            for variant, rows in enumerate(self.variants):
                forward, half, rest = rows.seconds(first, last)
                if not totals[variant] / spread <= forward + half + rest <= spread * totals[variant]:
                    continue
                once, held, added = self.own(variant, first, last)
                before: float | None = None
                for count in counts:
                    least = rows.recompute(first, last, self.memory - held, count)
                    if least is not None and least.again != before:
                        before = least.again
                        backward = half + rest + added + before
                        found.append(StageOption(forward, backward, once, held + least.working, least.live))
                    if before == 0:
                        break
            return found

        sends = np.zeros((self.count + 1, 1))
        sends[1 : self.count, 0] = [
            max(self.send(0, c, b, b + 1) for b in range(self.parts - 1)) for c in range(1, self.count)
        ]
        table = tabulate(self.count, [1], options)
        return StageProblem(table, self.parts, micro_batches, self.memory, sends, self.parts, self.parts)

    def equal_cuts(self, stages: int) -> Cuts | None:
        """
        Cut the units into `stages` (their number) stages of about equal seconds, without recompute and in the first
        variant's layouts. Return the first unit of each stage but the first; None if there are fewer units than stages.
        """
        rows = self.variants[0].rows
        each = rows.forward + rows.input_gradient + rows.weight_gradient
        return tuple(balanced(each.tolist(), stages)[:-1]) if stages <= self.count else None

    # --- given stages -------------------------------------------------------------------------------------------------

    def fitted(self, cuts: Cuts, order: CountedSchedule) -> FittedStages | None:
        """
        Return the stages between `cuts`, with their seconds and bytes, each with the least recompute that makes it fit
        the memory under the schedule `order`. Each part takes the variant (choice of layouts) in which its stages then
        take the fewest seconds. Return None if the stages of some part fit in no variant.
        """
        schedule = order.schedule
        by_rank: dict[int, list[int]] = {}
        for stage, rank in enumerate(schedule.rank_of):
            by_rank.setdefault(rank, []).append(stage)
        every = [*self.stages(cuts)]
        found: dict[int, _FittedStage] = {}
        for rank, mine in by_rank.items():
            best = self._best_on_part(tuple(every[stage] for stage in mine), order.held[rank], schedule.micro_batches)
            if best is None:
                return None
            found.update(zip(mine, best, strict=True))
        stages = [found[stage] for stage in range(len(every))]
        levels: list[int] = []
        for (first, last), (_, _, _, least) in zip(every, stages, strict=True):
            levels += [least.level] * least.border + [max(least.level - 1, 0)] * (last - first - least.border)
        forward, half, rest, once = zip(*(took for _, took, _, _ in stages), strict=True)
        backward = tuple(i + w for i, w in zip(half, rest, strict=True))
        variants = tuple(variant for variant, _, _, _ in stages)
        ranks = pairwise(schedule.rank_of)
        send = tuple(self.send(v, cut, *pair) for v, cut, pair in zip(variants, cuts, ranks, strict=False))
        seconds = StageSeconds(forward, backward, half, rest, send, once)
        held = tuple(bytes + least.working for _, _, bytes, least in stages)
        live = tuple(least.live for _, _, _, least in stages)
        late = tuple(self._late(variant, *range) for variant, range in zip(variants, every, strict=True))
        return FittedStages(cuts, variants, StageLoads(seconds, held, live, late), tuple(levels))

    def _late(self, variant: int, first: int, last: int) -> float:
        late = self.variants[variant].late
        return float(late[last] - late[first])

    def _best_on_part(
        self, ranges: tuple[_StageRange, ...], counts: RankCounts, micro_batches: int
    ) -> tuple[_FittedStage, ...] | None:
        key = ranges, counts, micro_batches
        if key not in self._best:
            options = (self._on_part(variant, ranges, counts) for variant in range(len(self.variants)))
            self._best[key] = min(
                filter(None, options),
                key=lambda stages: sum(sum(took[:3]) * micro_batches + took[3] for _, took, _, _ in stages),
                default=None,
            )
        return self._best[key]

    def _on_part(
        self, variant: int, ranges: tuple[_StageRange, ...], counts: RankCounts
    ) -> tuple[_FittedStage, ...] | None:
        """
        Return the stages that ranges of units make on one part in a variant, which holds at most as many micro-batches
        as `counts` says; None if they do not fit. Several recompute at the same level.
        """
        if len(ranges) == 1:
            stage = self._as_stage(variant, *ranges[0], counts)
            return None if stage is None else (stage,)
        rows = self.variants[variant]
        own = [self.own(variant, first, last) for first, last in ranges]
        held = sum(bytes for _, bytes, _ in own)
        late = [self._late(variant, first, last) for first, last in ranges]
        for level in range(len(rows.live)):
            live = [float(rows.live[level, last] - rows.live[level, first]) for first, last in ranges]
            working = [float(rows.rows.working[level, first:last].max()) for first, last in ranges]
            most = counts.most(live, late)
            if held + most + max(working) > self.memory:
                continue
            found: list[_FittedStage] = []
            for (first, last), (once, bytes, added), each, most in zip(ranges, own, live, working, strict=True):
                forward, half, rest = rows.seconds(first, last)
                again = float(rows.again[level, last] - rows.again[level, first])
                # One backward runs at a time: the stage that works in most bytes has them for all.
                is_most = most == max(working) and not any(stage[3].working for stage in found)
                least = _Recompute(level, last - first, again, most if is_most else 0.0, each)
                took = forward, half + again, rest + added, once - self.last * bool(found)
                found.append((variant, took, bytes, least))
            return tuple(found)
        return None

    def _as_stage(self, variant: int, first: int, last: int, counts: RankCounts) -> _FittedStage | None:
        """
        Return the stage that units make in a variant, with one of these numbers of live micro-batches, whole and late;
        None if it does not fit.
        """
        once, held, added = self.own(variant, first, last)
        rows, late = self.variants[variant], self._late(variant, first, last)
        rooms = [(self.memory - held - m * late, int(n)) for n, m in counts.of]
        every = [rows.recompute(first, last, room, n) for room, n in rooms if n]
        found = [each for each in every if each is not None]
        least = max(
            found, key=lambda each: (each.level, each.border), default=_Recompute(0, last - first, 0.0, 0.0, 0.0)
        )
        if len(found) < len(every) or any(least.working + n * least.live > room + 1 for room, n in rooms):
            return None
        forward, half, rest = rows.seconds(first, last)
        return variant, (forward, half + least.again, rest + added, once), held, least

    def makespan(
        self, cuts: Cuts, order: CountedSchedule, is_clipped: bool, limit: float = inf
    ) -> tuple[FittedStages, float] | None:
        """
        Return (stages as `fitted` returns them, simulated makespan of the schedule `order` in seconds); None if they do
        not fit, or if a lower bound says that the makespan is `limit` seconds or more. With `is_clipped` (gradients are
        clipped by their norm), updates wait for all ranks.
        """
        found = self.fitted(cuts, order)
        if found is None:
            return None
        seconds = found.loads.seconds
        schedule = order.schedule
        if makespan_bound(seconds, schedule.micro_batches, schedule.rank_of, order.is_split, is_clipped) >= limit:
            return None
        return found, order.levelled.makespan(seconds, is_clipped)

    def outcome(self, fitted: FittedStages, order: CountedSchedule, is_clipped: bool) -> ScheduleOutcome:
        """
        Simulate the schedule of fitted stages: return the times of all its actions, and the peak bytes of each rank.
        With `is_clipped` (gradients are clipped by their norm), updates wait for all ranks.
        """
        times = simulate_pipeline(order.schedule, fitted.loads.seconds, is_clipped)
        return ScheduleOutcome(times, peaks(order.schedule, fitted.loads))


def _spaced(most: int) -> list[int]:
    """Return numbers from `most` down to 1, each by about a fifth less than the one before."""
    found = [most]
    while found[-1] > 1:
        found.append(min(found[-1] - 1, found[-1] * 4 // 5))
    return found


def _prefixes(array: Floats) -> Floats:
    """Return sums along the last axis of the first 0, 1, .. entries."""
    return np.concatenate([np.zeros((*array.shape[:-1], 1)), np.cumsum(array, axis=-1)], axis=-1)
