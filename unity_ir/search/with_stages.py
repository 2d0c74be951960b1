"""
Run a search that may make its plan a pipeline: joint searches choose stages, what is in each, micro-batches and the
schedule together, and decide whether a pipeline is faster than a plan of the whole machine at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Literal

from unity_ir.budget import Budget, OutOfBudget, within
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.layers import shortened
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.rules.algebraic import selected
from unity_ir.rules.derivation import RuleApplication
from unity_ir.rules.rule import Rule
from unity_ir.search.exact.axis_groups import solve
from unity_ir.search.exchange import exchanging_rows, most_rows
from unity_ir.search.joint.best_first import JointPlan, Progress, joint, rewritten_alike
from unity_ir.search.layouts.exchanged import exchanging
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.offload import ASKED, check_offload
from unity_ir.search.pipeline.choice import BoundedFamily, Pair, PipelineBounds, PipelineChoice, best_pipeline, bound
from unity_ir.search.pipeline.equal import PipelineSearch
from unity_ir.search.pipeline.orders import ScheduleKind
from unity_ir.search.pipeline.placed import pipeline_step
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.recompute.least import LeastUnstaged, least_unstaged
from unity_ir.search.result import SearchResult
from unity_ir.search.run import recompute_kind, run, run_in_time
from unity_ir.search.strategies.joint import JointOptions
from unity_ir.search.strategy import OptionValue, make_options, strategy_named
from unity_ir.search.throughput import most_throughput
from unity_ir.search.worker import ForkedWorker
from unity_ir.simulate.report import as_emitted

RECOMPUTES = 1.1
"""
Pipelines are looked for before plans without stages where these recompute so much that they take at least this many
times their kernels: stages hold fewer micro-batches at a time, and recompute less.
"""

MOVES = 2.0
"""
So they are where the fastest plan without stages that is found, were memory unlimited, takes this many times all
kernels: it moves at least as long as it computes, and stages, on a part of the machine each, move less.
"""

NEAR = 0.99
"""
Plans without stages are not looked for if all of them take more than this part of a pipeline's seconds, every kernel
one by one and every move waited for.
"""

FAR = 1.1
"""
Nor are they if the fastest found, were memory unlimited, and what all of them recompute to fit take this many times a
pipeline's seconds: rewrites and moves that readers share make up for less.
"""

Asked = Stages | Literal["auto", "none"] | None
"""Stages that are asked for: so many, as many as are fastest, none; None leaves it to the search."""


def run_with_stages(
    graph: Graph,
    machine: Machine,
    strategy: str = "joint",
    optimizer: Optimizer | None = None,
    options: Mapping[str, OptionValue] | None = None,
    progress: Progress | None = None,
    budget: Budget | None = None,
    micro_batches: int | Literal["auto"] = 1,
    recompute: str | None = None,
    loss_pieces: str | None = None,
    stages: Asked = None,
    offload: str | None = None,
) -> SearchResult:
    """
    Search for a plan as `search.run.run` does, or with `micro_batches` `auto` as `run_in_time`; it may be a pipeline.

    `stages` is a number of stages and their schedule (`Stages`), `auto` for as many stages as are fastest or none, or
    `none`. None means `auto` for the strategy joint with large models on several nodes, else `none`. The other
    arguments are those of `run`.

    The strategy joint chooses which operators are in each stage, the schedule unless it is named, and, where
    `micro_batches` is 1 or `auto`, their number. Its pipelines make their loss in one piece: with `loss_pieces` above
    1, `auto` finds none, and a number of stages is refused. Other strategies, and schedules whose steps overlap, plan
    one part of the machine and cut that plan into the stages asked for. With `auto`, the strategy unity does as its
    paper: pipelines whose steps overlap, for the least time from step to step (`search.throughput`).

    Raises `UnityError` as `run` does, for `auto` of strategies other than joint and unity, and where the budget ends
    before the pipeline asked for is found.
    """
    budget = budget or Budget()
    given = strategy, optimizer, options, progress, budget
    if strategy == "unity" and stages == "auto":
        return _unity(graph, machine, given, micro_batches, recompute, loss_pieces, offload)
    if strategy != "joint" or (isinstance(stages, Stages) and not stages.is_searched):
        if stages == "auto":
            raise UnityError(f"search: stages are chosen by joint and unity, not by {strategy}; give their number")
        asked = stages if isinstance(stages, Stages) else None
        if micro_batches == "auto":
            return run_in_time(graph, machine, *given, recompute, loss_pieces, asked, offload)
        return run(graph, machine, *given, micro_batches, recompute, loss_pieces, asked, offload)
    own = make_options(strategy_named(strategy), options or {})
    assert isinstance(own, JointOptions)
    recompute_kind(strategy, recompute)
    in_pieces = loss_pieces not in (None, "1", "auto")
    if offload is not None:
        check_offload(offload, stages not in (None, "none"))
    if in_pieces and isinstance(stages, Stages):
        raise UnityError(
            f"search: joint makes the loss of a pipeline whole, not in {loss_pieces} pieces; leave loss_pieces out, or "
            "use degrees with stages"
        )
    pipelines = _Pipelines(graph, machine, own, optimizer, None if micro_batches in (1, "auto") else micro_batches)
    if isinstance(stages, Stages):
        try:
            with within(budget):
                found = pipelines.fastest(stages)
        except OutOfBudget:
            raise UnityError("search: its budget ended before a pipeline was found; give it more") from None
        assert found is not None
        return replace(found, budget=budget)
    is_open = (
        not in_pieces
        and offload not in ASKED
        and (stages == "auto" or (stages is None and _may_be_pipeline(graph, machine)))
    )
    pipeline: SearchResult | None = None
    half = Budget(budget.work / 2, budget.deadline)
    if is_open and micro_batches == 1:
        least = least_unstaged(pipelines.graph, machine, pipelines.optimizer)
        recomputes = least.seconds > RECOMPUTES * least.kernels
        if recomputes or (pipelines.is_large and pipelines.without_limit(None) >= MOVES * least.kernels):
            with ForkedWorker(pipelines.without_limit, beside=pipelines.is_large) as worker:
                seconds = worker.ask(None)
                # The other half is left to plans without stages, should pipelines take more.
                with suppress(OutOfBudget, UnityError), within(half):
                    pipeline = pipelines.faster_than(None)
                budget.done += half.done
                if pipeline is not None:
                    with suppress(OutOfBudget), within(budget):
                        if are_unstaged_slower(least, pipeline, seconds):
                            return replace(pipeline, budget=budget)
    failed: UnityError | None = None
    result: SearchResult | None = None
    try:
        if micro_batches == "auto":
            result = run_in_time(graph, machine, *given, recompute, loss_pieces, offload=offload)
        else:
            known = inf if pipeline is None else pipelines.emitted(pipeline)
            result = run(graph, machine, *given, micro_batches, recompute, loss_pieces, offload=offload, known=known)
    except UnityError as error:
        if not is_open:
            raise
        failed = error  # a pipeline may fit where nothing else does
    if pipeline is not None:
        if result is not None and not pipelines.is_faster(pipeline, result):
            pipeline = None
    elif is_open and not half.ended and not (result is not None and result.interrupted):
        with suppress(OutOfBudget, KeyboardInterrupt), within(budget):
            pipeline = pipelines.faster_than(result)
    result = result if pipeline is None else replace(pipeline, budget=budget)
    if result is None:
        assert failed is not None
        raise failed
    return result


def _unity(
    graph: Graph,
    machine: Machine,
    given: tuple[str, Optimizer | None, Mapping[str, OptionValue] | None, Progress | None, Budget],
    micro_batches: int | Literal["auto"],
    recompute: str | None,
    loss_pieces: str | None,
    offload: str | None,
) -> SearchResult:
    """
    Return the fastest of Unity's plan of the whole machine and its pipelines, from step to step. Raises `UnityError`
    where neither fits.
    """
    optimizer = given[1] or graph.optimizer or Optimizer()

    def seconds(found: SearchResult) -> float:
        return as_emitted(found.graph, machine, optimizer)[0]

    def pipeline(stages: Stages, count: int) -> SearchResult:
        return run(graph, machine, *given, count, recompute, loss_pieces, stages)

    start = perf_counter()
    failed: UnityError | None = None
    result: SearchResult | None = None
    try:
        result = run(graph, machine, *given, 1, recompute, loss_pieces, offload=offload)
    except UnityError as error:
        failed = error
    count = None if micro_batches in (1, "auto") else micro_batches
    other = most_throughput(graph, machine, pipeline, seconds, count)
    if other is not None and (result is None or seconds(other) < seconds(result) * limits().faster):
        result = other
    if result is None:
        assert failed is not None
        raise failed
    return replace(result, seconds=perf_counter() - start)


class _Pipelines:
    """Searches for pipelines of a graph, in a number of micro-batches; None leaves that open."""

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        options: JointOptions,
        optimizer: Optimizer | None,
        micro_batches: int | None,
    ):
        if graph.updates:
            raise UnityError(f"func.func @{graph.name}: search before pcg-differentiate, not after it")
        self.graph = erase(graph)
        self.machine = machine
        self.options = options
        self.rules = selected(options.rules)
        self.given = optimizer or graph.optimizer
        self.optimizer = self.given or Optimizer()
        self.micro_batches = micro_batches
        self.rows = most_rows(self.graph, machine, options.exchange, options.imbalance)

    def faster_than(self, result: SearchResult | None) -> SearchResult | None:
        """
        Return a pipeline that is faster as emitted than a plan, or than none, and fits; None where none is found. Where
        none fits that may exchange rows, one is looked for whose rows are gathered.
        """
        seconds = inf if result is None else self.emitted(result)
        for rows in dict.fromkeys((self.rows, 0.0)):
            try:
                with exchanging(rows):
                    other = self._fastest(None, seconds)
            except UnityError:
                continue  # no parts, no micro-batches, or none that fits
            if other is None:
                return None
            if needed(other.graph, other.cost, self.optimizer) <= self.machine.device.usable:
                if self.rows and not rows:
                    other = replace(other, family=f"{other.family}, rows of experts gathered")
                return other if result is None or self.is_faster(other, result) else None
        return None

    @property
    def is_large(self) -> bool:
        """Whether work on the graph is worth a process of its own, where a processor is free."""
        return _is_large(self.graph)

    def without_limit(self, nothing: None) -> float:
        """Return the seconds of the best plan without stages, were memory unlimited."""
        return self._without_limit

    @cached_property
    def _without_limit(self) -> float:
        with exchanging(self.rows):
            return solve(self.graph, self.machine, self.optimizer)[1].seconds

    def is_faster(self, pipeline: SearchResult, result: SearchResult) -> bool:
        """Return whether a pipeline is faster, as emitted, than another plan."""
        return self.emitted(pipeline) < self.emitted(result) * limits().faster

    def emitted(self, result: SearchResult) -> float:
        """Return the seconds of a result's plan as emitted."""
        return as_emitted(result.graph, self.machine, self.optimizer)[0]

    def fastest(self, stages: Stages | None, than: float = inf) -> SearchResult | None:
        """Return what `_fastest` does, of pipelines that may exchange rows of experts."""
        with exchanging(self.rows):
            return self._fastest(stages, than)

    def _fastest(self, stages: Stages | None, than: float) -> SearchResult | None:
        """
        Return the fastest pipeline found of the graph as it is and, with the same stages and micro-batches, of it
        rewritten as a few of its layers are best on one part of the machine; its rows of experts exchanged, if that is
        faster as emitted. None if none takes less than `than` seconds. Without `stages` all of them are tried; they may
        leave the schedule open.
        """
        start = perf_counter()
        parts, schedule = None, None
        if stages is not None:
            parts, schedule = stages.pipeline.ranks, (stages.order, stages.pipeline.chunks)
        search = PipelineSearch(self.graph, self.machine, self.optimizer)
        bounds = PipelineBounds(search, parts, self.micro_batches)
        is_large = self.is_large
        rewriting = _Rewriting(search, self.rules, schedule)
        with ForkedWorker(bounds.below, bounds.ahead(), beside=is_large) as bounding, ExitStack() as stack:
            asked: list[_Asked] = []

            def expecting(pair: Pair) -> None:
                worker = stack.enter_context(ForkedWorker(rewriting.helps, beside=is_large))
                asked.append(_Asked(worker, pair, worker.ask((pair, 0.0))))

            choice = best_pipeline(search, parts, self.micro_batches, schedule, than, expecting)
            if choice is None:
                return None
            bounded = bounding.ask(BoundedFamily.of(choice.plan))
            (first,) = asked
            question = (choice.plan.parts, choice.plan.micro_batches), choice.plan.makespan * limits().faster
            answer = first.worker.ask(question)
            step, priced = self._priced(choice, is_large)
            try:
                if question[0] == first.pair:
                    first.expected()  # counts its work
                explored, is_better = answer()
            except OutOfBudget:
                explored, is_better = 0, False
            derivation: tuple[RuleApplication, ...] = ()
            if is_better:
                other, derivation = rewriting.faster(*question)
                assert other is not None, "a second search finds what the first did"
                choice = other
                step, priced = self._priced(choice, is_large)
                least, family = bound(choice, parts, self.micro_batches)
            else:
                least, family = bounded()
        found = SearchResult(
            "joint", step, priced, derivation, least, family=family, waited=choice.plan.makespan, explored=explored
        )
        if self.options.exchange:
            found = exchanging_rows(found, self.machine, self.optimizer, self.options.imbalance)
        return replace(found, seconds=perf_counter() - start)

    def _priced(self, choice: PipelineChoice, is_large: bool) -> tuple[Graph, PlanCost]:
        """Return the step of a pipeline with its cost; of a large one, remember its seconds as emitted for later."""
        step = replace(pipeline_step(choice.plan, self.machine, choice.search.dims), optimizer=self.given)
        priced = cost(step, self.machine, self.optimizer)
        if is_large:
            as_emitted(step, self.machine, self.optimizer)  # beside the bound
        return step, priced


