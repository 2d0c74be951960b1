"""
Bound all plans on a large machine from below, a role for every axis, by counting equal axes.

Equal axes of a level differ only in which pieces of a dim are neighbours. So a layout is relaxed to the number of a
level's axes that have each role: moving from count to count costs no more than between any layouts with these counts,
so the minimum over counts is a lower bound. Its choice, with axes named (`assign_axes`), is often a better plan than
that of grouped axes (`search/exact/axis_groups.py`).

On larger graphs that minimum is bounded in turn by TRW-S messages (`search/exact/trw_s.py`) and, with many dims, with
some dims merged (`search/layouts/space.py`, `merged_dims`): moves between merged dims are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from math import comb, prod
from typing import Literal

import numpy as np

from unity_ir.budget import OutOfBudget, own_budget, spend, work_done
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.bounds.assign_axes import assign_axes
from unity_ir.search.bounds.ordered_axes import with_axis_order
from unity_ir.search.bounds.plan_of_messages import plan_of_messages
from unity_ir.search.bounds.refine import refine_messages, refine_rows, two_way_cost
from unity_ir.search.exact.elimination import Memo
from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.exact.minimum import among_best
from unity_ir.search.exact.shared_moves import ROUNDED, SharedFactorGraphBuilder, with_shared_moves, without_free_moves
from unity_ir.search.exact.shared_moves import least_cost_bound as bounded_sum
from unity_ir.search.exact.shorter import Shorter, shorter
from unity_ir.search.exact.solver import Solver
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.layouts.axes import AxisGroup
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import TIME, Price
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.memory.lagrangian import needed


@dataclass(frozen=True)
class KnownPlan:
    """A known plan of the serial graph `graph`, for `Bounds` to bound all plans of that graph."""

    graph: Graph
    seconds: float
    """Seconds of its step, every move waited for."""
    bytes: int = 0
    """Bytes per device that it holds; ignored if `price` is 0."""
    price: float = 0.0
    """Seconds charged per byte: above 0 where memory is short, for a bound on the plans that fit."""
    again: bool = False
    """
    Whether that bound is also to hold for plans that recompute values or gather weights again, whichever they are.
    """


@dataclass(frozen=True)
class ExpectedBound:
    """A bound on the plans of a serial graph, which will likely be asked for: `Bounds` prepares it."""

    graph: Graph
    price: float = 0.0
    """Seconds charged per byte: above 0 where memory is short, and the bound is of plans that fit."""


@dataclass(frozen=True)
class _Settled:
    """Messages that have settled on a shorter graph, and the work that it took."""

    messages: Messages
    work: float


@dataclass
class Bounds:
    """
    Computes lower bounds for graphs on one machine: called with a `KnownPlan`, returns a bound and maybe a faster plan.

    Tables are shared between graphs, and settled messages between a bound and what prepared it; the bounds do not
    depend on the order of the graphs.
    """

    machine: Machine
    optimizer: Optimizer
    _solvers: dict[tuple[int, bool], Solver] = field(default_factory=dict[tuple[int, bool], Solver])
    settled: dict[tuple[Graph, Price, int, Messages | None], _Settled] = field(
        default_factory=dict[tuple[Graph, Price, int, Messages | None], _Settled]
    )
    """
    The settled messages of the last graph and price, by these two, by how dims are merged (`Spaces.merge`), and by the
    coarser messages that they started from.
    """

    def solver(self, merge: int = 0, stepwise: bool = True) -> Solver:
        """
        Return the solver for lower bounds, in whose layouts equal mesh axes are only counted, not told apart; memoised.

        `merge` says which dims its layouts tell apart (`Spaces.merge`), from 0, all, to 3, none. With `stepwise`, it is
        for bounds by messages (TRW-S) alone: it drops no dominated choices, and has no dense tables of layout pairs.
        """
        if (merge, stepwise) not in self._solvers:
            spaces = Spaces(self.machine, by_count=True, merge=merge)
            self._solvers[merge, stepwise] = Solver(spaces, self.optimizer, stepwise=stepwise)
        return self._solvers[merge, stepwise]

    def ahead(self, graph: Graph) -> Iterator[None]:
        """
        Compute, before any bound is asked for, the tables that bounds of the serial graph `graph` and of graphs like it
        need. Each `next` computes one table and yields None, so that the caller may stop at any time.
        """
        kind = _kind(graph, self.machine)
        if kind == "alone":
            return
        if kind == "tables":
            yield from self._tables_of(graph, self.solver(0, False))
            return
        for merge, *_ in reversed(limits().merges[:-1]):
            solver = self.solver(merge)
            yield from self._tables_of(graph, solver)
            if _is_direct(SharedFactorGraphBuilder(solver, graph)):
                break

    def _tables_of(self, graph: Graph, solver: Solver) -> Iterator[None]:
        """Compute the tables of a solver that bounds of the serial graph `graph` need, one at each `next`."""
        with_gradient = nodes_with_gradient(graph)
        for node in graph.nodes():
            if node.is_compute:
                solver.table(node, with_gradient)
                yield
        for edge in SharedFactorGraphBuilder(solver, graph).edges if solver.stepwise else ():
            yield
            two_way_cost(edge).ready()

    def __call__(self, known: KnownPlan | ExpectedBound) -> tuple[float, Graph | None]:
        """
        Return `bound`; where memory is short, a bound on the plans that fit.

        Where the budget of this ends, the kernels alone are the bound. Of an expected bound, what can be computed
        before a plan is known is kept for later; returns (0, None).
        """
        least, plan = 0.0, None
        if isinstance(known, ExpectedBound):
            with suppress(OutOfBudget), own_budget():
                _prepare(known.graph, self, Price(1.0, known.price, again=True) if known.price else TIME)
            return least, plan
        try:
            with own_budget():
                if known.price > 0:
                    least = bound_within(known, self, self.machine.device.usable)
                if not known.again or least == 0:
                    alone, plan = bound(known.graph, self.machine, self.optimizer, known.seconds, bounds=self)
                    least = max(least, alone)
        except OutOfBudget:
            least = max(least, of_kernels(known.graph, self.machine, self.optimizer))
        return least, plan


def plan_with_bound(
    serial: Graph,
    machine: Machine,
    optimizer: Optimizer,
    plan: Graph,
    priced: PlanCost,
    steps: int = limits().pass_sums,
) -> tuple[Graph, PlanCost, float]:
    """
    Return (plan, its cost, a lower bound in seconds on all plans of the serial graph with every operator on all
    devices, which is at most that cost's seconds).

    `plan` is a known plan of `serial`, and `priced` its cost; where bounding finds a faster plan that fits a device's
    memory, that one is returned instead. `steps` is the most additions of one pass of messages (TRW-S); problems that
    need more are bounded by coarser ones.
    """
    return faster_with_bound((plan, priced), bound(serial, machine, optimizer, priced.time, steps), optimizer)


def faster_with_bound(
    plan: tuple[Graph, PlanCost], found: tuple[float, Graph | None], optimizer: Optimizer
) -> tuple[Graph, PlanCost, float]:
    """
    Combine a plan and the result of bounding: return (the faster plan, its cost, a lower bound in seconds on all plans,
    at most that cost's seconds).

    `plan` is a parallel graph and its cost. `found` is what a `Bounds` returned for its serial graph: the lower bound,
    and a parallel graph or None; that graph replaces the plan if it is faster and fits the device's memory.
    """
    (least, other), (graph, priced) = found, plan
    machine = priced.machine
    if other is not None:
        better = cost(other, machine, optimizer)
        if better.time < priced.time * (1 - ROUNDED) and needed(other, better, optimizer) <= machine.device.usable:
            graph, priced = other, better
    return graph, priced, min(least, priced.time)


def bound(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    known: float,
    steps: int = limits().pass_sums,
    bounds: Bounds | None = None,
) -> tuple[float, Graph | None]:
    """
    Return (lower bound in seconds on every plan of a serial graph with all operators on all devices, a plan or None).
    The plan is a parallel graph that was found while bounding; it may be slower than the known one, and need not fit
    the memory.

    `known` is the seconds of a known plan: bounding stops once the bound is near it. `steps` is the most additions of
    one pass of messages (TRW-S); `bounds` keeps tables between calls, None uses new ones.
    """
    least, plan = _bound(graph, bounds or Bounds(machine, optimizer), known, steps)
    return without_free_moves(least, graph, machine), plan


def _kind(graph: Graph, machine: Machine) -> Literal["alone", "messages", "tables"]:
    """Return how to bound: by the kernels alone, by messages, or by dense tables of layout pairs."""
    groups = Spaces(machine, by_count=True).groups
    if machine.links or _rows(graph, groups) > limits().count_rows:
        # Axes of a level are not alike where they have links of their own.
        return "alone"
    return "tables" if _tables(graph, groups) <= limits().count_pairs else "messages"


def _bound(graph: Graph, bounds: Bounds, known: float, steps: int) -> tuple[float, Graph | None]:
    match _kind(graph, bounds.machine):
        case "alone":
            return _alone(graph, bounds.machine, bounds.optimizer), None
        case "messages":
            least, finest = _messages(graph, bounds, known, steps)
            if finest is None or known <= least * (1 + limits().near):
                return least, None
            with suppress(OutOfBudget):
                return least, plan_of_messages(graph, *finest)
            return least, None
        case "tables":
            solver = bounds.solver(0, stepwise=False)
            # How much there is to eliminate decides how it goes on: that must not depend on other graphs.
            solver.memo = Memo()
            found = with_shared_moves(solver, graph, solver.solve(graph))
            if known <= found.bound * (1 + limits().proved):
                return found.bound, None
            return _ordered(graph, bounds, found.bound, known, assign_axes(graph, found, solver))


def bound_within(known: KnownPlan, bounds: Bounds, limit: float) -> float:
    """
    Return a lower bound in seconds on every plan of `known.graph` that holds at most `limit` bytes on a device.

    It is the Lagrangian bound: a lower bound on `seconds + price * bytes`, less `price * limit`, where `price` is
    `known.price` (seconds per byte). With `known.again` it holds whatever a plan recomputes, and gathers again in the
    backward; else only for plans that recompute no more than `exact.recompute.may_recompute` allows, and gather nothing
    again. Bytes of copies of activations that are resharded once for several readers are not counted.

    `bounds` has the machine, the optimizer and the tables of the bound of seconds alone. Returns 0, which says nothing,
    for machines whose pairs of devices have links of their own, and for graphs with an operator that can be sharded in
    more than `limits().count_rows` ways.
    """
    if _kind(known.graph, bounds.machine) == "alone":
        return 0.0
    priced = known.seconds + known.price * known.bytes
    price = Price(1.0, known.price, again=known.again)
    least, _ = _messages(known.graph, bounds, priced, limits().pass_sums, price)
    return without_free_moves(least, known.graph, bounds.machine) - known.price * limit


def is_tabulated(graph: Graph, machine: Machine) -> bool:
    """
    Return whether the lower bound of a serial graph is computed exactly, with dense tables of pairs of layouts: the
    minimum over layouts that only count how many equal mesh axes have each role. That is so if these tables are small
    enough (`limits().count_pairs`): bounding may then find a plan that is faster than the one known. For larger graphs,
    messages (TRW-S) give a lower bound on that minimum.
    """
    return _kind(graph, machine) == "tables"


def bound_at(graph: Graph, bounds: Bounds, price: Price, known: float) -> float:
    """
    Return a lower bound on the cost, in the objective `price`, of every plan of a serial graph with all operators on
    all devices. It is 0, which says nothing, for the machines and graphs of which `bound_within` says so, and where
    bytes are priced and the graph is too large for messages (TRW-S).

    `known` is the cost of a known plan in that objective: tightening stops once the bound is near it.
    """
    match _kind(graph, bounds.machine):
        case "alone":
            least = 0.0
        case "messages":
            least, _ = _messages(graph, bounds, known, limits().pass_sums, price)
        case "tables":
            least = bounded_sum(bounds.solver(0, stepwise=False).with_price(price), graph)
    return without_free_moves(least, graph, bounds.machine)


def quick_bound(bounds: Bounds, graph: Graph, known: float) -> float:
    """
    Return a lower bound in seconds on every plan of a serial graph with all operators on all devices, after messages on
    the coarsest problem alone. It is 0, which says nothing, for graphs of more than `limits().quick_operators`.

    `known` is the seconds of a known plan; `bounds` has the machine and the tables.
    """
    if sum(node.is_compute for node in graph.nodes()) > limits().quick_operators:
        return 0.0
    if _kind(graph, bounds.machine) == "alone":
        return 0.0
    least, _ = _messages(graph, bounds, known, limits().pass_sums, is_refined=False)
    return without_free_moves(least, graph, bounds.machine)


def _messages(
    graph: Graph, bounds: Bounds, known: float, steps: int, price: Price = TIME, is_refined: bool = True
) -> tuple[float, tuple[SharedFactorGraphBuilder, Messages] | None]:
    """
    Return the bound after messages on coarse, then finer problems, until it is near `known`; after those on the
    coarsest, unless it `is_refined`. With it come the last messages, and what built their problem, if no dims are
    merged there.

    A finer problem has only the rows whose coarse rows may still be part of something better. Of each finer kind the
    first is taken that is small enough. A graph with many equal layers starts from messages that have settled on one
    with few of them (`search/exact/shorter.py`).
    """
    best, short = 0.0, shorter(graph)
    coarse: tuple[SharedFactorGraphBuilder, Messages] | None = None
    finest: tuple[SharedFactorGraphBuilder, Messages] | None = None
    of_short: Messages | None = None
    kinds = limits().merges
    builder_of = cache(partial(_builder, graph, bounds, price))
    start = _first_kind(builder_of)
    most = steps * (1 if short is None else limits().settled_sums)
    for number, kind in enumerate(kinds[start:], start + 1):

        def problem_of(merge: int, coarse: tuple[SharedFactorGraphBuilder, Messages] | None = coarse) -> FactorGraph:
            problem = builder_of(merge).problem()
            if coarse is None:
                return problem
            return problem.among(refine_rows(coarse[0], coarse[1].problem.rows, builder_of(merge)))

        found = _finest(kind, problem_of, most, None if coarse is None else coarse[1].problem)
        if found is None:
            break
        merge, problem = found
        builder = builder_of(merge)
        if not all(map(len, problem.rows)):
            return known, None
        if short is not None:
            of_short, messages = _from_shorter(short, bounds, merge, of_short, builder, problem)
        else:
            messages = Messages(problem) if coarse is None else refine_messages(coarse[1], problem)
        best = max(best, _passed(messages, known, number < len(kinds)))
        if merge == 0:
            finest = builder, messages
        if known <= best * (1 + limits().near) or not is_refined:
            break
        coarse = builder, messages
    return best or (_alone(graph, bounds.machine, bounds.optimizer) if price == TIME else 0.0), finest


def _prepare(graph: Graph, bounds: Bounds, price: Price) -> None:
    """Settle the messages of a shorter graph from which `_messages` will likely start those of a serial graph."""
    short = shorter(graph)
    if short is None or _kind(graph, bounds.machine) != "messages":
        return
    coarse: Messages | None = None
    builder_of = cache(partial(_builder, graph, bounds, price))
    problem: FactorGraph | None = None
    for kind in limits().merges[_first_kind(builder_of) :]:
        most = limits().pass_sums * limits().settled_sums
        found = _finest(kind, lambda merge: builder_of(merge).problem(), most, problem)
        if found is None:
            return
        merge, problem = found
        _, coarse = _settled(short.graph, bounds, price, merge, coarse)


def _finest(
    kind: Sequence[int], problem_of: Callable[[int], FactorGraph], most: int, coarse: FactorGraph | None
) -> tuple[int, FactorGraph] | None:
    """
    Return the first of some ways to merge dims, from fine to coarse, and its problem, in which a pass of messages takes
    at most `most` additions; None if there is none. Where passes of the `coarse` problem before take long, the coarsest
    is tried first: if that has too many, so have the others, whose tables take long to make. None is tried where all
    surely have.
    """
    if coarse is not None and coarse.steps() * limits().least_finer_sums > most:
        return None
    found: tuple[int, FactorGraph] | None = None
    backwards = coarse is not None and coarse.steps() * limits().finer_sums > most
    for merge in reversed(kind) if backwards else kind:
        problem = problem_of(merge)
        few = problem.steps() + _relaxing(problem) <= most
        found = (merge, problem) if few else found
        if few != backwards:
            break
    return found


def _first_kind(builder_of: Callable[[int], SharedFactorGraphBuilder]) -> int:
    """
    Return the index in `limits().merges` of the kind of problem that `_messages` begins with: the last but one if its
    passes are cheap, else the first. `builder_of(merge)` builds the graph's problem with dims merged so.
    """
    last = len(limits().merges) - 2
    return last if last >= 0 and _is_direct(builder_of(limits().merges[last][0])) else 0


def _builder(graph: Graph, bounds: Bounds, price: Price, merge: int) -> SharedFactorGraphBuilder:
    return SharedFactorGraphBuilder(bounds.solver(merge).with_price(price), graph)


def _from_shorter(
    short: Shorter,
    bounds: Bounds,
    merge: int,
    coarse: Messages | None,
    builder: SharedFactorGraphBuilder,
    problem: FactorGraph,
) -> tuple[Messages, Messages]:
    """
    Return the messages of a graph with fewer equal layers, and those of the whole graph that start from them. The
    first start from `coarse`, those of the shorter graph on a coarser problem, and settle.
    """
    few, settled = _settled(short.graph, bounds, builder.solver.price, merge, coarse)
    moved = builder.start().moved
    known = short.lengthened(few.start().now(settled), few.numbers, problem, builder.numbers, moved)
    return settled, Messages(problem, known.start(problem, moved))


def _settled(
    graph: Graph, bounds: Bounds, price: Price, merge: int, coarse: Messages | None
) -> tuple[SharedFactorGraphBuilder, Messages]:
    """
    Return (builder, messages) for a short graph whose dims are merged as `merge` says (`Spaces.merge`): the builder of
    its factor graph, and messages that started from `coarse` and have settled. Messages of the last graph and price are
    kept; each call charges the work of settling them to the budget.
    """
    few, known = _builder(graph, bounds, price, merge), bounds.settled
    key = graph, price, merge, coarse
    if key in known:
        spend(known[key].work)
        return few, known[key].messages
    if any(of[:2] != key[:2] for of in known):
        known.clear()
    before, problem = work_done(), few.problem()
    messages = Messages(problem) if coarse is None else refine_messages(coarse, problem)
    messages.settle(limits().short_passes, limits().slow_pass / 2)
    known[key] = _Settled(messages, work_done() - before)
    return few, messages


def _is_direct(builder: SharedFactorGraphBuilder) -> bool:
    """Return whether passes of messages among all rows of a graph are cheap enough to begin with them."""
    problem = builder.problem()
    return problem.steps() + _relaxing(problem) <= limits().direct_sums


def _relaxing(problem: FactorGraph) -> int:
    """Estimate the additions of computing the distances between all layouts."""
    spaces = {id(way.space): way.space for way in map(two_way_cost, problem.edges)}
    return sum(space.steps for space in spaces.values())


def _ordered(
    graph: Graph, bounds: Bounds, least: float, known: float, plan: Graph | None
) -> tuple[float, Graph | None]:
    """
    Return the bound and a plan, where axes are counted but those within one dim have an order.

    Only rows within a margin of the bound get an order: either the bound rises to the margin, or the best choice among
    them is optimal.
    """
    machine, optimizer = bounds.machine, bounds.optimizer
    best = np.inf if plan is None else _seconds(plan, machine, optimizer)
    builder = SharedFactorGraphBuilder(bounds.solver(), graph)
    for part in limits().order_margins:
        if min(known, best) <= least * (1 + limits().near):
            break
        limit = min(known, best, least * (1 + part))
        counts = Messages(builder.problem())
        found = with_axis_order(builder, counts.problem) if _below(counts, limit) else None
        if found is None:
            break
        problem, rows = found
        orders = Messages(problem)
        if not _below(orders, limit):
            least = max(least, limit)
            continue
        least = max(least, min(limit, orders.bound))
        (seconds, chosen), _ = among_best(orders.problem, orders.slack, limits().best_rows)
        counted = [int(of[row]) for of, row in zip(rows, chosen, strict=True)]
        other = assign_axes(graph, builder.chosen(counts.problem, seconds, counted, least), builder.solver)
        if other is not None and _seconds(other, machine, optimizer) < best:
            plan, best = other, _seconds(other, machine, optimizer)
    return least, plan


def _seconds(plan: Graph, machine: Machine, optimizer: Optimizer) -> float:
    """Return the seconds of a plan; infinite if it does not fit."""
    found = cost(plan, machine, optimizer)
    return found.time if found.memory_bytes <= machine.device.usable else np.inf


def _below(messages: Messages, limit: float) -> bool:
    """Return whether any choice below `limit` is left after passes that drop rows whose choices all exceed it."""
    for _ in range(limits().count_passes):
        rows = messages.rows
        for passed in (messages.forward, messages.backward):
            if passed(limit) >= limit:
                return False
        if 10 * messages.rows > 9 * rows:
            break
    return True


def _passed(messages: Messages, known: float, coarse: bool) -> float:
    """
    Return the bound after passes there and back, until it is near `known`, or passes hardly help; `coarse` says whether
    a finer problem follows.
    """
    limit, best = known * (1 + ROUNDED), messages.bound
    for _ in range(limits().count_passes):
        rows, before = messages.rows, best
        for passed in (messages.forward, messages.backward):
            before, least = messages.bound, passed(limit)
            if messages.restarted and messages.problem.steps() > (limits().long_sums if coarse else limits().once_sums):
                # Another pass hardly raises the bound of settled messages; at most it drops rows for a finer problem.
                return min(known, messages.bound)
            if known <= least * (1 + limits().proved) or (
                known <= least * (1 + limits().near) and messages.problem.steps() > limits().cheap_sums
            ):
                return min(known, messages.bound)
            if (
                messages.problem.steps() > limits().long_sums
                and messages.bound < before * (1 + limits().slow_pass)
                and 2 * messages.rows > rows
            ):
                return min(known, messages.bound)
        if coarse and limits().far * (messages.bound - before) < known - messages.bound:
            break
        if messages.bound < best * (1 + limits().slow_pass) and 2 * messages.rows > rows:
            break
        best = messages.bound
    return min(known, messages.bound)


def of_kernels(graph: Graph, machine: Machine, optimizer: Optimizer) -> float:
    """
    Return a lower bound in seconds on every placement of a serial graph: its kernels, divided evenly over all devices.

    The bound is 0 on a device with a measured profile, since smaller kernels may have any time there.
    """
    return without_free_moves(_alone(graph, machine, optimizer), graph, machine)


def _alone(graph: Graph, machine: Machine, optimizer: Optimizer) -> float:
    """
    Return the seconds of all kernels, each divided by all devices; 0 with a measured profile, whose times may be any.
    """
    if machine.device.profile is not None:
        return 0.0
    return sum((o.forward + o.backward) / machine.devices for o in cost(graph, machine, optimizer).operators)


def _layouts(rank: int, groups: Sequence[AxisGroup]) -> tuple[int, int]:
    """Return the number of layouts of a value, and of those without REPEAT."""

    def ways(roles: int) -> int:
        return prod(comb(g.count + roles - 1, g.count) for g in groups)

    return ways(rank + 3), ways(rank + 2)


def _tables(graph: Graph, groups: Sequence[AxisGroup]) -> int:
    types = {v.type for n in graph.nodes() for v in n.results}
    return sum(_layouts(len(t.shape), groups)[0] ** 2 for t in types)


def _rows(graph: Graph, groups: Sequence[AxisGroup]) -> int:
    each = [len(n.analysis.splittable) + len(n.analysis.carriers) + 2 for n in graph.nodes() if n.is_compute]
    return max((prod(comb(g.count + roles - 1, g.count) for g in groups) for roles in each), default=0)
