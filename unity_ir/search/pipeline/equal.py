"""
Plan a step as a pipeline of equal parts of a machine: layouts within the part, stages, recompute and schedule.

1. Layouts come from the exact solver, for the graph of one micro-batch on a part, at several prices of a byte: what a
   step does once counts 1 / micro-batches (`Price.once`), activations count for each micro-batch that is live
   (`Price.live`). Solved is a graph with few of its equal layers, whose rows stand for all.
2. Stages are chosen from these variants by a formula (`stages`): early ones, which hold more micro-batches, may take
   layouts that hold less. Each recomputes just enough to fit (`ranges`). Borders are then moved by a unit at a time
   while that lowers the simulated makespan. Schedules of several stages per part begin with stages of equal seconds.
3. The whole graph is solved at the prices that were chosen, each stage placed as at its own, and all priced once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from math import comb, inf
from typing import NamedTuple

import numpy as np

from unity_ir.cost.plan import cost, norm_seconds
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part
from unity_ir.pcg.graph import Graph, Node, Pipeline, erase_with
from unity_ir.pcg.layers import like_shortened
from unity_ir.pcg.micro_batches import micro_batch
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.exact.axis_groups import solve
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import with_shared_moves
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.limits import limited, limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.pipeline.balance import least_longest
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.fastest import ScheduleOutcome, StageLoads
from unity_ir.search.pipeline.ranges import CountedSchedule, Cuts, FittedStages, StageRanges
from unity_ir.search.pipeline.rows import PricedUnits, UnitRows, priced_units
from unity_ir.search.pipeline.stages import choose_stages

ScheduleKind = tuple[str | None, int]
"""The name of a schedule, None for any, and the stages that it has on each part."""

SYNCHRONOUS = tuple(name for name, order in ORDERS.items() if not order.is_asynchronous)
"""Schedules whose step computes what the serial step does."""

TRIED: tuple[tuple[str, int], ...] = (
    *((name, 1) for name in SYNCHRONOUS if ORDERS[name].chunks == 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-v", 2),
    ("dualpipe-v", 2),
)
"""Schedules from which one is chosen."""

ACTIONS = 100_000
"""
Forwards and backwards up to which schedules of several stages per part are tried: making and simulating one takes about
a second, and with as many micro-batches the bubble that they shorten is small.
"""

BYTE_PRICES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""
Prices of a byte that are tried where memory is short: times the seconds of a micro-batch over the memory of all stages.
At 1 a plan that takes all memory costs twice its time.
"""

SPREAD = 1.5
"""Stages of more than this many times the mean, or of less than the mean by it, are chosen only if no others fit."""


GAIN = 1 - 1e-4
"""Part of a makespan at most that other stages must take to be preferred: each step is a simulation or more."""

FEW_CUTS = 200
"""Ways to cut a graph up to which all are simulated."""


@dataclass(frozen=True)
class PipelinePlan:
    """A step as a pipeline: its stages on equal contiguous parts of a machine, one or more each, and what it takes."""

    graph: Graph
    """The placed forward graph of one micro-batch, on the mesh of one part; with marks of what is recomputed."""
    stage_of: Mapping[Node, int]
    """The stage of every compute node and leaf of `graph`; of a leaf, that of its first reader."""
    part: Machine
    """The machine of one stage."""
    micro_batches: int
    loads: StageLoads
    """Seconds and bytes of each stage, every move waited for."""
    outcome: ScheduleOutcome
    """The schedule, simulated, and the peak bytes of a device of each part."""
    serial: Graph
    """The serial forward graph of one micro-batch, of which `graph` is the placement."""

    @property
    def stages(self) -> int:
        return len(self.loads.held)

    @property
    def parts(self) -> int:
        return len(self.outcome.schedule.ranks)

    @property
    def schedule(self) -> str:
        """Return the schedule's name."""
        return self.outcome.schedule.name

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.schedule, self.parts, self.stages // self.parts)

    @property
    def makespan(self) -> float:
        """Return the simulated seconds of a step."""
        return self.outcome.times.makespan

    @property
    def peaks(self) -> tuple[float, ...]:
        """Return the peak bytes of a device, by rank."""
        return self.outcome.peaks