Rewritten = tuple[PipelineChoice | None, tuple[RuleApplication, ...]]
"""A pipeline of a rewritten graph, if it is fast enough, and the rewrites."""


@dataclass(frozen=True)
class _Asked:
    """A worker that rewrites, the pair that was expected to be chosen, and its answer for that."""

    worker: ForkedWorker[tuple[Pair, float], tuple[int, bool]]
    pair: Pair
    expected: Callable[[], tuple[int, bool]]


@dataclass(frozen=True)
class _Rewriting:
    """
    Rewrites the graph of a search for pipelines as a few of its layers are best on one part of the machine, and looks
    for pipelines of what that gives with the same numbers of parts and micro-batches.
    """

    search: PipelineSearch
    rules: tuple[Rule, ...]
    schedule: ScheduleKind | None
    _few: dict[Pair, JointPlan] = field(default_factory=dict[Pair, JointPlan])
    """The plans of a few layers, by numbers of parts and micro-batches."""
    _found: dict[tuple[Pair, float], Rewritten] = field(default_factory=dict[tuple[Pair, float], Rewritten])
    """What `faster` has returned, by its arguments."""

    def helps(self, question: tuple[Pair, float]) -> tuple[int, bool]:
        """
        Return how many graphs were explored, and whether a pipeline of a rewritten graph takes less than so many
        seconds. At 0 seconds none is looked for, but the next answer comes sooner.
        """
        pair, most = question
        explored = self._best(pair).explored
        return explored, most > 0 and self.faster(pair, most)[0] is not None

    def faster(self, pair: Pair, most: float) -> Rewritten:
        """
        Return a pipeline of a rewritten graph that takes less than `most` seconds, or None, and the rewrites. Memoised.
        """
        if (pair, most) not in self._found:
            of, other = self.search, None
            rewritten, derivation = rewritten_alike(of.graph, self.rules, self._best(pair))
            if derivation:
                search = PipelineSearch(rewritten, of.machine, of.optimizer)
                other = best_pipeline(search, *pair, self.schedule, faster_than=most)
            self._found[pair, most] = other, derivation
        return self._found[pair, most]

    def _best(self, pair: Pair) -> JointPlan:
        if pair not in self._few:
            of, (_, micro_batches) = self.search, pair
            small = of.small(micro_batches)
            short = shortened(small, limits().rewritten_layers) or small
            self._few[pair] = joint(short, of.solver(*pair).spaces.machine, self.rules, of.optimizer)
        return self._few[pair]


def are_unstaged_slower(least: LeastUnstaged, pipeline: SearchResult, without_limit: Callable[[], float]) -> bool:
    """
    Return whether the search may leave out plans without stages, whose lower bounds are `least`: the bound is above
    `NEAR` of the pipeline's seconds, or the plan found `without_limit` of memory takes `FAR` times as long.
    """
    assert pipeline.waited is not None
    if least.seconds >= NEAR * pipeline.waited:
        return True
    return without_limit() + least.seconds - least.kernels >= FAR * pipeline.waited


def _may_be_pipeline(graph: Graph, machine: Machine) -> bool:
    """
    Return whether joint searches look for pipelines unasked: of large models on several nodes. Elsewhere stages hardly
    ever pay, and looking for them takes as long as the rest.
    """
    is_cluster = len(machine.levels) > 1 and machine.levels[0].size > 1
    return is_cluster and _is_large(graph)


def _is_large(graph: Graph) -> bool:
    return sum(node.is_compute for node in graph.nodes()) > limits().rewritten_operators
