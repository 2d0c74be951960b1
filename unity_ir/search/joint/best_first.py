"""
Search over graphs: algebraic rewrites outside, the exact parallelization of each candidate inside.

Best-first, as Unity's substitution level (section 5.1): the cheapest graph so far is rewritten in every way the rules
allow; a candidate is queued if it costs less than alpha times the best. Unlike there, a candidate's cost is that of its
optimal parallelization and mapping, not of one PCG.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from unity_ir.budget import spend
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer, Value
from unity_ir.rules.derivation import RuleApplication
from unity_ir.rules.match import OpIndex
from unity_ir.rules.rule import Rule
from unity_ir.search.exact.axis_groups import solve
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import certain, with_shared_moves
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.limits import limits

Progress = Callable[[int, float], None]
"""Called with the number of graphs explored and the best time so far (seconds)."""


_Found = tuple[float, Graph, ExactPlan, tuple[RuleApplication, ...]]
"""Seconds, a serial graph, its plan, and its derivation."""


@dataclass(frozen=True)
class JointPlan:
    """The result of the joint search."""

    graph: Graph
    bound: float | None
    """Lower bound in seconds on every placement of `rewritten`; None where mesh axes were grouped, or after Ctrl-C."""
    derivation: tuple[RuleApplication, ...]
    explored: int
    rewritten: Graph
    """The serial graph at the end of the derivation, of which `graph` is the parallelization."""
    plan: ExactPlan
    solver: Solver
    price: float = 0.0
    """Seconds charged per byte on a device (the Lagrange multiplier), where memory is short."""
    interrupted: bool = False
    """Whether Ctrl-C or the budget ended the search: this is the incumbent then."""
    rival: JointPlan | None = None
    """The plan of the graph that is fastest on one device, if it is another graph."""
    source: ExactPlan | None = None
    """The plan of the graph without rewrites, by the same solver."""


@dataclass
class RewriteCache:
    """Memo of rewrites, for the next search from the same graph at another price of bytes."""

    alone: JointPlan | None = None
    everywhere: dict[tuple[tuple[Value, ...], str], tuple[list[RuleApplication], Graph]] = field(
        default_factory=dict[tuple[tuple[Value, ...], str], tuple[list[RuleApplication], Graph]]
    )
    rewrites: dict[tuple[Value, ...], ReplayIterator] = field(default_factory=dict[tuple[Value, ...], "ReplayIterator"])


class ReplayIterator:
    """Replays an iterator from its beginning, any number of times; items are drawn from it once."""

    def __init__(self, given: Iterator[tuple[list[RuleApplication], Graph]]):
        self._given = given
        self._kept: list[tuple[list[RuleApplication], Graph]] = []

    def __iter__(self) -> Iterator[tuple[list[RuleApplication], Graph]]:
        at = 0
        while True:
            if at == len(self._kept):
                after = next(self._given, None)
                if after is None:
                    return
                self._kept.append(after)
            yield self._kept[at]
            at += 1


def joint(
    graph: Graph,
    machine: Machine,
    rules: Sequence[Rule],
    optimizer: Optimizer,
    alpha: float = 1.05,
    budget: int = 500,
    progress: Progress | None = None,
    solver: Solver | None = None,
    explored: RewriteCache | None = None,
    like: Graph | None = None,
) -> JointPlan:
    """
    Return the fastest parallel graph found for a serial one.

    `alpha` is how much worse than the best a graph may be and still be rewritten; `budget` bounds the operators of all
    graphs explored, so that the same search ends in the same plan on any computer. `solver` may price bytes, too; by
    default only time is priced. `explored` is the memo of an earlier search; `like` the graph whose number of axis
    groups is used (`axis_groups.solve`), by default the source's. Ctrl-C ends the search with the incumbent. Raises
    `KeyboardInterrupt` before there is one.
    """
    most = max(limits().least_graphs, budget // max(1, sum(n.is_compute for n in graph.nodes())))
    tie = count()
    explored = explored or RewriteCache()
    solver, plan = solve(graph, machine, optimizer, like) if solver is None else (solver, solver.solve(graph))
    best: _Found = (plan.seconds, graph, plan, ())
    queue: list[tuple[float, int, Graph, tuple[RuleApplication, ...]]] = [(plan.seconds, next(tie), graph, ())]
    seen = {graph.outputs}
    ends: list[_Found] = []
    interrupted = False

    def enter(after: Graph, steps: tuple[RuleApplication, ...]) -> _Found | None:
        """Price a graph and queue it, unless it was seen; return what was found."""
        nonlocal best
        if after.outputs in seen:
            return None
        seen.add(after.outputs)
        plan = solver.solve(after)
        found = plan.seconds, after, plan, steps
        if plan.seconds < best[0] * (1 - 1e-9):
            best = found
        if plan.seconds <= alpha * best[0]:
            heapq.heappush(queue, (plan.seconds, next(tie), after, steps))
        if progress is not None:
            progress(len(seen), best[0])
        return found

    try:
        if rules and machine.devices > 1:
            # What is fastest on one device is often near, and may be many rewrites away.
            alone = explored.alone or joint(graph, one_device(machine), rules, optimizer, alpha, budget)
            if alone.interrupted:
                raise KeyboardInterrupt
            explored.alone = alone
            end = enter(alone.rewritten, alone.derivation)
            ends += [] if end is None else [end]
        for rule in rules:
            # For large graphs the budget ends before rewrites of rewrites.
            _, candidate, _, derivation = best
            at = candidate.outputs, rule.name
            if at not in explored.everywhere:
                explored.everywhere[at] = _everywhere(candidate, rule, OpIndex(candidate))
            applied, after = explored.everywhere[at]
            enter(after, (*derivation, *applied))
        most += len(seen)
        while queue and len(seen) < most:
            seconds, _, candidate, derivation = heapq.heappop(queue)
            if seconds > alpha * best[0]:
                break
            for applied, after in explored.rewrites.setdefault(
                candidate.outputs, ReplayIterator(_rewrites(candidate, rules))
            ):
                enter(after, (*derivation, *applied))
                if len(seen) >= most:
                    break
    except KeyboardInterrupt:
        interrupted = True
    if not interrupted:
        try:
            best, *ends = sorted(_sharpened(solver, best, ends), key=lambda f: f[0])
        except KeyboardInterrupt:
            interrupted = True

    def plan_of(found: _Found) -> JointPlan:
        _, rewritten, plan, derivation = found
        bound = None if interrupted or not solver.spaces.axis_by_axis else certain(plan.bound, rewritten, machine)
        graph = realise(rewritten, plan, solver)
        return JointPlan(graph, bound, derivation, len(seen), rewritten, plan, solver, interrupted=interrupted)

    rival = plan_of(ends[0]) if ends and not interrupted else None
    return replace(plan_of(best), rival=rival, source=plan)


def _sharpened(solver: Solver, best: _Found, ends: Sequence[_Found]) -> Iterator[_Found]:
    """Yield the plans with shared moves charged once; `best` wins ties by a factor of 1 - 1e-9."""
    for found in (best, *(end for end in ends if end is not best)):
        _, graph, plan, derivation = found
        plan = with_shared_moves(solver, graph, plan)
        yield plan.seconds * (1 - 1e-9 * (found is best)), graph, plan, derivation


def one_device(machine: Machine) -> Machine:
    """Return a machine of one of the devices."""
    return replace(machine, levels=(), links=())


def _rewrites(graph: Graph, rules: Sequence[Rule]) -> Iterator[tuple[list[RuleApplication], Graph]]:
    """
    Yield rewrites of a graph: each rule everywhere it applies, then each rule in one place.

    Repeated layers mostly want the same rewrite; without the former, n of them would take n rounds.
    """
    nodes = len(graph.nodes())
    spend(limits().work_match * nodes * len(rules))
    index = OpIndex(graph)
    matching = [rule for rule in rules if any(True for _ in rule.matches(graph, index=index))]
    for rule in matching:
        at, after = _everywhere(graph, rule, index)
        if len(at) > 1:
            yield at, after
    for rule in matching:
        for place, after in rule.applications(graph, index=index):
            spend(limits().work_rebuild * nodes)
            yield [RuleApplication(rule.name, place)], after


def _everywhere(graph: Graph, rule: Rule, index: OpIndex) -> tuple[list[RuleApplication], Graph]:
    """Apply a rule as often as it matches at first: some rules make new matches for themselves for ever."""
    most = sum(1 for _ in rule.matches(graph, index=index))
    spend(limits().work_rebuild * len(graph.nodes()) * (1 + most))
    at, after = rule.everywhere(graph, most=most)
    return [RuleApplication(rule.name, place) for place in at], after
