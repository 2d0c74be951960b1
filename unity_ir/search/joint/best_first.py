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
from math import inf

from unity_ir.budget import spend
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.rules.derivation import RuleApplication
from unity_ir.rules.match import OpIndex
from unity_ir.rules.rule import Rule
from unity_ir.search.exact.axis_groups import LeastSeconds, shortened_if_large, solve
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import with_shared_moves, without_free_moves
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.limits import limits
from unity_ir.search.worker import ForkedWorker

Progress = Callable[[int, float], None]
"""Called with the number of graphs explored and the best time so far (seconds)."""

Rewrite = tuple[list[RuleApplication], Graph]
"""Rule applications, and the serial graph after them."""


@dataclass(frozen=True)
class JointPlan:
    """
    The result of the joint search: the parallel graph, a lower bound, and the rewrites (`derivation`) that led to it.

    `explored` is the number of serial graphs priced.
    """

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
    """Memo of rewrites by graph, for the next search from the same source graph at another price of a byte."""

    alone: JointPlan | None = None
    """The plan for one device."""
    everywhere: dict[tuple[tuple[Value, ...], str], Rewrite] = field(
        default_factory=dict[tuple[tuple[Value, ...], str], Rewrite]
    )
    """Per graph (by its outputs) and rule name, the rule applied everywhere."""
    rewrites: dict[tuple[Value, ...], ReplayIterator] = field(default_factory=dict[tuple[Value, ...], "ReplayIterator"])
    """Per graph (by its outputs), all its rewrites: each rule applied everywhere, then each in one place."""


