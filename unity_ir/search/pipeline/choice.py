"""
Choose whether to run a step as a pipeline: the number of stages, of micro-batches, and the schedule; and bound all that
there are.

Pairs of stages and micro-batches are estimated (`PipelineSearch.estimate`), unless the kernels of a part alone take
longer than the best estimate. Of the most promising, stages are sketched with layouts of few layers, and whole plans
made of the best sketches; of small graphs, of all pairs. The bound is the least of all pairs, those that were left out
by their estimates among them: the loosest is made tighter until it is as tight as can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import gcd, inf

from unity_ir.budget import OutOfBudget, own_budget
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part, part_counts
from unity_ir.search.pipeline.best_cuts import GAIN
from unity_ir.search.pipeline.equal import PipelinePlan, PipelineSearch
from unity_ir.search.pipeline.layout_bound import LayoutBounds
from unity_ir.search.pipeline.orders import ScheduleKind

Pair = tuple[int, int]
"""Numbers of parts of the machine and of micro-batches."""

ASTRAY = 1.15
"""More stages, or fewer, are not estimated once the best of them is slower than the best estimate by this factor."""

PLANS = 4
"""Pairs of which a whole plan is made, at most: those of the least estimates."""

ENOUGH = 1.03
"""Times a bound up to which the best pipeline found may take that no more is done to tighten the bound."""

FAR = 1.05
"""
Fewer micro-batches, or more, are not estimated once they get slower, and are slower than the best estimate by this
factor; nor is a plan made of what is estimated slower than the best plan by it.
"""


@dataclass(frozen=True)
class PipelineChoice:
    """The fastest pipeline found, and what was looked at for it."""

    plan: PipelinePlan
    tried: tuple[Pair, ...]
    """The pairs that were estimated."""
    search: PipelineSearch
    """The search that found it; bounds reuse its tables."""


def best_pipeline(
    search: PipelineSearch,
    parts: int | None = None,
    micro_batches: int | None = None,
    schedule: ScheduleKind | None = None,
    faster_than: float = inf,
    expecting: Callable[[Pair], object] | None = None,
) -> PipelineChoice | None:
    """
    Return the fastest pipeline found for the graph of `search` on two or more equal parts of its machine, each with one
    stage or more. Return None if it takes `faster_than` seconds or more, such as those of the best plan without stages.
    `expecting` is called, before whole plans are made, with the pair that seems the fastest, which is mostly chosen.

    `parts` and `micro_batches` are how many of each there are to be, None to choose. `schedule` is a pair (name, stages
    per part), of which the name may be None: then it is chosen from the schedules with that number of stages per part.
    If `schedule` itself is None, that number is chosen, too.

    Raises `UnityError` if the machine has no such parts, or the batch cannot be divided so. If no pipeline fits the
    memory, or none is possible with the schedule, returns None if `faster_than` is given, else raises `UnityError`.
    """
    if parts is not None:
        part(search.machine, parts)
    estimates = _estimates(search, parts, micro_batches, faster_than)
    promising = sorted((s, pair) for pair, s in estimates.items())[: None if search.is_small else PLANS]
    sketches: list[tuple[float, Pair]] = []
    failed: UnityError | None = None
    for seconds, pair in promising:
        most = min([faster_than, *(FAR * least for least, _ in sketches)])
        if not search.is_small and seconds >= most and (sketches or seconds < inf):
            break
        try:
            sketches.append((search.sketch(*pair, schedule).least, pair))
        except UnityError as error:
            failed = failed or error
    best: PipelinePlan | None = None
    if sketches and expecting is not None:
        expecting(min(sketches)[1])
    for least, pair in sorted(sketches):
        if best is not None and least >= best.makespan and not search.is_small:
            break
        try:
            plan = search.plan(*pair, schedule)
        except UnityError as error:
            failed = failed or error
            continue
        except OutOfBudget:
            if best is None:
                raise
            break
        if best is None or plan.makespan < best.makespan * GAIN:
            best = plan
    if best is None and faster_than == inf:
        raise failed or UnityError(f"pipeline: machine {search.machine.name} has no equal parts; leave stages out")
    if best is None or best.makespan >= faster_than:
        return None
    return PipelineChoice(best, tuple(estimates), search)


@dataclass(frozen=True)
class BoundedFamily:
    """The kind of pipelines that a lower bound is to hold for, and the makespan of the best one found."""

    is_split: bool
    """Backwards may be in halves: of inputs, then of weights."""
    has_chunks: bool
    """Parts may have several stages each."""
    makespan: float
    """Seconds of the best pipeline found, which no bound exceeds."""

    @staticmethod
    def of(plan: PipelinePlan) -> BoundedFamily:
        """
        Return the family of the pipeline `plan`: whether its schedule runs backwards in halves, whether its parts have
        several stages each, and its makespan.
        """
        return BoundedFamily(plan.outcome.schedule.splits_backward, plan.stages > plan.parts, plan.makespan)


class PipelineBounds:
    """
    Lower bounds, in seconds of a step, on all pipelines that `search` may plan: with the given numbers of `parts` and
    `micro_batches`, or any of 2 or more where these are None. They are tightened until the best pipeline found takes at
    most `enough` times as long, or no more can be done. The work of each step that tightens them has a limit of its
    own, so that the result is the same whenever the step is done.
    """

    def __init__(
        self,
        search: PipelineSearch,
        parts: int | None = None,
        micro_batches: int | None = None,
        *,
        enough: float = ENOUGH,
    ):
        self._search, self._parts, self._micro_batches = search, parts, micro_batches
        self._enough = enough
        self._shared = LayoutBounds(search, is_split=False)

    def below(self, family: BoundedFamily) -> tuple[float, str]:
        """
        Return (lower bound in seconds, text that names the pipelines it holds for); the bound is at most
        `family.makespan`. It holds for all layouts and all recompute, if every move inside a stage is waited for and
        what a weight is moved to is held for the whole step.

        If `family.has_chunks`, it holds for pipelines with any number of stages per part; else for those with one
        contiguous stage per part, with whole backwards under any synchronous schedule or, if `family.is_split`, with
        backwards whole or in halves, under schedules in which each rank holds at least as many micro-batches as under
        1F1B.
        """
        least = 0.0
        for least in self._tightened(family.is_split, family.has_chunks):
            if least * self._enough >= family.makespan:
                break
        name = "any number of stages per equal part"
        if not family.has_chunks:
            halves = "whole or in halves, as many micro-batches live as in 1f1b or more" if family.is_split else "whole"
            name = f"one contiguous stage per equal part, backwards {halves}"
        return min(least, family.makespan), name

    def ahead(self) -> Iterator[float]:
        """
        Compute and keep what `below` needs of pipelines with one stage per part. Each `next` tightens the bounds by one
        step and yields the bound so far, in seconds, so that a caller may stop between steps.
        """
        for is_split in (False, True):
            yield from self._tightened(is_split, False)

    def _tightened(self, is_split: bool, has_chunks: bool) -> Iterator[float]:
        """Yield the least of the bounds of all pairs, the loosest of which is tightened from one to the next."""
        bounds = LayoutBounds(self._search, is_split or has_chunks, shared=self._shared)
        steps = (bounds.of_kernels, bounds.of_kernels_that_fit, bounds.of_some_layouts, bounds.of_layouts)
        if has_chunks:
            steps = (bounds.work_of_kernels, bounds.work_of_layouts)
        queue = [(steps[0](*pair), 0, pair) for pair in self._pairs]
        heapq.heapify(queue)
        if not queue:
            return
        yield queue[0][0]
        with suppress(OutOfBudget):  # what is known by then is a bound, too
            while queue[0][1] + 1 < len(steps):
                least, step, pair = queue[0]
                with own_budget():
                    tighter = steps[step + 1](*pair)
                heapq.heapreplace(queue, (max(least, tighter), step + 1, pair))
                yield queue[0][0]

    @cached_property
    def _pairs(self) -> list[Pair]:
        search = self._search
        counts, divisors = _part_counts(search.machine, self._parts), _divisors(search, self._micro_batches)
        return [(p, m) for p in counts for m in divisors if search.has_units(p, m)]


def bound(
    choice: PipelineChoice, parts: int | None = None, micro_batches: int | None = None, *, enough: float = ENOUGH
) -> tuple[float, str]:
    """
    Return (lower bound in seconds of a step, text that names the pipelines it holds for). `choice` is what
    `best_pipeline` returned. The bound holds for pipelines of the same kind as the one chosen there: backwards whole or
    also in halves, one stage or several per part.

    `parts` and `micro_batches` are the numbers that the search was given, None where it chose. The bound is tightened
    until the pipeline takes at most `enough` times as long, or no more can be done.
    """
    bounds = PipelineBounds(choice.search, parts, micro_batches, enough=enough)
    return bounds.below(BoundedFamily.of(choice.plan))


def _estimates(
    search: PipelineSearch, parts: int | None, micro_batches: int | None, faster_than: float
) -> dict[Pair, float]:
    """
    Return the estimated seconds of pairs: from stages of about a node each on to more, and to fewer, until these are
    slower by far than others; without those that kernels alone rule out. Micro-batches are at first as many as there
    can be; with other stages, as many as were fastest for those before, then fewer, then more.
    """
    found: dict[Pair, float] = {}
    bounds = LayoutBounds(search, is_split=True)
    divisors = _divisors(search, micro_batches)
    near = 0

    def best() -> float:
        return min(found.values(), default=faster_than)

    def estimate(p: int) -> float:
        nonlocal near
        least, begin = inf, near
        for direction in (range(begin, len(divisors)), range(begin - 1, -1, -1)):
            for at in direction:
                m = divisors[at]
                known = faster_than if search.is_small else min(faster_than, best())
                is_slow = parts is None and bounds.work_of_kernels(p, m) >= known
                if is_slow or (parts is None and not search.has_units(p, m)):
                    continue
                most, astray = (inf, inf) if search.is_small else (FAR * best(), ASTRAY * best())
                found[p, m] = seconds = search.estimate(p, m, most, astray)
                if seconds > least and seconds > FAR * best() and not search.is_small:
                    break
                if seconds < least:
                    least, near = seconds, at
        return least

    if parts is not None:
        estimate(parts)
        return found
    counts = _part_counts(search.machine, None)
    inner = search.machine.levels[-1].size if counts else 1
    more = [count for count in counts if search.machine.devices // count <= inner]
    for direction in (more, [count for count in reversed(counts) if count not in more]):
        for p in direction:
            if estimate(p) > ASTRAY * best() and not search.is_small:
                break
    return found


def _part_counts(machine: Machine, forced: int | None) -> list[int]:
    """Return the numbers of equal parts of a machine from 2 on, or the one that is forced."""
    if forced is not None:
        return [forced]
    found: list[int] = []
    for count in part_counts(machine)[1:]:
        with suppress(UnityError):
            part(machine, count)
            found.append(count)
    return found


def _divisors(search: PipelineSearch, forced: int | None) -> list[int]:
    """
    Return the numbers of micro-batches from 2 on in which a step can run its batch, the largest first, or the one that
    is forced.
    """
    if forced is not None:
        return [forced]
    inputs = ((node, search.dims.get(node.name)) for node in search.graph.inputs)
    samples = gcd(*(node.result.shape[dim] for node, dim in inputs if dim is not None))
    found: list[int] = []
    for count in (m for m in range(samples, 1, -1) if samples % m == 0):
        with suppress(UnityError):
            search.small(count)
            found.append(count)
    return found