def pipeline_plan(
    graph: Graph,
    machine: Machine,
    parts: int,
    micro_batches: int,
    schedule: ScheduleKind | None = None,
    optimizer: Optimizer | None = None,
) -> PipelinePlan:
    """
    Return the fastest plan found of a serial forward graph as a pipeline on equal parts of a machine and with so many
    micro-batches, under one schedule of `SYNCHRONOUS`, by default the fastest of those that are `TRIED`.

    Raises `UnityError` where the machine has no such parts (`machine.part`), the samples cannot be divided so, the
    graph has fewer units than stages (`cuts`), the schedule is none of these, or nothing is found that fits.
    """
    problem = PipelineSearch(graph, machine, optimizer or graph.optimizer or Optimizer())
    return problem.plan(parts, micro_batches, schedule)


class PipelineSearch:
    """Plans pipelines of one graph on one machine; tables of parts and micro-batches are shared between plans."""

    def __init__(self, graph: Graph, machine: Machine, optimizer: Optimizer):
        self.graph, self.machine, self.optimizer = graph, machine, optimizer
        self.dims = sample_dims(graph)
        self._small: dict[int, Graph] = {}
        self._solvers: dict[tuple[int, int], Solver] = {}
        self._found: dict[tuple[int, int], list[tuple[Price, UnitRows]]] = {}

    def small(self, micro_batches: int) -> Graph:
        """Return the serial graph of one micro-batch."""
        if micro_batches not in self._small:
            whole = micro_batches == 1
            self._small[micro_batches] = self.graph if whole else micro_batch(self.graph, self.dims, micro_batches)
        return self._small[micro_batches]

    def has_units(self, stages: int, micro_batches: int) -> bool:
        """Return whether the graph of one micro-batch can be cut into so many stages."""
        return stages <= len(units(self.small(micro_batches)).parts)

    def solver(self, parts: int, micro_batches: int) -> Solver:
        """
        Return the solver of layouts of one micro-batch on a part, in seconds of a step per micro-batch. Mesh axes of
        large parts are in groups.
        """
        if (parts, micro_batches) not in self._solvers:
            same = [solver for (p, _), solver in self._solvers.items() if p == parts]
            if same:
                found = same[0]
            else:
                short, _ = like_shortened(self.small(micro_batches), limits().rewritten_layers)
                with limited(group_rows=0):
                    found, _ = solve(short, part(self.machine, parts), self.optimizer)
            self._solvers[parts, micro_batches] = found.at(Price(once=1 / micro_batches))
        return self._solvers[parts, micro_batches]

    def plan(self, parts: int, micro_batches: int, schedule: ScheduleKind | None = None) -> PipelinePlan:
        """Return the fastest plan found, as `pipeline_plan` does."""
        small = self.small(micro_batches)
        count = len(units(small).parts)
        _check_units(count, parts * (schedule[1] if schedule else 1))
        orders = _orders(parts, micro_batches, schedule, count)
        solver = self.solver(parts, micro_batches)
        variants = self.variants(parts, micro_batches)
        found = self._fastest([rows for _, rows in variants], orders, parts)
        if found is None:
            raise UnityError(
                f"pipeline: no stages on {parts} parts with {micro_batches} micro-batches fit devices of "
                f"{self.memory:,.0f} bytes; use more parts or smaller micro-batches"
            )
        prices = [variants[variant][0] for variant in found[0].variants]
        alike = [order for order in orders if order.schedule.rank_of == found[1].schedule.rank_of]
        return self._whole(small, solver, prices, found[0].cuts, alike, micro_batches)

    @property
    def memory(self) -> float:
        return self.machine.device.usable

    def variants(self, stages: int, micro_batches: int) -> list[tuple[Price, UnitRows]]:
        """
        Return the rows of all units in the best layouts at several prices of a byte; without one alone, if what these
        hold is far from what fits. Of equal layers few are solved. Memoised.
        """
        if (stages, micro_batches) not in self._found:
            self._found[stages, micro_batches] = self._variants(stages, micro_batches)
        return self._found[stages, micro_batches]

    def _variants(self, stages: int, micro_batches: int) -> list[tuple[Price, UnitRows]]:
        solver = self.solver(stages, micro_batches)
        short, of = like_shortened(self.small(micro_batches), limits().rewritten_layers)
        found = [(solver.price, self._rows(short, of, solver, micro_batches))]
        rows = found[0][1]
        live = min(stages, micro_batches)
        needs = rows.held.sum() + live * rows.live[0].sum() + stages * rows.working[0].max()
        if needs <= stages * self.memory / SPREAD:
            return found
        seconds = float((rows.forward + rows.input_gradient + rows.weight_gradient).sum())
        for times in BYTE_PRICES:
            byte = times * seconds / (stages * self.memory)
            price = replace(solver.price, byte=byte, again=True, live=(live + 1) / 2)
            rows = self._rows(short, of, solver.at(price), micro_batches)
            if not any(rows.is_like(other) for _, other in found):
                found.append((price, rows))
        return found

    def estimate(self, stages: int, micro_batches: int) -> float:
        """
        Return about the seconds of a step: of stages as equal as units allow, that hold as many micro-batches as those
        of 1F1B do on average, without sends; inf if they do not fit.
        """
        p, m, best = stages, micro_batches, inf
        live = (min(p, m) + 1) / 2
        for _, rows in self.variants(p, m):
            needs = (rows.held.sum() + live * rows.live.sum(axis=1)) / p + rows.working.max(axis=1)
            fits = needs <= self.memory
            if fits.any():
                each = rows.forward + rows.input_gradient + rows.weight_gradient + rows.again[int(fits.argmax())]
                best = min(best, float(each.sum() + rows.once.sum() / p) + (m - 1) * least_longest(each.tolist(), p))
        return best

    def _rows(self, graph: Graph, of: Sequence[int], solver: Solver, micro_batches: int) -> UnitRows:
        """Return the rows of the units `of` of a serial graph in the best layouts found."""
        return self.priced(graph, self.solved(graph, solver), solver, micro_batches).rows.picked(of)

    def solved(self, graph: Graph, solver: Solver) -> ExactPlan:
        return replace(with_shared_moves(solver, graph, solver.solve(graph)), again=frozenset())

    def priced(self, graph: Graph, plan: ExactPlan, solver: Solver, micro_batches: int) -> PricedUnits:
        placed = realise(graph, plan, solver)
        priced = cost(placed, solver.spaces.machine, self.optimizer)
        return priced_units(priced, placed, self.optimizer, micro_batches)

    def _fastest(
        self, variants: Sequence[UnitRows], orders: Sequence[CountedSchedule], parts: int, cuts: Cuts | None = None
    ) -> tuple[FittedStages, ScheduleOutcome] | None:
        last = norm_seconds(self.optimizer, self.machine)
        ranges = StageRanges(variants, self.machine, parts, self.memory, last)
        return fastest_stages(ranges, orders, self.optimizer.clip > 0, cuts)

    def _whole(
        self,
        small: Graph,
        solver: Solver,
        prices: Sequence[Price],
        cuts: Cuts,
        orders: Sequence[CountedSchedule],
        micro_batches: int,
    ) -> PipelinePlan:
        """
        Return the plan whose stages, at `cuts`, have the best layouts of all of the graph at the price of each; borders
        are moved once more, with all moves known.
        """
        of = units(small)
        plans = {price: self.solved(small, solver.at(price)) for price in dict.fromkeys(prices)}
        stage_of = np.searchsorted(cuts, np.arange(len(of.parts)), side="right")

        def at(node: Node) -> ExactPlan:
            return plans[prices[int(stage_of[of.unit_of[node]])]]

        first = plans[prices[0]]
        plan = replace(
            first,
            rows={node: at(node).rows[node] for node in first.rows},
            layouts={value: at(value.node).layouts[value] for value in first.layouts},
            rests={value: at(value.node).rests[value] for value in first.rests},
        )
        priced = self.priced(small, plan, solver, micro_batches)
        found = self._fastest([priced.rows], orders, len(orders[0].schedule.ranks), cuts)
        if found is None:
            raise UnityError(
                f"pipeline: {len(prices)} stages with {micro_batches} micro-batches do not fit devices of "
                f"{self.memory:,.0f} bytes once all moves between them are known; use more stages"
            )
        fitted, outcome = found
        graph = priced.marked(fitted.levels)
        stage_of = np.searchsorted(fitted.cuts, np.arange(priced.rows.count), side="right")
        _, serials = erase_with(graph)
        stages = {node: int(stage_of[priced.units.unit_of[serial]]) for node, serial in serials.items()}
        return PipelinePlan(graph, stages, solver.spaces.machine, micro_batches, fitted.loads, outcome, small)


