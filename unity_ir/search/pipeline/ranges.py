"""
What ranges of units take as stages on equal parts of a machine: as options of `stages`, and as the loads of stages that
are chosen, with as little recompute as makes each fit beside the micro-batches that its schedule holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from math import inf

import numpy as np

from unity_ir.machine.model import Machine
from unity_ir.machine.parts import send_seconds
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.search.pipeline.bound import makespan_bound
from unity_ir.search.pipeline.fastest import ScheduleOutcome, StageLoads
from unity_ir.search.pipeline.problem import StageProblem
from unity_ir.search.pipeline.rows import UnitRows
from unity_ir.search.pipeline.table import Floats, StageOption, tabulate
from unity_ir.simulate.makespan import LevelledSchedule
from unity_ir.simulate.pipeline import StageSeconds, simulate_pipeline

Cuts = tuple[int, ...]
"""The first unit of each stage but the first, ascending."""


@dataclass(frozen=True)
class CountedSchedule:
    """A schedule of one stage per rank, the micro-batches that each rank holds at most, whether it splits backwards."""

    schedule: PipelineSchedule
    held: tuple[int, ...]
    is_split: bool

    @cached_property
    def levelled(self) -> LevelledSchedule:
        return LevelledSchedule(self.schedule)

    @staticmethod
    def of(schedule: PipelineSchedule) -> CountedSchedule:
        held = tuple(round(each) for each in peak_live(schedule))
        return CountedSchedule(schedule, held, schedule.splits_backward)


@dataclass(frozen=True)
class FittedStages:
    """Stages that fit: the variant of each, what it takes, and the level of recompute of every unit."""

    cuts: Cuts
    variants: tuple[int, ...]
    loads: StageLoads
    levels: tuple[int, ...]


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
        self.again, self.live = _prefixes(rows.again), _prefixes(rows.live)

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


_FittedStage = tuple[int, tuple[float, float, float, float], float, _Recompute]
"""Variant, seconds (forward, input gradient, weight gradient, once), bytes held, recompute."""


class StageRanges:
    """
    Ranges of units as stages, each on one of `parts` equal parts of `machine`; devices have `memory` bytes for them.
    Each stage takes what one of the `variants` says, layouts of all units. `last` are seconds that every stage spends
    once beside its own, after all micro-batches.
    """

    def __init__(self, variants: Sequence[UnitRows], machine: Machine, parts: int, memory: float, last: float = 0.0):
        self.variants = [_Prefixes(rows) for rows in variants]
        self.count = variants[0].count
        self.machine, self.parts, self.memory, self.last = machine, parts, memory, last
        self._send = cache(self._send_seconds)
        self._best: dict[tuple[int, ...], _FittedStage | None] = {}

    def stages(self, cuts: Cuts) -> Iterator[tuple[int, int]]:
        """Yield (first unit, unit behind the last) of each stage."""
        return zip((0, *cuts), (*cuts, self.count), strict=True)

    def own(self, variant: int, first: int, last: int) -> tuple[float, float]:
        """Return (seconds once, bytes whatever is live) of units `first` .. `last` - 1 as a stage."""
        rows = self.variants[variant]
        once = float(rows.once[last] - rows.once[first]) + self.last
        held = float(rows.held[last] - rows.held[first])
        for unit, reader, (elements, item), copy in rows.rows.tied:
            if unit < first <= reader < last:
                once += 2 * max(self._send(b, elements, item) for b in range(self.parts - 1))
                held += copy
        return once, held

    def send(self, variant: int, cut: int, boundary: int) -> float:
        """
        Return the seconds of a micro-batch's values, or gradients, from the part before a boundary to the next, where
        `variant` is that of the stage before.
        """
        sent = self.variants[variant].rows.sent[cut - 1]
        return sum(self._send(boundary, elements, item) for elements, item in sent)

    def _send_seconds(self, boundary: int, elements: float, item: int) -> float:
        return send_seconds(self.machine, self.parts, boundary, elements, item)

    # --- choosing stages ----------------------------------------------------------------------------------------------

    def problem(self, micro_batches: int, spread: float) -> StageProblem:
        """
        Return the choice of exactly as many stages as parts, of ranges of at most `spread` times the mean seconds per
        micro-batch without recompute, and at least the mean over it. Options are variants, and the least recompute with
        which a range fits, for several numbers of live micro-batches.
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
                once, held = self.own(variant, first, last)
                before: float | None = None
                for count in counts:
                    least = rows.recompute(first, last, self.memory - held, count)
                    if least is not None and least.again != before:
                        before = least.again
                        backward = half + rest + before
                        found.append(StageOption(forward, backward, once, held + least.working, least.live))
                    if before == 0:
                        break
            return found

        sends = np.zeros((self.count + 1, 1))
        sends[1 : self.count, 0] = [
            max(self.send(0, c, b) for b in range(self.parts - 1)) for c in range(1, self.count)
        ]
        table = tabulate(self.count, [1], options)
        return StageProblem(table, self.parts, micro_batches, self.memory, sends, self.parts, self.parts)

    # --- given stages -------------------------------------------------------------------------------------------------

    def fitted(self, cuts: Cuts, order: CountedSchedule) -> FittedStages | None:
        """
        Return the loads of stages under a schedule: of each, the variant that takes the fewest seconds with the least
        recompute that makes it fit. None if one does not.
        """
        seconds: list[tuple[float, float, float, float]] = []
        bytes: list[tuple[float, float]] = []
        variants: list[int] = []
        levels: list[int] = []
        micro_batches = order.schedule.micro_batches
        for (first, last), live in zip(self.stages(cuts), order.held, strict=True):
            key = first, last, live, micro_batches
            if key not in self._best:
                options = (self._as_stage(variant, first, last, live) for variant in range(len(self.variants)))
                self._best[key] = min(
                    filter(None, options), key=lambda of: sum(of[1][:3]) * micro_batches + of[1][3], default=None
                )
            best = self._best[key]
            if best is None:
                return None
            variant, took, held, least = best
            seconds.append(took)
            bytes.append((held + least.working, least.live))
            variants.append(variant)
            behind = max(least.level - 1, 0)
            levels += [least.level] * least.border + [behind] * (last - first - least.border)
        forward, half, rest, once = zip(*seconds, strict=True)
        held, live = zip(*bytes, strict=True)
        backward = tuple(i + w for i, w in zip(half, rest, strict=True))
        send = tuple(self.send(variants[b], cut, b) for b, cut in enumerate(cuts))
        of = StageSeconds(forward, backward, half, rest, send, once)
        return FittedStages(cuts, tuple(variants), StageLoads(of, held, live), tuple(levels))

    def _as_stage(self, variant: int, first: int, last: int, live: int) -> _FittedStage | None:
        """Return the stage that units make in a variant, with so many live micro-batches; None if it does not fit."""
        once, held = self.own(variant, first, last)
        rows = self.variants[variant]
        least = rows.recompute(first, last, self.memory - held, live)
        if least is None:
            return None
        forward, half, rest = rows.seconds(first, last)
        return variant, (forward, half + least.again, rest, once), held, least

    def makespan(
        self, cuts: Cuts, order: CountedSchedule, is_clipped: bool, limit: float = inf
    ) -> tuple[FittedStages, float] | None:
        """
        Return stages, fitted, and the simulated makespan of their schedule, in seconds; None if they do not fit, or
        cannot take less than `limit` seconds.
        """
        found = self.fitted(cuts, order)
        if found is None:
            return None
        seconds = found.loads.seconds
        if makespan_bound(seconds, order.schedule.micro_batches, None, order.is_split, is_clipped) >= limit:
            return None
        return found, order.levelled.makespan(seconds, is_clipped)

    def outcome(self, fitted: FittedStages, order: CountedSchedule, is_clipped: bool) -> ScheduleOutcome:
        """Return the schedule of stages, simulated with the times of all actions."""
        loads = fitted.loads
        times = simulate_pipeline(order.schedule, loads.seconds, is_clipped)
        peaks = (held + count * live for held, live, count in zip(loads.held, loads.live, order.held, strict=True))
        return ScheduleOutcome(times, tuple(peaks))


def least_longest(seconds: Floats, count: int) -> float:
    """
    Return the longest of at most `count` contiguous runs of items where that is the least, but for a millionth: given
    [1, 1, 2] and 2, returns 2.
    """
    total = [0.0, *accumulate(map(float, seconds))]
    low, high = max(float(seconds.max()), total[-1] / count), total[-1]
    while high - low > 1e-6 * high:
        cap, end = (low + high) / 2, 0
        for _ in range(count):
            end = bisect_right(total, total[end] + cap) - 1
            if end == len(seconds):
                break
        low, high = (low, cap) if end == len(seconds) else (cap, high)
    return high


def _spaced(most: int) -> list[int]:
    """Return numbers from `most` down to 1, each by about a fifth less than the one before."""
    found = [most]
    while found[-1] > 1:
        found.append(min(found[-1] - 1, found[-1] * 4 // 5))
    return found


def _prefixes(array: Floats) -> Floats:
    """Return sums along the last axis of the first 0, 1, .. entries."""
    return np.concatenate([np.zeros((*array.shape[:-1], 1)), np.cumsum(array, axis=-1)], axis=-1)
