"""
Re-rank candidates by simulated time; attach the bound.

The candidates are the plan a search found, plans with a share of its weight moves hidden, plans by hand, and those with
operators on parts of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer, Value
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.sharding import Layout
from unity_ir.search.bounds.axis_counts import Bounds, KnownPlan, bounded
from unity_ir.search.choose.candidates import Baselines, Candidate, Plan, SimulatedPlans, fits, that_fit
from unity_ir.search.choose.parallel_branches import place_branches
from unity_ir.search.choose.parallel_siblings import place_siblings
from unity_ir.search.choose.worker import ForkedWorker
from unity_ir.search.exact.plan_graph import placed, realise
from unity_ir.search.joint.best_first import JointPlan, joint
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.layouts.operator_table import kernels_found
from unity_ir.search.memory.lagrangian import Refused
from unity_ir.search.result import SearchResult


@contextmanager
def choosing(strategy: str, serial: Graph, machine: Machine, optimizer: Optimizer) -> Generator[Chooser]:
    """
    Yield, as a context manager, what picks the final plan after a search. On large machines (more than
    `limits().exact_axes` mesh axes) baselines and bounds are computed in two forked processes meanwhile; else when they
    are asked for.
    """
    bounds, hands = Bounds(machine, optimizer), Baselines(machine, optimizer)
    large = len(machine.mesh.sizes) > limits().exact_axes
    with ExitStack() as stack:
        by_hand = stack.enter_context(ForkedWorker(hands, beside=large))
        as_it_was = by_hand.ask((serial, True)) if strategy == "joint" else None
        if large:
            # What both processes need is found before there are two.
            kernels_found(serial)
        bounding = stack.enter_context(ForkedWorker(bounds, bounds.ahead(serial), beside=large))
        yield Chooser(strategy, serial, machine, SimulatedPlans(machine, optimizer), by_hand, bounding, as_it_was)


@dataclass(frozen=True)
class Chooser:
    """Chooses the final plan; baselines and bounds may be computed in worker processes."""

    strategy: str
    serial: Graph
    machine: Machine
    emitted: SimulatedPlans
    by_hand: ForkedWorker[tuple[Graph, bool], list[Candidate]]
    bounding: ForkedWorker[KnownPlan, tuple[float, Graph | None]]
    as_it_was: Callable[[], list[Candidate]] | None
    """Baselines of the graph without rewrites."""

    def result(self, found: JointPlan) -> SearchResult:
        """Return the result for a plan found: the fastest candidate by simulated time, with its bound."""
        source = cache(lambda: self.source(found))
        result = _choose_and_bound(found, self, source)
        try:
            if not result.interrupted:
                result = _with_rival(result, found, self)
            if self.as_it_was is not None and result.derivation and not result.interrupted:
                result = _compare_unrewritten(result, source(), that_fit(self.as_it_was()), self)
        except KeyboardInterrupt:
            result = replace(result, interrupted=True)
        return result

    def faster(self, now: SearchResult, other: SearchResult) -> SearchResult:
        """Return the result with the lower simulated time."""
        best = self.emitted.fastest([(now.graph, now.cost), (other.graph, other.cost)])
        explored = now.explored + other.explored
        return replace(now if best[0] is now.graph else other, explored=explored, interrupted=other.interrupted)

    def source(self, found: JointPlan) -> list[Plan]:
        """Return the plan of the graph without rewrites, if the found one has rewrites and memory is not short."""
        if self.strategy != "joint" or not found.derivation or found.source is None or found.price > 0:
            return []
        plan = realise(self.serial, found.source, found.solver)
        priced = plan, cost(plan, self.machine, self.emitted.optimizer)
        self.emitted.seconds(priced)
        return [priced] if fits(*priced, self.emitted.optimizer) else []

    def instead(self, refused: Refused) -> SearchResult:
        """Return the fastest plan by hand that fits, where the search found none. Raises `refused` if there is none."""
        known = self.by_hand.ask((self.serial, False))()
        offers = that_fit(known)
        if not offers:
            smallest = min(known, key=lambda o: o.needs, default=None)
            raise refused if smallest is None else refused.known(smallest.name, smallest.needs, smallest.seconds)
        best = self.emitted.plan(min(offers, key=lambda o: o.emitted))
        found = self.bounding.ask(KnownPlan(self.serial, best[1].time))()
        _, _, bound = bounded(best, found, self.emitted.optimizer)
        return SearchResult(self.strategy, *best, (), bound)


def _with_rival(result: SearchResult, found: JointPlan, settle: Chooser) -> SearchResult:
    """Return the result, or that of the graph that is fastest on one device, if its plan simulates faster."""
    rival, emitted = found.rival if found.price == 0 else None, settle.emitted
    if rival is None:
        return result
    now, other = (result.graph, result.cost), (rival.graph, cost(rival.graph, settle.machine, emitted.optimizer))
    if emitted.fastest([now, other]) is now and len(result.cost.operators) > limits().rival_operators:
        return result
    rivals = [rival]
    if not rival.solver.spaces.axis_by_axis:
        # How axes are best cut into groups for the graph as it was says little about this one.
        own = joint(rival.rewritten, settle.machine, (), emitted.optimizer, like=settle.serial)
        rivals += [replace(own, derivation=rival.derivation)] if own.graph != rival.graph else []
    for other in rivals:
        settled = _choose_and_bound(other, settle)
        better = emitted.fastest([(result.graph, result.cost), (settled.graph, settled.cost)])
        if better[0] is not result.graph:
            result = replace(settled, explored=result.explored)
        result = replace(result, interrupted=settled.interrupted)
    return result


def _compare_unrewritten(
    result: SearchResult, source: Sequence[Plan], offers: Sequence[Candidate], settle: Chooser
) -> SearchResult:
    """Return the result, or a plan of the graph without rewrites, found or by hand, if it simulates faster."""
    emitted, now = settle.emitted, (result.graph, result.cost)
    best = emitted.fastest([now, *source], offers)
    if best is now:
        return result
    least = min([*source, *map(emitted.plan, sorted(offers, key=lambda o: o.seconds)[:1])], key=lambda p: p[1].time)
    found = settle.bounding.ask(KnownPlan(settle.serial, least[1].time))()
    plan, priced, bound = bounded(least, found, emitted.optimizer)
    proved = None if plan is best[0] else priced
    return SearchResult(result.strategy, *best, (), bound, result.explored, proved=proved)


def _choose_and_bound(
    found: JointPlan, settle: Chooser, meanwhile: Callable[[], object] = lambda: None
) -> SearchResult:
    """
    Return the fastest by simulated time of what was found, baselines and plans on parts, with its bound.

    `meanwhile` runs while the worker makes baselines.
    """
    emitted, machine = settle.emitted, settle.machine
    optimizer = emitted.optimizer
    own = found.graph, cost(found.graph, machine, optimizer)
    result = SearchResult(
        settle.strategy, *own, found.derivation, found.bound, found.explored, interrupted=found.interrupted
    )
    result = replace(result, joint=found)
    if found.interrupted or machine.devices == 1:
        return result
    try:
        bounding = None
        if found.bound is None:
            bounding = settle.bounding.ask(KnownPlan(found.rewritten, own[1].time, own[1].memory_bytes, found.price))
        by_hand = settle.by_hand.ask((found.rewritten, False))
        others = [own, *plans_with_hidden_moves(found, machine, optimizer)]
        for plan in others:
            emitted.seconds(plan)
        meanwhile()
        offers = that_fit(by_hand())
        proved, bound = own, found.bound
        if bounding is not None:
            least = min((o for o in offers if not o.on_parts), key=lambda o: o.seconds, default=None)
            proved = own if least is None or own[1].time <= least.seconds else emitted.plan(least)
        first = emitted.fastest([proved, *others], offers)
        best = _in_parts(first, first is own, found, machine, emitted)
        if bounding is not None:
            plan, priced, bound = bounded(proved, bounding(), optimizer)
            if plan is not proved[0]:
                proved = plan, priced
                best_now = emitted.fastest([proved, *others], offers)
                if best_now is not first:
                    best = _in_parts(best_now, best_now is own, found, machine, emitted)
        explained = replace(found, graph=best[0]) if found.bound is not None or best is own else None
        result = replace(result, graph=best[0], cost=best[1], bound=bound, joint=explained)
        if best is not proved:
            result = replace(result, proved=proved[1])
    except KeyboardInterrupt:
        result = replace(result, interrupted=True)
    return result


def _in_parts(plan: Plan, is_own: bool, found: JointPlan, machine: Machine, emitted: SimulatedPlans) -> Plan:
    """Return a plan (`is_own`: the one `found`), or a faster one with siblings or branches on parts of the machine."""
    if not_kept(plan[0]):
        return plan
    rests = relays = dict[Value, Layout]()
    if is_own:
        _, rests, relays = placed(found.rewritten, found.plan, found.solver)
    beside = place_siblings(found.rewritten, machine, emitted.optimizer, plan[0])
    branches = place_branches(found.rewritten, machine, emitted.optimizer, plan[0], (rests, relays))
    return emitted.fastest([plan, *(p for p in (beside, branches) if p is not None)])


def plans_with_hidden_moves(found: JointPlan, machine: Machine, optimizer: Optimizer) -> Iterator[Plan]:
    """Yield the optimal plans, other than `found`, for each share of the weight moves taken as overlapped."""

    def fastest(part: float) -> Graph:
        solver = found.solver.at(Price(hidden=part))
        return realise(found.rewritten, solver.solve(found.rewritten), solver)

    def between(low: Graph, parts: Sequence[float], high: Graph) -> list[Graph]:
        """
        Return plans for the shares between two; a plan's cost is linear in the share, so equal ends need no search.
        """
        if not parts or low == high:
            return []
        middle = fastest(parts[-1])
        return [*between(low, parts[:-1], middle), middle]

    if found.price == 0:
        *parts, most = limits().hidden_shares
        last = fastest(most)
        for plan in dict.fromkeys([*between(found.graph, parts, last), last]):
            if plan != found.graph:
                yield plan, cost(plan, machine, optimizer)