def fastest_stages(
    ranges: StageRanges, orders: Sequence[CountedSchedule], is_clipped: bool, cuts: Cuts | None = None
) -> tuple[FittedStages, ScheduleOutcome] | None:
    """
    Return the stages and the schedule of the least simulated makespan found: from `cuts`, by default the stages of
    least formula (`choose_stages`), or of equal seconds where parts have several, borders are moved by one unit at a
    time while that helps; of few units, all cuts are tried. None if none fit.
    """
    best: _Found | None = None
    by_stages: dict[int, list[CountedSchedule]] = {}
    for order in orders:
        by_stages.setdefault(order.schedule.stages, []).append(order)
    for of_one in by_stages.values():
        best = _fastest_cuts(ranges, of_one, is_clipped, cuts, best) or best
    return None if best is None else (best.stages, ranges.outcome(best.stages, best.order, is_clipped))


def _fastest_cuts(
    ranges: StageRanges, orders: Sequence[CountedSchedule], is_clipped: bool, cuts: Cuts | None, than: _Found | None
) -> _Found | None:
    """Return what `fastest_stages` does, of schedules of as many stages; None if none takes less than another."""
    best: _Found | None = None

    def faster(cuts: Cuts, order: CountedSchedule) -> _Found | None:
        limit = min((found.makespan * GAIN for found in (best, than) if found is not None), default=inf)
        found = ranges.makespan(cuts, order, is_clipped, limit)
        return None if found is None or found[1] >= limit else _Found(*found, order)

    stages, micro_batches = orders[0].schedule.stages, orders[0].schedule.micro_batches
    if comb(ranges.count - 1, stages - 1) <= FEW_CUTS:
        for order, each in product(orders, combinations(range(1, ranges.count), stages - 1)):
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