class ReplayIterator:
    """Replays an iterator from its beginning, any number of times; items are drawn from it once."""

    def __init__(self, given: Iterator[Rewrite]):
        self._given = given
        self._kept: list[Rewrite] = []

    def __iter__(self) -> Iterator[Rewrite]:
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
    progress: Progress | None = None,
    solver: Solver | None = None,
    explored: RewriteCache | None = None,
    like: Graph | None = None,
    expecting: Callable[[PricedGraph, Solver], object] | None = None,
    least: LeastSeconds | None = None,
) -> JointPlan:
    """
    Return the fastest parallel graph found for a serial one (best-first search; Unity, section 5.1).

    1. Price the source graph by its optimal parallelization: it is the incumbent, and queued.
    2. Price the graph that the same search finds for one device: it may be many rewrites away.
    3. Price the incumbent with each rule in turn applied wherever it matches.
    4. Price all rewrites of the cheapest queued graph, until none is within `limits().alpha` of the incumbent or
       `limits().rewritten_operators` operators are priced (a count, so that any computer finds the same plan).
    5. Charge shared moves once in the incumbent and in the graph of step 2; return the faster, with a lower bound.

    A large graph with layers that repeat takes other steps in the place of 2 to 4: a graph with few of these layers is
    searched, and the rules that rewrote it are applied everywhere in the large one.

    `rules` are the algebraic rewrites to try. `progress` is called with the number of graphs explored and the best
    seconds so far. `solver` finds a graph's optimal parallelization; by default one is made that looks at seconds
    alone. `explored` is the memo of rewrites of an earlier search from the same graph. `like` is for machines with many
    mesh axes, where neighbouring axes form groups with one role each: their number depends on the size of `like`, by
    default `graph`. Callers give the graph without rewrites, so that both are searched with equally many groups.
    `expecting` is called after step 1 with the graph priced, and before step 5 with the incumbent, which is most often
    the graph returned; both times with the solver, too. `least` is what `solve` takes: it may end the search for groups
    early.

    Ctrl-C ends the search with the incumbent. Raises `KeyboardInterrupt` before there is one.
    """
    if solver is None:
        solver, plan = solve(graph, machine, optimizer, like, least=least)
    else:
        plan = solver.solve(graph)
    search = BestFirst(PricedGraph(plan.seconds, graph, plan, ()), solver, rules, progress, explored or RewriteCache())
    if expecting is not None:
        expecting(search.best, solver)
    most = max(limits().least_graphs, limits().rewritten_operators // max(1, sum(n.is_compute for n in graph.nodes())))
    short = shortened_if_large(graph) if rules else None
    interrupted = False
    try:
        alone = None
        if short is not None:
            search.enter_alike(joint(short, machine, rules, optimizer, None, solver))
        else:
            alone = search.enter_alone(machine, optimizer) if rules and machine.devices > 1 else None
            search.enter_everywhere()
            search.expand(len(search.seen) + most)
        if expecting is not None:
            expecting(search.best, solver)
        best, *others = search.with_shared_moves(alone)
    except KeyboardInterrupt:
        interrupted, best, others = True, search.best, []

    def plan_of(found: PricedGraph) -> JointPlan:
        exact = solver.spaces.axis_by_axis and not interrupted
        bound = without_free_moves(found.plan.bound, found.graph, machine) if exact else None
        graph, seen = realise(found.graph, found.plan, solver), len(search.seen) + search.explored
        return JointPlan(graph, bound, found.derivation, seen, found.graph, found.plan, solver, interrupted=interrupted)

    rival = plan_of(others[0]) if others else None
    return replace(plan_of(best), rival=rival, source=plan)


@dataclass(frozen=True)
class PricedGraph:
    """
    A serial graph, its optimal plan, the cost of that in the solver's objective (`seconds`), and the rewrites that led
    to the graph (`derivation`).
    """

    seconds: float
    graph: Graph
    plan: ExactPlan
    derivation: tuple[RuleApplication, ...]


class BestFirst:
    """
    The state of a best-first search over graphs, and its steps, which `joint` puts in order.

    `best` is the incumbent. The queue holds graphs whose rewrites are to be priced, cheapest first. `seen` has the
    outputs of all graphs priced, so that each is priced once: nodes are hash-consed, so equal graphs have equal
    outputs.
    """

    def __init__(
        self, source: PricedGraph, solver: Solver, rules: Sequence[Rule], progress: Progress | None, memo: RewriteCache
    ):
        """Start from `source`, priced by `solver`."""
        self.best = source
        self.seen = {source.graph.outputs}
        self.solver, self.rules, self.progress, self.memo = solver, rules, progress, memo
        self.explored = 0
        """Graphs priced in another search."""
        self._queue = [(source.seconds, len(self.seen), source.graph, source.derivation)]
        """Entered later is later in the queue, where seconds are equal."""

    def enter(
        self,
        graph: Graph,
        derivation: tuple[RuleApplication, ...],
        is_compared: bool = False,
        answer: Callable[[], tuple[float, float]] | None = None,
    ) -> PricedGraph | None:
        """
        Compute the seconds of a serial graph's optimal plan, and queue the graph if they are within `limits().alpha`
        times the incumbent's; return the priced graph, or None if it was priced before. Of a graph that is not within
        that the plan is any, unless it `is_compared` later.

        `derivation` are the rewrites that led to the graph. `answer`, if given, waits for another process that prices
        it, and returns the seconds and the work; if they are no better than the incumbent's, no plan is found here, and
        None is returned.
        """
        if graph.outputs in self.seen:
            return None
        self.seen.add(graph.outputs)
        found, least = None, self.best.seconds * (1 - 1e-9)
        seconds, work = (-inf, 0.0) if answer is None else answer()
        if seconds < least:
            plan = self.solver.solve(graph, inf if is_compared else limits().alpha * self.best.seconds)
            seconds, found = plan.seconds, PricedGraph(plan.seconds, graph, plan, derivation)
            if seconds < least:
                self.best = found
        else:
            spend(work)
        if seconds <= limits().alpha * self.best.seconds:
            heapq.heappush(self._queue, (seconds, len(self.seen), graph, derivation))
        if self.progress is not None:
            self.progress(len(self.seen), self.best.seconds)
        return found

    def _seconds(self, question: tuple[Graph, float]) -> float:
        """Return the seconds of the plan that `Solver.solve` returns for a graph and the least seconds of interest."""
        return self.solver.solve(*question).seconds

    def enter_alone(self, machine: Machine, optimizer: Optimizer) -> PricedGraph | None:
        """
        Price the graph that is fastest on one device of `machine`, found by a search of its own, as `enter` does.

        Returns None if it was priced before. Raises `KeyboardInterrupt` if the search for it was interrupted.
        """
        alone = self.memo.alone or joint(self.best.graph, one_device(machine), self.rules, optimizer)
        if alone.interrupted:
            raise KeyboardInterrupt
        self.memo.alone = alone
        return self.enter(alone.rewritten, alone.derivation, is_compared=True)

    def enter_everywhere(self) -> None:
        """
        For each rule in turn, apply it to the incumbent wherever it matches, and price the result as `enter` does.

        Large graphs need this: there `expand` prices too few graphs to get to rewrites of rewrites.
        """
        for rule in self.rules:
            best = self.best
            if _undoes(rule, best.derivation):
                continue
            at = best.graph.outputs, rule.name
            if at not in self.memo.everywhere:
                self.memo.everywhere[at] = _everywhere(best.graph, rule, OpIndex(best.graph))
            applied, after = self.memo.everywhere[at]
            self.enter(after, (*best.derivation, *applied))

    def enter_alike(self, shorter: JointPlan) -> None:
        """
        Apply to the incumbent, wherever they match, the rules that rewrote a graph with fewer layers, in the same
        order, and price the result as `enter` does. `shorter` is the result of the search for that graph, whose
        explored graphs count as explored here.

        Raises `KeyboardInterrupt` if that search was interrupted.
        """
        if shorter.interrupted:
            raise KeyboardInterrupt
        self.explored += shorter.explored
        graph, derivation = rewritten_alike(self.best.graph, self.rules, shorter)
        self.enter(graph, derivation)

    def expand(self, most: int) -> None:
        """
        Price all rewrites of queued graphs, cheapest first, until `most` graphs were priced in all or none left is
        within `limits().alpha` times the incumbent.
        """
        large = self.best.plan.rows_before >= limits().rows_of_process
        with ForkedWorker(self._seconds, beside=large) as worker:
            while self._queue and len(self.seen) < most:
                seconds, _, graph, derivation = heapq.heappop(self._queue)
                if seconds > limits().alpha * self.best.seconds:
                    return
                rewrites = self._new_rewrites(graph, derivation)
                while (first := next(rewrites, None)) is not None:
                    # Another process prices the second.
                    second = next(rewrites, None) if worker.is_forked and len(self.seen) + 1 < most else None
                    answer = second and worker.ask_uncounted((second[0], limits().alpha * self.best.seconds))
                    self.enter(*first)
                    if second is not None:
                        self.enter(*second, answer=answer)
                    if len(self.seen) >= most:
                        return

    def _new_rewrites(
        self, graph: Graph, derivation: tuple[RuleApplication, ...]
    ) -> Iterator[tuple[Graph, tuple[RuleApplication, ...]]]:
        """Yield the rewrites of a graph that have not been priced yet, each with all that led to it."""
        known = {rule.name: rule for rule in self.rules}
        rewrites = ReplayIterator(_rewrites(graph, self.rules))
        for applied, after in self.memo.rewrites.setdefault(graph.outputs, rewrites):
            undone = any(_undoes(known[step.rule], derivation) for step in applied)
            if not undone and after.outputs not in self.seen:
                yield after, (*derivation, *applied)

    def with_shared_moves(self, alone: PricedGraph | None) -> list[PricedGraph]:
        """
        Return the incumbent and `alone`, each with the moves that several readers share charged once, fastest first.

        `alone` is the graph that is fastest on one device; None leaves it out. The incumbent wins ties.
        """
        ends = [self.best] if alone is None or alone is self.best else [self.best, alone]
        plans = [with_shared_moves(self.solver, end.graph, end.plan) for end in ends]
        found = [replace(end, seconds=plan.seconds, plan=plan) for end, plan in zip(ends, plans, strict=True)]
        return sorted(found, key=lambda f: f.seconds * (1 - 1e-9 * (f is found[0])))


def rewritten_alike(
    graph: Graph, rules: Sequence[Rule], shorter: JointPlan
) -> tuple[Graph, tuple[RuleApplication, ...]]:
    """
    Rewrite a serial graph as the search `shorter` rewrote a graph with fewer of its equal layers: apply the same of
    `rules`, in the same order, each wherever it matches. Return (the rewritten graph, the rewrites applied).
    """
    derivation: list[RuleApplication] = []
    known = {rule.name: rule for rule in rules}
    for name in dict.fromkeys(step.rule for step in shorter.derivation):
        applied, graph = _everywhere(graph, known[name], OpIndex(graph))
        derivation += applied
    return graph, tuple(derivation)


def one_device(machine: Machine) -> Machine:
    """Return a machine of a single device of `machine`'s kind, without links."""
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
        steps, after = _everywhere(graph, rule, index)
        if len(steps) > 1 or any("," in step.at for step in steps):
            yield steps, after
    for rule in matching:
        for place, after in rule.applications(graph, index=index):
            spend(limits().work_rebuild * nodes)
            yield [RuleApplication(rule.name, place)], after


OPPOSITE = {"split-of-matmul": "merge-matmuls", "split-of-matmul-nt": "merge-matmuls"}
"""
Rules that take apart what another puts together. Both in one derivation lead back to where it began, with weights that
are joined and cut in each step, as was found for Qwen3-30B-A3B, where memory is short.
"""


def _undoes(rule: Rule, derivation: Sequence[RuleApplication]) -> bool:
    """Return whether a rule is the opposite of one that a derivation has applied."""
    applied = {step.rule for step in derivation}
    return OPPOSITE.get(rule.name) in applied or any(OPPOSITE.get(name) == rule.name for name in applied)


def _everywhere(graph: Graph, rule: Rule, index: OpIndex) -> tuple[list[RuleApplication], Graph]:
    """Apply a rule as often as it matches at first: some rules make new matches for themselves for ever."""
    most = sum(1 for _ in rule.matches(graph, index=index))
    at, after = rule.everywhere(graph, most=most)
    spend(limits().work_rebuild * len(graph.nodes()) * (1 + len(at)))
    return [RuleApplication(rule.name, ", ".join(places)) for places in at], after
