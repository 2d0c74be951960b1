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

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from math import comb, inf
from typing import NamedTuple

import numpy as np

from unity_ir.cost.plan import cost, norm_seconds
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part
from unity_ir.pcg.graph import Graph, Pipeline, erase_with
from unity_ir.pcg.layers import shortened_with_map
from unity_ir.pcg.micro_batches import micro_batch
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.exact.axis_groups import first_solver, solve
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import with_shared_moves
from unity_ir.search.exact.shorter import shorter
from unity_ir.search.exact.solver import ExactPlan, FactorGraphBuilder, Solver
from unity_ir.search.layouts.limits import limited, limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.pipeline.balance import least_longest
from unity_ir.search.pipeline.best_cuts import GAIN, SPREAD, fastest_stages
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.fastest import ScheduleOutcome, StageLoads
from unity_ir.search.pipeline.orders import ScheduleKind, schedules
from unity_ir.search.pipeline.ranges import CountedSchedule, Cuts, FittedStages, StageRanges
from unity_ir.search.pipeline.rows import ADDED, PricedUnits, UnitRows, priced_units
from unity_ir.search.pipeline.together import Slopes, solved_together
from unity_ir.simulate.pipeline import StageSeconds

BYTE_PRICES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""
Prices of a byte that are tried where memory is short: times the seconds of a micro-batch over the memory of all stages.
At 1 a plan that takes all memory costs twice its time.
"""

FEW_PRICES = BYTE_PRICES[1::2]
"""Those of them that estimates try."""

SENDS, SENDS_OF_LARGE = 0.995, 0.98
"""
Parts of a makespan above which what it would be without sends leaves layouts as they are: of graphs that are not small,
and of large ones (`shorter`), where choosing layouts anew takes ten seconds and more.
"""

SMALL = 16
"""Operators up to which a graph is small: more is tried for it."""

ROUNDS, FEW_ROUNDS = 8, 2
"""How often layouts are chosen anew by what stages and sends add to the makespan: of small graphs, and of others."""

FEW_STARTS = 40
"""Ways to cut a small graph up to which layouts are chosen for each."""

FEW_PAIRS = 300
"""Pairs of configurations of two operators up to which all are tried."""


@dataclass(frozen=True)
class PipelinePlan:
    """
    A training step planned as a pipeline: the placed graph of one micro-batch, its stages (one or more on each equal
    contiguous part of a machine), and the seconds and bytes that these take.
    """

    graph: Graph
    """The placed forward graph of one micro-batch, on the mesh of one part; with marks of what is recomputed."""
    stage_of: Mapping[Node, int]
    """The stage of every compute node and leaf of `graph`; of a leaf, that of its first reader."""
    part: Machine
    """The machine that each part is."""
    micro_batches: int
    loads: StageLoads
    """Seconds and bytes of each stage, every move waited for."""
    outcome: ScheduleOutcome
    """The schedule, simulated, and the peak bytes of a device of each part."""
    serial: Graph
    """The serial forward graph of one micro-batch, of which `graph` is the placement."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.loads.held)

    @property
    def parts(self) -> int:
        """The number of parts of the machine, each a rank of the schedule with one stage or more."""
        return len(self.outcome.schedule.ranks)

    @property
    def schedule(self) -> str:
        """The schedule's name."""
        return self.outcome.schedule.name

    @property
    def pipeline(self) -> Pipeline:
        """
        The schedule in the form that a staged graph keeps in `Graph.pipeline`: its name, the number of ranks (parts of
        the machine), and of stages per rank.
        """
        return Pipeline(self.schedule, self.parts, self.stages // self.parts)

    @property
    def makespan(self) -> float:
        """The simulated seconds of a step."""
        return self.outcome.times.makespan

    @property
    def peaks(self) -> tuple[float, ...]:
        """The peak bytes of the fullest device of each rank: [rank]."""
        return self.outcome.peaks


@dataclass(frozen=True)
class Sketch:
    """Stages on equal parts of a machine and their schedule, chosen for given layouts by simulation."""

    stages: FittedStages
    outcome: ScheduleOutcome
    orders: Sequence[CountedSchedule]
    """The schedules that it was chosen from."""
    least: float
    """
    The makespan in seconds; without sends where these take at least 1 - `SENDS` of it, as a plan may choose layouts
    that send less.
    """


def pipeline_plan(
    graph: Graph,
    machine: Machine,
    parts: int,
    micro_batches: int,
    schedule: ScheduleKind | None = None,
    optimizer: Optimizer | None = None,
) -> PipelinePlan:
    """
    Return the fastest plan found that runs a serial forward graph as a pipeline, its batch in `micro_batches`, on
    `parts` equal contiguous parts of `machine`.

    `schedule` is a pair (name, stages per part). The name must be in `SYNCHRONOUS` (its step computes what the serial
    step does); the name None is the fastest of those `TRIED` (`pipeline.orders`) with that number of stages per part.
    If `schedule` itself is None, it is the fastest of all `TRIED`. `optimizer` is by default the graph's.

    Raises `UnityError` if the machine has no such parts (`machine.parts`), the batch cannot be divided into that many
    micro-batches (`micro_batch`), the graph has fewer units than stages (`cuts`), the schedule's name is not in
    `SYNCHRONOUS`, or nothing found fits the memory.
    """
    problem = PipelineSearch(graph, machine, optimizer or graph.optimizer or Optimizer())
    return problem.plan(parts, micro_batches, schedule)


class PipelineSearch:
    """
    Plans pipelines of one serial forward graph on one machine; stages are made of the graph's units, contiguous runs of
    operators between which a single value passes (`cuts`). Tables are kept, so that plans with other numbers of parts
    or micro-batches are found sooner.
    """

    def __init__(self, graph: Graph, machine: Machine, optimizer: Optimizer):
        self.graph, self.machine, self.optimizer = graph, machine, optimizer
        self.dims = sample_dims(graph)
        self._small: dict[int, Graph] = {}
        self._solvers: dict[tuple[int, int], Solver] = {}
        self._first: dict[int, Solver] = {}
        self._found: dict[tuple[int, int, float, bool], tuple[Price, UnitRows]] = {}
        self._sketches: dict[tuple[int, int, ScheduleKind | None], Sketch] = {}

    def small(self, micro_batches: int) -> Graph:
        """
        Return the serial forward graph of one micro-batch, if the batch is divided into `micro_batches`; memoised.
        Raises `UnityError` if that number does not divide the samples, or if an operator reads what depends on the
        samples of all micro-batches, such as a mean over the batch.
        """
        if micro_batches not in self._small:
            whole = micro_batches == 1
            self._small[micro_batches] = self.graph if whole else micro_batch(self.graph, self.dims, micro_batches)
        return self._small[micro_batches]

    def has_units(self, stages: int, micro_batches: int) -> bool:
        """
        Return whether the graph of one micro-batch, of `micro_batches`, has at least as many units (`cuts.units`) as
        `stages`, since each stage needs one.
        """
        return stages <= len(units(self.small(micro_batches)).parts)

    def solver(self, parts: int, micro_batches: int) -> Solver:
        """
        Return the solver that finds layouts on one of `parts` equal parts of the machine, for the graph of one
        micro-batch (of `micro_batches` in a step); it minimises `price(micro_batches)`. If a part has too many mesh
        axes for an exact search, neighbouring axes are grouped, and those of a group have one role.
        """
        if (parts, micro_batches) not in self._solvers:
            same = [solver for (p, _), solver in self._solvers.items() if p == parts]
            if same:
                found = same[0]
            else:
                short, _ = self._shortened(micro_batches)
                with limited(group_rows=0):
                    found, _ = solve(short, part(self.machine, parts), self.optimizer, first=self._first.get(parts))
            self._solvers[parts, micro_batches] = found.with_price(self.price(micro_batches))
        return self._solvers[parts, micro_batches]

    def _first_solver(self, parts: int, micro_batches: int) -> Solver:
        """Return the solver of the first grouping of axes that `solver` tries, which takes less time to find."""
        if parts not in self._first:
            short, _ = self._shortened(micro_batches)
            with limited(group_rows=0):
                self._first[parts] = first_solver(short, part(self.machine, parts), self.optimizer)
        return self._first[parts].with_price(self.price(micro_batches))

    def _shortened(self, micro_batches: int) -> tuple[Graph, Sequence[int]]:
        """Return the graph of one micro-batch with few of its equal layers, and its unit for each of all units."""
        return shortened_with_map(self.small(micro_batches), limits().rewritten_layers)

    def price(self, micro_batches: int) -> Price:
        """
        Return the objective of one micro-batch of `micro_batches`: its share of the seconds of a step. What a step does
        once (moves of weights, sums of their gradients, updates) counts 1 / `micro_batches`. Adding the micro-batch's
        gradients to those of earlier ones counts (`micro_batches` - 1) / `micro_batches`, since the first has none to
        add to.
        """
        adding = (micro_batches - 1) / micro_batches
        return Price(once=1 / micro_batches, add=self.machine.memory_seconds(0, ADDED) * adding, adding=adding)

    def plan(self, parts: int, micro_batches: int, schedule: ScheduleKind | None = None) -> PipelinePlan:
        """
        Return the fastest pipeline found with `micro_batches` on `parts` equal parts of the machine. `schedule` is as
        in `pipeline_plan`. Raises `UnityError` as that does.
        """
        sketch = self.sketch(parts, micro_batches, schedule)
        small, orders = self.small(micro_batches), sketch.orders
        solver, variants = self.solver(parts, micro_batches), self.variants(parts, micro_batches)
        chosen = sketch.stages
        cuts, rank_of = chosen.cuts, sketch.outcome.schedule.rank_of

        def settled(starts: Iterable[_Start]) -> Iterator[_Settled]:
            for start in starts:
                alike = [order for order in orders if order.schedule.rank_of == start.rank_of]
                found = self._whole(small, solver, start.prices, start.cuts, alike, micro_batches)
                if found is not None:
                    yield found

        starts = [_Start(cuts, [variants[at][0] for at in chosen.variants], rank_of)]
        if self.is_small:
            starts += self._starts(variants, orders, parts)
        # What few layers take fits, but maybe not all moves of all layers: then pay more for bytes.
        dear = (_Start(cuts, [price] * len(starts[0].prices), rank_of) for price, _ in variants)
        plans = list(settled(starts)) or list(islice(settled(dear), 1))
        if not plans:
            raise UnityError(
                f"pipeline: {len(starts[0].prices)} stages with {micro_batches} micro-batches do not fit devices of "
                f"{self.memory:,.0f} bytes once all moves between them are known; use more stages"
            )
        best = min(plans, key=lambda each: each.makespan)
        if self.is_small:
            best = self._changed(small, solver, best, orders, micro_batches)
        return best.pipeline(solver.spaces.machine, micro_batches, small)

    def sketch(self, parts: int, micro_batches: int, schedule: ScheduleKind | None = None) -> Sketch:
        """
        Return a quick approximation of the pipeline that `plan` returns for the same arguments: its stages and
        schedule, chosen by simulation, in layouts that were solved for a graph with few of its equal layers. The
        seconds of its step are close to those of the plan. Raises `UnityError` as `pipeline_plan` does. Memoised.
        """
        key = parts, micro_batches, schedule
        if key not in self._sketches:
            count = len(units(self.small(micro_batches)).parts)
            _check_units(count, parts * (schedule[1] if schedule else 1))
            orders = schedules(parts, micro_batches, schedule, count)
            found = self._fastest([rows for _, rows in self.variants(parts, micro_batches)], orders, parts)
            if found is None:
                raise UnityError(
                    f"pipeline: no stages on {parts} parts with {micro_batches} micro-batches fit devices of "
                    f"{self.memory:,.0f} bytes; use more parts or smaller micro-batches"
                )
            without, makespan = self._without_sends(*found, orders), found[1].times.makespan
            least = without if without <= SENDS * makespan else makespan
            self._sketches[key] = Sketch(*found, orders, least)
        return self._sketches[key]

    @property
    def is_small(self) -> bool:
        """Whether the graph has at most `SMALL` operators, so that more is tried for it."""
        return sum(node.is_compute for node in self.graph.nodes()) <= SMALL

    @property
    def memory(self) -> float:
        """The bytes of a device that a plan may take."""
        return self.machine.device.usable

    def variants(self, stages: int, micro_batches: int) -> list[tuple[Price, UnitRows]]:
        """
        Return the choices of layouts that stages have, for the graph of one micro-batch (of `micro_batches` in a step)
        on one of `stages` equal parts of the machine: a list of (objective, rows), where rows has the seconds and bytes
        of each unit in the layouts that are best by that objective.

        The first objective is seconds alone. The others add a price per byte (`BYTE_PRICES`): they are left out if the
        first needs far less memory than there is, and where they give the same layouts as an earlier one. Layouts are
        solved for a graph with few of the equal layers, and hold for all of them.
        """
        return [*self._variants(stages, micro_batches, BYTE_PRICES)]

    def _variants(
        self, stages: int, micro_batches: int, prices: Iterable[float], is_rough: bool = False
    ) -> Iterator[tuple[Price, UnitRows]]:
        """Yield what `variants` returns, at some prices, each as it is found."""
        found = [self._variant(stages, micro_batches, 0.0, is_rough)]
        yield found[0]
        rows = found[0][1]
        live = min(stages, micro_batches)
        needs = rows.held.sum() + live * rows.live[0].sum() + stages * rows.working[0].max()
        if needs <= stages * self.memory / SPREAD:
            return
        for times in prices:
            price, rows = self._variant(stages, micro_batches, times, is_rough)
            if not any(rows.is_like(other) for _, other in found):
                found.append((price, rows))
                yield found[-1]

    def _variant(self, stages: int, micro_batches: int, times: float, is_rough: bool = False) -> tuple[Price, UnitRows]:
        """
        Return a price of a byte, in units of `BYTE_PRICES`, and the rows of the best layouts at it. Memoised. With
        `is_rough` they are those after a few passes, each reader of a value paying for its own moves.
        """
        key = stages, micro_batches, times, is_rough
        if key not in self._found:
            solver = self.solver(stages, micro_batches)
            price = solver.price
            if times:
                rows = self._variant(stages, micro_batches, 0.0, is_rough)[1]
                seconds = float((rows.forward + rows.input_gradient + rows.weight_gradient).sum())
                live = (min(stages, micro_batches) + 1) / 2
                price = replace(price, byte=times * seconds / (stages * self.memory), again=True, live=live)
            self._found[key] = price, self._rows(solver.with_price(price), micro_batches, is_rough)
        return self._found[key]

    def estimate(self, stages: int, micro_batches: int, most: float = inf, astray: float = inf) -> float:
        """
        Return a rough estimate of the seconds of a step of `micro_batches` on `stages` equal parts of the machine, with
        one stage on each; inf if it does not fit the memory. It assumes stages as equal as units allow, which hold as
        many micro-batches as those of 1F1B do on average, and sends that take no time. Where that takes `most` seconds
        or more in the fastest layouts with nothing recomputed, return those seconds: others take longer. Where other
        groupings of mesh axes have yet to be tried (`solver`), and it takes `astray` seconds or more so in the first,
        return these: others do not make up for that.
        """
        p, m, best = stages, micro_batches, inf
        live = (min(p, m) + 1) / 2

        def seconds(rows: UnitRows, level: int) -> float:
            each = rows.forward + rows.input_gradient + rows.weight_gradient + rows.again[level]
            return float(each.sum() + rows.once.sum() / p) + (m - 1) * least_longest(each.tolist(), p)

        is_grouped = len(part(self.machine, p).mesh.sizes) > limits().exact_axes
        if astray < inf and is_grouped and not any(parts == p for parts, _ in self._solvers):
            rows = self._rows(self._first_solver(p, m), m, is_rough=True)
            if (least := seconds(rows, 0)) >= astray:
                return least
        _, fastest = self._variant(p, m, 0.0, is_rough=True)
        if (least := seconds(fastest, 0)) >= most:
            return least
        for _, rows in self._variants(p, m, FEW_PRICES, is_rough=True):
            if seconds(rows, 0) >= best:
                break  # at higher prices layouts take longer
            needs = (rows.held.sum() + live * rows.live.sum(axis=1)) / p + rows.working.max(axis=1)
            fits = needs <= self.memory
            if fits.any():
                best = min(best, seconds(rows, int(fits.argmax())))
        return best

    def _rows(self, solver: Solver, micro_batches: int, is_rough: bool) -> UnitRows:
        """Return the rows of all units in the best layouts that a solver finds, as `_variant` does."""
        graph, of = self._shortened(micro_batches)
        if is_rough:
            with limited(exact_passes=limits().estimated_passes):
                plan = replace(solver.solve(graph), again=frozenset())
        else:
            plan = self.solved(graph, solver)
        return self.priced(graph, plan, solver, micro_batches).rows.picked(of)

    def solved(self, graph: Graph, solver: Solver) -> ExactPlan:
        """
        Return the best layouts found for a serial graph in the objective of `solver`, with nothing recomputed. If its
        objective has no price of bytes, moves that several readers share are charged once; of a large graph, in layouts
        in which each pays for itself.
        """
        plan = with_shared_moves(solver, graph, solver.solve(graph), is_bounded=shorter(graph) is None)
        return replace(plan, again=frozenset())

    def priced(self, graph: Graph, plan: ExactPlan, solver: Solver, micro_batches: int) -> PricedUnits:
        """
        Return what each unit of `graph` takes, in seconds and bytes, in the layouts of `plan`. `graph` is the serial
        graph of one micro-batch, of `micro_batches` in a step; `solver` is the one that found `plan`.
        """
        placed = realise(graph, plan, solver)
        priced = cost(placed, solver.spaces.machine, self.optimizer)
        return priced_units(priced, placed, self.optimizer, micro_batches)

    def _fastest(
        self,
        variants: Sequence[UnitRows],
        orders: Sequence[CountedSchedule],
        parts: int,
        cuts: Cuts | None = None,
        is_fixed: bool = False,
    ) -> tuple[FittedStages, ScheduleOutcome] | None:
        last = norm_seconds(self.optimizer, self.machine)
        ranges = StageRanges(variants, self.machine, parts, self.memory, last)
        return fastest_stages(ranges, orders, self.optimizer.clip > 0, cuts, is_fixed)

    def _whole(
        self,
        small: Graph,
        solver: Solver,
        prices: Sequence[Price],
        cuts: Cuts,
        orders: Sequence[CountedSchedule],
        micro_batches: int,
    ) -> _Settled | None:
        """
        Return the plan whose stages, at `cuts`, have the best layouts of all of the graph at the price of each; borders
        are moved once more, with all moves known. Where sends count, layouts are chosen again by what stages and sends
        add to the makespan (`together`). None if it does not fit.
        """
        best = last = self._settled(
            small, solver, self._by_price(small, solver, prices, cuts), orders, micro_batches, cuts
        )
        slopes: Slopes | None = None
        sends = SENDS if shorter(small) is None else SENDS_OF_LARGE
        for number in range(ROUNDS if self.is_small else FEW_ROUNDS):
            if best is None or last is None:
                break
            if not self.is_small and self._without_sends(last.stages, last.outcome, orders) > sends * last.makespan:
                break
            found = Slopes.of(last.stages.loads.seconds, micro_batches, self._makespans(last.outcome, orders))
            slopes = found if slopes is None else slopes.mixed(found, 1 / (number + 1))
            cuts, ranks = last.stages.cuts, last.outcome.schedule.rank_of
            plan = solved_together(small, solver, self.machine, cuts, ranks, prices, slopes)
            last = self._settled(small, solver, plan, orders, micro_batches, cuts)
            if last is not None and last.makespan < best.makespan * GAIN:
                best = last
            elif not self.is_small:
                break  # of large graphs, no round has gained after one that did not
        return best

    def _starts(
        self, variants: Sequence[tuple[Price, UnitRows]], orders: Sequence[CountedSchedule], parts: int
    ) -> Iterator[_Start]:
        """Yield all cuts with the prices of their stages and the ranks of these, as far as they fit and are few."""
        ranges = StageRanges([rows for _, rows in variants], self.machine, parts, self.memory)
        for order in {order.schedule.rank_of: order for order in orders}.values():
            stages = order.schedule.stages
            if comb(ranges.count - 1, stages - 1) <= FEW_STARTS:
                for cuts in combinations(range(1, ranges.count), stages - 1):
                    fitted = ranges.fitted(cuts, order)
                    if fitted is not None:
                        yield _Start(cuts, [variants[at][0] for at in fitted.variants], order.schedule.rank_of)

    def _changed(
        self, small: Graph, solver: Solver, best: _Settled, orders: Sequence[CountedSchedule], micro_batches: int
    ) -> _Settled:
        """Return the stages with configurations of one operator, and of few any two, changed while that helps."""
        builder = FactorGraphBuilder(solver, small)
        tables = [(node, solver.table(node, builder.with_gradient)) for node in small.nodes() if node.is_compute]
        alike = [order for order in orders if order.schedule.rank_of == best.outcome.schedule.rank_of]
        singles = [{node: row} for node, table in tables for row in range(len(table))]
        pairs = [one | other for one, other in combinations(singles, 2) if one.keys() != other.keys()]
        changes = deque([*singles, *(pairs if len(pairs) <= FEW_PAIRS else ())])
        since = 0
        while since < len(changes):
            plan = builder.with_rows(best.plan, changes[0])
            changes.rotate(-1)
            other = self._settled(small, solver, plan, alike, micro_batches, best.stages.cuts)
            if other is None or other.makespan >= best.makespan * GAIN:
                since += 1
            else:
                best, since = other, 0
        return best

    def _makespans(
        self, outcome: ScheduleOutcome, orders: Sequence[CountedSchedule]
    ) -> Callable[[Sequence[StageSeconds]], Sequence[float]]:
        """Return the makespans, as a function of seconds of stages, of a schedule that is one of `orders`."""
        order = next(order for order in orders if order.schedule is outcome.schedule)
        return partial(order.levelled.makespans, is_clipped=self.optimizer.clip > 0)

    def _without_sends(
        self, stages: FittedStages, outcome: ScheduleOutcome, orders: Sequence[CountedSchedule]
    ) -> float:
        """Return the makespan of stages if sends took no time, in seconds."""
        return self._makespans(outcome, orders)([replace(stages.loads.seconds, send=())])[0]

    def _by_price(self, small: Graph, solver: Solver, prices: Sequence[Price], cuts: Cuts) -> ExactPlan:
        """Return the layouts of which stage s, between `cuts`, has the best of all of the graph at `prices[s]`."""
        of = units(small)
        plans = {price: self.solved(small, solver.with_price(price)) for price in dict.fromkeys(prices)}
        stage_of = np.searchsorted(cuts, np.arange(len(of.parts)), side="right")

        def at(node: Node) -> ExactPlan:
            return plans[prices[int(stage_of[of.unit_of[node]])]]

        first = plans[prices[0]]
        return replace(
            first,
            rows={node: at(node).rows[node] for node in first.rows},
            layouts={value: at(value.node).layouts[value] for value in first.layouts},
            rests={value: at(value.node).rests[value] for value in first.rests},
        )

    def _settled(
        self,
        small: Graph,
        solver: Solver,
        plan: ExactPlan,
        orders: Sequence[CountedSchedule],
        micro_batches: int,
        cuts: Cuts,
    ) -> _Settled | None:
        """
        Return layouts with the fastest stages found from `cuts` on, or of a small graph at these, all moves known; None
        if none fit.
        """
        priced = self.priced(small, plan, solver, micro_batches)
        found = self._fastest([priced.rows], orders, len(orders[0].schedule.ranks), cuts, self.is_small)
        return None if found is None else _Settled(plan, priced, *found)


class _Start(NamedTuple):
    """Cuts, and the price of the layouts and the rank of each stage, from which on stages are chosen."""

    cuts: Cuts
    prices: Sequence[Price]
    rank_of: Sequence[int]


@dataclass(frozen=True)
class _Settled:
    """Layouts of a micro-batch, priced, with stages and a schedule."""

    plan: ExactPlan
    priced: PricedUnits
    stages: FittedStages
    outcome: ScheduleOutcome

    @property
    def makespan(self) -> float:
        return self.outcome.times.makespan

    def pipeline(self, part: Machine, micro_batches: int, serial: Graph) -> PipelinePlan:
        graph = self.priced.marked(self.stages.levels)
        stage_of = np.searchsorted(self.stages.cuts, np.arange(self.priced.rows.count), side="right")
        _, serials = erase_with(graph)
        stages = {node: int(stage_of[self.priced.units.unit_of[serial]]) for node, serial in serials.items()}
        return PipelinePlan(graph, stages, part, micro_batches, self.stages.loads, self.outcome, serial)


def _check_units(count: int, stages: int) -> None:
    if count < stages:
        raise UnityError(
            f"pipeline: {stages} stages of a graph that single values divide into {count} units; use at most {count}"
        )
