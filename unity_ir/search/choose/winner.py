"""
Re-rank candidates by simulated time; attach the bound.

The candidates are the plan a search found, plans with a share of its weight moves hidden, plans by hand, and those with
operators on parts of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf
from typing import Any

from unity_ir.budget import within
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.sharding import Layout
from unity_ir.search.bounds.axis_counts import (
    Bounds,
    ExpectedBound,
    KnownPlan,
    faster_with_bound,
    is_tabulated,
    quick_bound,
)
from unity_ir.search.choose.beside import Beside
from unity_ir.search.choose.candidates import (
    BaselineKind,
    Baselines,
    Candidate,
    PricedPlan,
    SimulatedPlans,
    candidate,
    fits,
    that_fit,
)
from unity_ir.search.choose.hidden_moves import Shares, plans_with_hidden_moves
from unity_ir.search.choose.parallel_branches import place_branches
from unity_ir.search.choose.parallel_siblings import place_siblings
from unity_ir.search.exact.axis_groups import LeastSeconds
from unity_ir.search.exact.plan_graph import placed, realise
from unity_ir.search.exact.solver import Solver
from unity_ir.search.joint.best_first import JointPlan, PricedGraph, joint
from unity_ir.search.layouts.exchanged import exchange_rows
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.operator_table import cache_kernel_templates
from unity_ir.search.memory.lagrangian import Refused
from unity_ir.search.recompute.fit import with_recompute_and_pieces
from unity_ir.search.recompute.priced import LayoutsWithRecompute, layouts_with_recompute, price_where_short
from unity_ir.search.result import SearchResult
from unity_ir.search.worker import ForkedWorker, is_large_machine

STARTS = ("data-parallel", "expert")
"""
The baselines from which branches are put on parts of the machine, too, in graphs of few operators: each branch has the
layout that it has there, within its part, which may be a better one than in the plan that is best on all devices.
"""

Recomputed = tuple[LayoutsWithRecompute, list[PricedPlan]]
"""Layouts of one graph where memory is short, with those of its plans with recompute that fit."""


@dataclass(frozen=True)
class Unbounded:
    """A result whose lower bound is still to be computed, so that only that of the plan given in the end need be."""

    result: SearchResult
    bounded: Callable[[], SearchResult]
    """Returns the result with its bound: of another plan, where bounding finds a faster one."""

    @staticmethod
    def as_is(result: SearchResult) -> Unbounded:
        """Return a result that has its bound, or gets none."""
        return Unbounded(result, lambda: result)

    def or_interrupted(self) -> SearchResult:
        """Return the result with its bound; without, and marked as interrupted, if Ctrl-C or the budget ends that."""
        if self.result.interrupted:
            return self.result
        try:
            return self.bounded()
        except KeyboardInterrupt:
            return replace(self.result, interrupted=True)


@contextmanager
def choosing(
    strategy: str, serial: Graph, machine: Machine, optimizer: Optimizer, known: float = inf
) -> Generator[Chooser]:
    """
    Yield a `Chooser`, which picks the final plan for the serial graph `serial`, as a context manager around its search.

    `strategy` is the name put into results, and `known` the seconds as emitted of the best plan known. On large
    machines (more than `limits().exact_axes` mesh axes) two forked processes compute baselines and lower bounds beside
    the search, and end with the `with` statement; on others these are computed when asked for.
    """
    bounds, baselines = Bounds(machine, optimizer), Baselines(machine, optimizer)
    large = is_large_machine(machine)
    with ExitStack() as stack:
        if large:
            # All processes need them, and forks inherit them.
            cache_kernel_templates(serial)
        by_hand = stack.enter_context(ForkedWorker(baselines, beside=large))
        unrewritten = by_hand.ask((serial, "quick")) if strategy == "joint" else None
        bounding = stack.enter_context(ForkedWorker(bounds, bounds.ahead(serial), beside=large))
        emitted = SimulatedPlans(machine, optimizer)
        beside = Beside(serial, machine, optimizer, stack)
        yield Chooser(strategy, serial, machine, emitted, by_hand, bounding, beside, unrewritten, known)


@dataclass(frozen=True)
class Chooser:
    """
    Makes the result of a search: the final plan, which is the fastest by simulated time among the plan found and its
    alternatives, and a lower bound.

    The alternatives, each compared by a method: plans of the same graph with weight moves overlapped, by hand, or on
    parts of the machine (`_chosen`); plans of the graph that is fastest on one device (`_with_rival`) and of the graph
    without rewrites (`with_unrewritten`). `by_hand` and `bounding` may run in worker processes.
    """

    strategy: str
    serial: Graph
    """The graph without rewrites."""
    machine: Machine
    emitted: SimulatedPlans
    by_hand: ForkedWorker[tuple[Graph, BaselineKind], list[Candidate]]
    """Makes the baselines of a serial graph."""
    bounding: ForkedWorker[KnownPlan | ExpectedBound, tuple[float, Graph | None]]
    """Computes a lower bound, given a plan, and maybe a faster plan."""
    beside: Beside
    """Simulates plans as emitted, and finds plans of the graph without rewrites."""
    unrewritten_baselines: Callable[[], list[Candidate]] | None
    """Returns the baselines of the graph without rewrites."""
    known: float = inf
    """Seconds as emitted of the best plan known: slower plans found where memory is short get no bound."""
    _placed: dict[tuple[Graph, Graph], PricedPlan] = field(default_factory=dict[tuple[Graph, Graph], PricedPlan])
    _asked: dict[tuple[Graph, BaselineKind], Callable[[], list[Candidate]]] = field(
        default_factory=dict[tuple[Graph, BaselineKind], Callable[[], list[Candidate]]]
    )
    _bounds_asked: dict[KnownPlan, Callable[[], tuple[float, Graph | None]]] = field(
        default_factory=dict[KnownPlan, Callable[[], tuple[float, Graph | None]]]
    )

    def ask_baselines(self, graph: Graph, kind: BaselineKind = "usual") -> Callable[[], list[Candidate]]:
        """
        Start making all baselines of a kind of a serial graph, in a worker process if a processor is free, and return a
        function that waits for them and returns them. They are made once, however often they are asked for.
        """
        key = graph, kind
        if key not in self._asked:
            self._asked[key] = cache(self.by_hand.ask(key))
        return self._asked[key]

    def ask_exchanging(self) -> Callable[[], list[Candidate]]:
        """Do as `ask_baselines` for those of the graph without rewrites that exchange rows, where searches may."""
        return self.ask_baselines(self.serial, "exchanging rows") if exchange_rows() else list

    def expect(self, found: PricedGraph, solver: Solver) -> None:
        """
        Have workers, if there are any, begin what the result will likely need, given a graph that the search has
        priced: first the graph without rewrites, then the one that it will likely return.
        """
        if not self.by_hand.is_forked:
            return
        plan, priced = self._priced(realise(found.graph, found.plan, solver))
        if priced.memory_bytes > self.machine.device.usable:
            return
        if found.graph == self.serial and not self.beside.begun:
            self.beside.begin(found.plan, solver, plan)
        else:
            self.ask_baselines(found.graph)
        self.beside.simulate(plan)

    @cached_property
    def least(self) -> LeastSeconds:
        """Returns a quick lower bound on the plans of a serial graph (`quick_bound`)."""
        return partial(quick_bound, Bounds(self.machine, self.emitted.optimizer))

    def begin(self, fastest: JointPlan) -> None:
        """
        Have the workers, if there are any, begin what the result will likely need: of `fastest`, the plan found as if
        memory were not short, or of the graph without rewrites, if that plan holds too much.
        """
        _, priced = self._priced(fastest.graph)
        if priced.memory_bytes > self.machine.device.usable:
            if exchange_rows():
                self.ask_exchanging()
            else:
                self.ask_baselines(self.serial)
            if not fastest.interrupted and self.bounding.is_forked and self.known == inf:
                price = price_where_short(fastest, self.serial, self.emitted.optimizer)
                self.bounding.ask(ExpectedBound(self.serial, price))
            return
        self.ask_baselines(fastest.rewritten)
        self.ask_exchanging()
        self.beside.simulate(fastest.graph)
        if fastest.bound is None and self._is_source_faster(fastest):
            self.bounding.ask(ExpectedBound(self.serial))
        elif fastest.bound is None:
            self._ask_bound(fastest, priced)

    def _is_source_faster(self, found: JointPlan) -> bool:
        """
        Return whether, as emitted, the plan of the graph without rewrites is faster than the plan found of a rewritten
        one, whose sum of seconds is less; False where no process simulates both.
        """
        source = self.beside.source
        if source is None or not found.derivation:
            return False
        return self.emitted.fastest([self._priced(found.graph), self._priced(source)])[0] is source

    def _ask_bound(self, found: JointPlan, priced: PlanCost) -> Callable[[], tuple[float, Graph | None]]:
        """Start computing a lower bound on the plans of `found.rewritten`, as `ask_baselines` does baselines."""
        known = KnownPlan(found.rewritten, priced.time, priced.memory_bytes, found.price)
        if known not in self._bounds_asked:
            self._bounds_asked[known] = self.bounding.ask(known)
        return self._bounds_asked[known]

    def result(self, found: JointPlan) -> SearchResult:
        """
        Return the search result for the plan `found` of the joint search or, if one simulates faster, for an
        alternative: a baseline, a plan on parts of the machine, or a plan of another rewrite. If Ctrl-C or the budget
        ends the comparison, the result is the best so far, marked as interrupted.
        """
        asked: list[Callable[[], list[Candidate]]] = []

        def meanwhile(shares: Shares) -> None:
            # If the found plan has rewrites, and memory is not short.
            if self.strategy == "joint" and found.derivation and found.source is not None and found.price == 0:
                asked.append(self.beside.unrewritten(found.source, found.solver, shares))

        now = self._compared(self._choose(found, meanwhile, later=self._is_source_faster(found)), found)
        if now.result.interrupted:
            return now.result
        try:
            now = self._with_rival(now, found)
            if self.unrewritten_baselines is not None and now.result.derivation and not now.result.interrupted:
                plans = [candidate for answer in asked for candidate in answer()]
                now = self._or_unrewritten(now, plans)
        except KeyboardInterrupt:
            return replace(now.result, interrupted=True)
        return now.or_interrupted()

    def _compared(self, now: Unbounded, found: JointPlan) -> Unbounded:
        """
        Return the result for a plan found, to be compared with others: with its bound, where bounding may find a faster
        plan. Elsewhere only the fastest of all is bounded.
        """
        return Unbounded.as_is(now.or_interrupted()) if is_tabulated(found.rewritten, self.machine) else now

    def unbounded(self, found: JointPlan) -> Unbounded:
        """
        Return what `result` does for a plan found where memory is short, before its lower bound is computed, so that
        results can be compared first.
        """
        chosen = self._choose(found, later=True)
        if self.unrewritten_baselines is None or not chosen.result.derivation or chosen.result.interrupted:
            return chosen
        try:
            return self._or_unrewritten(chosen, [])
        except KeyboardInterrupt:
            return Unbounded.as_is(replace(chosen.result, interrupted=True))

    def _or_unrewritten(self, now: Unbounded, plans: Sequence[Candidate]) -> Unbounded:
        """
        Return `now` or a faster result for the graph without rewrites: one of `plans`, or a quick baseline; where one
        of these is faster, also any other baseline of that graph.
        """
        quick = [] if self.unrewritten_baselines is None else that_fit(self.unrewritten_baselines())
        chosen = self.with_unrewritten(now, [*plans, *quick])
        if chosen is now:
            return now
        return self.with_unrewritten(now, [*plans, *that_fit(self.ask_baselines(self.serial)())])

    def with_bound(self, now: Unbounded) -> SearchResult:
        """Return a result with its bound, unless it is slower than the best plan known."""
        if self.known == inf or now.result.interrupted:
            return now.or_interrupted()
        try:
            seconds = self.emitted.seconds((now.result.graph, now.result.cost))
        except KeyboardInterrupt:
            return replace(now.result, interrupted=True)
        return now.result if seconds * limits().faster > self.known else now.or_interrupted()

    def or_exchanging(self, now: Unbounded) -> Unbounded:
        """
        Return `now` or, if one simulates faster, the result for a plan by hand that exchanges rows of experts, with the
        bound of `now` where that is of the same graph.
        """
        if now.result.interrupted:
            return now
        try:
            plans = that_fit(self.ask_exchanging()())
            if now.result.derivation:
                return self.with_unrewritten(now, plans)
            best = self.emitted.fastest([(now.result.graph, now.result.cost)], plans)
        except KeyboardInterrupt:
            return Unbounded.as_is(replace(now.result, interrupted=True))
        if best[0] is now.result.graph:
            return now

        def with_plan(of: SearchResult) -> SearchResult:
            least = min(of.proved or of.cost, best[1], key=lambda priced: priced.time)
            bound = None if of.bound is None else min(of.bound, least.time)
            proved = None if least is best[1] or bound is None else least
            return replace(of, graph=best[0], cost=best[1], joint=None, bound=bound, proved=proved)

        return Unbounded(with_plan(now.result), lambda: with_plan(now.bounded()))

    def faster(self, now: Unbounded, other: Unbounded) -> Unbounded:
        """
        Return the result whose plan has the lower simulated time as emitted; `now`, unless `other` fits the memory and
        is clearly faster. In the returned result, the number of graphs explored is that of both searches together, and
        `interrupted` is that of `other`.
        """
        plans = [(each.result.graph, each.result.cost) for each in (now, other)]
        best = self.emitted.fastest(plans)
        explored = now.result.explored + other.result.explored
        chosen = now if best[0] is now.result.graph else other
        return _changed(chosen, explored=explored, interrupted=other.result.interrupted)

    def with_recompute(self, now: Unbounded, fastest: JointPlan) -> Unbounded:
        """
        Return the faster of two results, by simulated time: `now`, whose plan fits the memory, and that of a plan with
        recompute made from `fastest`, the plan found as if memory were not short.
        """
        if fastest.interrupted:
            return now
        try:
            tried = self._recomputed(fastest)
            best = self.emitted.fastest([(now.result.graph, now.result.cost), *_all_plans(tried)])
        except KeyboardInterrupt:
            return _changed(now, interrupted=True)
        if best[0] is now.result.graph:
            return now
        chosen = _with_plan(tried, best)
        assert chosen is not None
        found, plans = chosen
        result = self._of_recompute(best, plans, found, now.result.explored, lambda: self._bounded(found, plans)())
        of_now = now.result.graph, now.result.cost
        is_close = self.emitted.seconds(of_now) <= limits().about_equal * self.emitted.seconds(best)
        return _changed(result, runner_up=now.result.graph) if is_close else result

    def at_hand(self, fastest: JointPlan) -> SearchResult | None:
        """
        Return a result for a search that was ended before it found a plan that fits a device. Charges no work to the
        budget, which may be what ended the search.

        Returns the fastest baseline that fits, if baselines were made beside the search and one does. Otherwise returns
        `fastest`, the plan found as if memory were not short, with recompute; None if that does not fit either.
        """
        with within(None):
            known = [] if self.unrewritten_baselines is None else that_fit(self.unrewritten_baselines())
            if known:
                best = self.emitted.plan(min(known, key=lambda c: c.emitted))
                return SearchResult(self.strategy, *best, explored=fastest.explored, interrupted=True)
            optimizer = self.emitted.optimizer
            plan = self._priced(
                with_recompute_and_pieces(
                    fastest.graph, "auto", None, self.machine, optimizer, weights=True, compared=False
                )
            )
        if not fits(*plan, self.emitted.optimizer):
            return None
        return SearchResult(self.strategy, *plan, fastest.derivation, fastest.bound, fastest.explored, interrupted=True)

    def _recomputed(self, fastest: JointPlan) -> list[Recomputed]:
        """
        Return the layouts found from `fastest`, the plan found as if memory were not short, each with those of its
        plans with recompute that fit. Those of a second graph are tried if no plan of the first fits, or if they cost
        at most `limits().about_equal` times as much: the sum does not tell how much communication a plan overlaps.
        """
        tried: list[Recomputed] = []
        for found in layouts_with_recompute(fastest, self.serial, self.emitted.optimizer):
            if _all_plans(tried) and found.least > limits().about_equal * tried[0][0].least:
                break
            plans = map(self._priced, found.plans(self.emitted.optimizer))
            tried.append((found, [plan for plan in plans if fits(*plan, self.emitted.optimizer)]))
        return tried

    def _of_recompute(
        self,
        best: PricedPlan,
        plans: Sequence[PricedPlan],
        found: LayoutsWithRecompute,
        explored: int,
        bound: Callable[[], float],
    ) -> Unbounded:
        """
        Return the result for `best`, a plan of the graph of `found`, with a lower bound on all plans of that graph that
        fit, whatever they recompute and gather again; of it and `plans` the one that sums the fewest seconds is given
        with that.
        """
        proved = min((best, *plans), key=lambda plan: plan[1].time)
        of_bound = None if proved[0] is best[0] else proved[1]
        result = SearchResult(self.strategy, *best, found.of.derivation, explored=explored, proved=of_bound)
        return Unbounded(result, lambda: replace(result, bound=min(proved[1].time, bound())))

    def _bounded(self, found: LayoutsWithRecompute, plans: Sequence[PricedPlan]) -> Callable[[], float]:
        """
        Have a lower bound computed on all plans of the graph of `found` that fit, of which `plans`, at least one, are
        some; return a function that waits for it.
        """
        if found.of.solver.spaces.axis_by_axis:
            return found.bound
        return self._bound_with_recompute(found.of.rewritten, min(plans, key=lambda p: p[1].time), found.price)

    def _bound_with_recompute(self, graph: Graph, plan: PricedPlan, price: float) -> Callable[[], float]:
        """
        Have a lower bound computed on all plans of a serial graph that fit, at the price of a byte `price`; return a
        function that waits for it. `plan` is one of them.
        """
        asked = self.bounding.ask(KnownPlan(graph, plan[1].time, plan[1].memory_bytes, price, again=True))
        return lambda: asked()[0]

    def best_baseline(self, refused: Refused, fastest: JointPlan) -> SearchResult:
        """
        Return a result where the search found no plan that fits a device: that of the plan that fits and simulates
        fastest, among the baselines and plans with recompute. The latter are made from `fastest`, the plan found as if
        memory were not short.

        If none fits, raises `refused`, the search's error, which names the smallest plan that it knows; if a baseline
        needs fewer bytes than that, an error that names the baseline instead.
        """
        by_hand, exchanging = self.ask_baselines(self.serial), self.ask_exchanging()
        tried = [] if fastest.interrupted else self._recomputed(fastest)
        # Of the graph without rewrites, whichever plan is chosen; one of another graph would delay that.
        early = [each for each in tried[:1] if each[1] and each[0].of.rewritten == self.serial and self.known == inf]
        bounds = {id(found): self._bounded(found, plans) for found, plans in early}
        known, plans = [*by_hand(), *exchanging()], _all_plans(tried)
        candidates = that_fit(known)
        if not plans and not candidates:
            least = min(known, key=lambda c: c.needs, default=None)
            raise refused if least is None else refused.naming_smaller(least.name, least.needs, least.seconds)
        best = self.emitted.fastest(plans or [self.emitted.plan(min(candidates, key=lambda c: c.emitted))], candidates)
        # Baselines are of the graph without rewrites.
        of_source = next((each for each in tried if each[0].of.rewritten == self.serial), None)
        chosen = _with_plan(tried, best) or of_source
        if chosen is None:
            price = tried[0][0].price if tried else 0.0
            result = SearchResult(self.strategy, *best, explored=fastest.explored)

            def bounded() -> SearchResult:
                least = self._bound_with_recompute(self.serial, best, price)()
                return replace(result, bound=min(best[1].time, least))

            return self.with_bound(Unbounded(result, bounded))
        found, plans = chosen
        if candidates and chosen is of_source:
            plans = [*plans, self.emitted.plan(min(candidates, key=lambda c: c.seconds))]
        bound = bounds.get(id(found)) or (lambda: self._bounded(found, plans)())
        return self.with_bound(self._of_recompute(best, plans, found, fastest.explored, bound))

    def _priced(self, graph: Graph) -> PricedPlan:
        return graph, cost(graph, self.machine, self.emitted.optimizer)

    def _choose(
        self,
        found: JointPlan,
        meanwhile: Callable[[Shares], object] = lambda _: None,
        later: bool = False,
        worth: float = inf,
    ) -> Unbounded:
        """
        Return the result for a plan found, among all plans of the same serial graph.

        `meanwhile` is called without shares at first, and then with those of weights' moves that are worth trying in
        another graph: all in graphs of few operators, otherwise the one at which the fastest plan as emitted was found,
        if any. The bound is computed meanwhile, too, unless `later`. No operators are put on parts of the machine if
        the fastest plan without takes more than `worth` seconds.
        """
        own = self._priced(found.graph)
        result = SearchResult(self.strategy, *own, found.derivation, found.bound, found.explored, joint=found)
        if found.interrupted:
            return Unbounded.as_is(replace(result, interrupted=True))
        meanwhile(())
        if self.machine.devices == 1:
            return Unbounded.as_is(result)
        try:
            return self._chosen(result, own, found, meanwhile, later, worth)
        except KeyboardInterrupt:
            return Unbounded.as_is(replace(result, interrupted=True))

    def _chosen(
        self,
        result: SearchResult,
        own: PricedPlan,
        found: JointPlan,
        meanwhile: Callable[[Shares], object],
        later: bool,
        worth: float,
    ) -> Unbounded:
        """
         Complete the result of `own`, the plan found.

         1. Ask the workers for a bound, unless the search found one, and for baselines.
         2. Simulate the plan found, and those with a part of its weight moves overlapped.
         3. Take the fastest of them and of the baselines or, where that takes at most `worth` seconds, a faster one
           with operators on parts of the machine: made from that one or, in graphs of few operators, with branches
           there, from one of the baselines `STARTS`.
        4. The bound is of sums of seconds, so the plan of the least sum is given with it as `proved`. Where bounding
            finds a plan of a lesser sum, choose again with that one; in graphs of few operators, before 3.
        """
        is_small = len(own[1].operators) <= limits().sibling_operators
        is_known = found.bound is not None or (later and not is_small)
        bounding = None if is_known else self._ask_bound(found, own[1])
        by_hand = self.ask_baselines(found.rewritten)
        optimizer = self.emitted.optimizer
        if is_small:
            meanwhile(limits().hidden_shares)
        moves = plans_with_hidden_moves(found, self.machine, optimizer, limits().hidden_shares, self.beside.simulate)
        hidden = [((), own), *moves]
        plans = [plan for _, plan in hidden]
        shares, _ = min(hidden, key=lambda each: self.emitted.seconds(each[1]))
        if shares and not is_small:
            meanwhile(shares)
        candidates = that_fit(by_hand())
        proved = own if found.bound is not None else self._least_sum(own, candidates)
        first = self.emitted.fastest([proved, *plans], candidates)
        is_small = is_small and self.emitted.seconds(first) <= worth
        least = found.bound
        if is_small and bounding is not None:
            # Soon computed; operators are then put on parts of the machine once, not again for a plan that it finds.
            graph, priced, least = faster_with_bound(proved, bounding(), optimizer)
            if graph is not proved[0]:
                proved = graph, priced
                first = self.emitted.fastest([proved, *plans], candidates)
        starts = [c.graph for c in candidates if is_small and c.name in STARTS and c.graph != first[0]]
        with ForkedWorker(
            partial(self._branches_of, found), beside=is_large_machine(self.machine) and bool(starts)
        ) as worker:
            branches = worker.ask(starts)
            best = self.emitted.fastest([self._on_parts(first, found, worth)], branches())

        def of(best: PricedPlan, proved: PricedPlan, bound: float | None) -> SearchResult:
            explained = replace(found, graph=best[0]) if found.bound is not None or best is own else None
            of_bound = None if best is proved else proved[1]
            return replace(result, graph=best[0], cost=best[1], bound=bound, joint=explained, proved=of_bound)

        def bounded() -> SearchResult:
            graph, priced, bound = faster_with_bound(proved, (bounding or self._ask_bound(found, own[1]))(), optimizer)
            if graph is proved[0]:
                return of(best, proved, bound)
            better = graph, priced
            again = self.emitted.fastest([better, *plans], candidates)
            if again is first:
                return of(best, better, bound)
            return of(self.emitted.fastest([best, self._on_parts(again, found, worth)]), better, bound)

        chosen = of(best, proved, least)
        return Unbounded.as_is(chosen) if least is not None else Unbounded(chosen, bounded)

    def _least_sum(self, own: PricedPlan, candidates: Sequence[Candidate]) -> PricedPlan:
        """Return the plan found or, if all its moves waited for take less, the baseline of the least seconds."""
        least = min((c for c in candidates if not c.beyond_bounds), key=lambda c: c.seconds, default=None)
        return own if least is None or own[1].time <= least.seconds else self.emitted.plan(least)

    def _on_parts(self, plan: PricedPlan, found: JointPlan, worth: float) -> PricedPlan:
        """
        Return a plan of the rewritten graph or, if it takes at most `worth` seconds, a faster one with siblings or
        branches on parts of the machine. It is kept, as several choices begin with the same baseline.
        """
        if not_kept(plan[0]) or self.emitted.seconds(plan) > worth:
            return plan
        key = found.rewritten, plan[0]
        if plan[0] is found.graph or key not in self._placed:
            self._placed[key] = self._newly_on_parts(plan, found)
        return self._placed[key]

    def _newly_on_parts(self, plan: PricedPlan, found: JointPlan) -> PricedPlan:
        rests = relays = dict[Value, Layout]()
        if plan[0] is found.graph:
            _, rests, relays = placed(found.rewritten, found.plan, found.solver)
        on = found.rewritten, self.machine, self.emitted.optimizer, plan[0]

        def on_branches(_: None) -> Graph | None:
            # Its cost has mappings that cannot be sent.
            made = place_branches(*on, (rests, relays))
            return None if made is None else made[0]

        with ForkedWorker(on_branches, beside=is_large_machine(self.machine)) as worker:
            answer = worker.ask(None)
            siblings, branches = place_siblings(*on), answer()
        others = [plan for plan in (siblings, None if branches is None else self._priced(branches)) if plan is not None]
        for other, _ in others:
            self.beside.simulate(other)
        return self.emitted.fastest([plan, *others])

    def _branches_of(self, found: JointPlan, starts: Sequence[Graph]) -> list[Candidate]:
        """Return plans that fit, with branches on parts of the machine, made from baselines of the rewritten graph."""
        optimizer = self.emitted.optimizer
        made = [place_branches(found.rewritten, self.machine, optimizer, start, ({}, {})) for start in starts]
        return that_fit(candidate("branches", plan, optimizer) for plan in made if plan is not None)

    def _with_rival(self, now: Unbounded, found: JointPlan) -> Unbounded:
        """Return the result, or that of the graph that is fastest on one device, if its plan simulates faster."""
        rival = found.rival if found.price == 0 else None
        if rival is None:
            return now
        own = now.result.graph, now.result.cost
        slower = self.emitted.fastest([own, self._priced(rival.graph)]) is own
        if slower and len(now.result.cost.operators) > limits().rival_operators:
            return now
        rivals = [rival]
        if not rival.solver.spaces.axis_by_axis:
            # How axes are best cut into groups for the graph as it was says little about this one.
            optimizer = self.emitted.optimizer
            alone = joint(rival.rewritten, self.machine, (), optimizer, like=self.serial, least=self.least)
            rivals += [replace(alone, derivation=rival.derivation)] if alone.graph != rival.graph else []
        explored = now.result.explored
        for other in rivals:
            worth = limits().rival_worth * self.emitted.seconds((now.result.graph, now.result.cost))
            chosen = self._compared(self._choose(other, worth=worth), other)
            plans = [(each.result.graph, each.result.cost) for each in (now, chosen)]
            if self.emitted.fastest(plans)[0] is not now.result.graph:
                now = _changed(chosen, explored=explored)
            now = _changed(now, interrupted=chosen.result.interrupted)
        return now

    def with_unrewritten(self, now: Unbounded, candidates: Sequence[Candidate]) -> Unbounded:
        """
        Return `now` or, if one simulates faster, the result for one of `candidates`, plans of the graph without
        rewrites (`serial`) that fit, with a lower bound for that graph.
        """
        of_now = now.result.graph, now.result.cost
        best = self.emitted.fastest([of_now], candidates)
        if best is of_now:
            return now
        # Bounds do not cover plans on parts of the machine, nor ZeRO-3.
        least = min((c for c in candidates if not c.beyond_bounds), key=lambda c: c.seconds, default=None)
        proved = best if least is None else self.emitted.plan(least)
        result = SearchResult(now.result.strategy, *best, explored=now.result.explored)

        def bounded() -> SearchResult:
            found = self.bounding.ask(KnownPlan(self.serial, proved[1].time))()
            graph, priced, bound = faster_with_bound(proved, found, self.emitted.optimizer)
            # Bounding may have found a plan; it may also be faster as emitted.
            given = best if graph is proved[0] else self.emitted.fastest([best, (graph, priced)])
            of_bound = None if given[0] is graph else priced
            return replace(result, graph=given[0], cost=given[1], bound=bound, proved=of_bound)

        return Unbounded(result, bounded)


def _changed(now: Unbounded, **fields: Any) -> Unbounded:
    """Return a result with some of its fields replaced, now and once it has its bound."""
    return Unbounded(replace(now.result, **fields), lambda: replace(now.bounded(), **fields))


def _all_plans(tried: Sequence[Recomputed]) -> list[PricedPlan]:
    """Return the plans of all layouts tried."""
    return [plan for _, plans in tried for plan in plans]


def _with_plan(tried: Sequence[Recomputed], plan: PricedPlan) -> Recomputed | None:
    """Return the layouts that a plan is of; None if it is of none of those tried."""
    return next((each for each in tried if any(plan[0] is own[0] for own in each[1])), None)