def _orders(parts: int, micro_batches: int, kind: ScheduleKind | None, units: int) -> list[CountedSchedule]:
    """
    Return the schedules to choose from, those of one stage per part first; those of a `kind` if it is given. Raises
    `UnityError` for a name that is none of `SYNCHRONOUS`.
    """
    forced, per_part = kind or (None, None)
    if forced is not None and per_part is not None:
        if forced not in SYNCHRONOUS:
            raise UnityError(f"pipeline schedule {forced}: not synchronous; use {', '.join(SYNCHRONOUS)}")
        return [_counted(forced, per_part, parts, micro_batches)]
    found: list[CountedSchedule] = []
    for name, chunks in TRIED:
        if per_part not in (None, chunks):
            continue
        if chunks == 1 or (parts * chunks <= units and 2 * parts * chunks * micro_batches <= ACTIONS):
            with suppress(UnityError):  # a number of micro-batches that the schedule is not for
                found.append(_counted(name, chunks, parts, micro_batches))
    return found


@lru_cache(maxsize=64)
def _counted(name: str, chunks: int, parts: int, micro_batches: int) -> CountedSchedule:
    return CountedSchedule.of(pipeline_schedule(name, parts, micro_batches, chunks))


def _check_units(count: int, stages: int) -> None:
    if count < stages:
        raise UnityError(
            f"pipeline: {stages} stages of a graph that single values divide into {count} units; use at most {count}"
        )
