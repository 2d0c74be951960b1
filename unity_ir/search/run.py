"""Strategies by name."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from unity_ir.budget import Budget, OutOfBudget, within
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer, erase
from unity_ir.rules.algebraic import selected
from unity_ir.rules.rule import Rule
from unity_ir.search.baselines.data_parallel import data_parallel, fsdp
from unity_ir.search.baselines.expert import expert
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.bounds.axis_counts import of_kernels
from unity_ir.search.choose.candidates import Emitted
from unity_ir.search.choose.winner import settling
from unity_ir.search.exact.shared_moves import SharedTerms, certain
from unity_ir.search.exact.solver import Solver
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.flexflow.mcmc import Settings, mcmc
from unity_ir.search.joint.best_first import Explored, JointPlan, Progress, joint
from unity_ir.search.joint.sequential import sequential
from unity_ir.search.layouts.axes import EXACT_AXES
from unity_ir.search.layouts.objective import TIME
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.memory.lagrangian import Refused, joint_within, lacking, needed
from unity_ir.search.result import SearchResult
from unity_ir.search.tofu.search import VARIANTS, tofu
from unity_ir.search.unity.search import Options, unity

STRATEGIES = ("joint", "unity", "sequential", "data-parallel", "fsdp", "expert", "mcmc", *VARIANTS, "random")


PASSES = 3
"""Passes of messages, there and back, for a bound where a budget has ended."""


class DoesNotFit(UnityError):
    """The plan of a strategy that was asked for by name does not fit the machine's memory; here it is."""

    def __init__(self, message: str, result: SearchResult, machine: Machine):
        super().__init__(message)
        self.result = result
        self.machine = machine


OBJECTS = 100_000
"""More objects than there were before Python looks for cycles of them, in a search."""


def run(
    graph: Graph,
    machine: Machine,
    strategy: str = "joint",
    optimizer: Optimizer | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    options: Options | None = None,
    rules: str = "common",
    budget: Budget | None = None,
) -> SearchResult:
    """
    Search for a parallel graph that computes what `graph` does, for a machine.

    A graph that is already parallel is searched from its erasure; `seed` is for the random strategy, `settings` are for
    mcmc, `options` for Unity's; `rules` says what joint, sequential and unity rewrite by, `library` being all that
    there are (`rules.algebraic.selected`). `optimizer` is what the plan will be trained with, by default
    what the graph says. Ctrl-C ends the search with the best plan so far, and so does `budget`, by default of so much
    work that no ordinary search is ended by it. Raises `UnityError` for an unknown
    strategy, a graph that already has its backward, and plans that do not fit the machine's memory.
    """
    if strategy not in STRATEGIES:
        raise UnityError(f"search: unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}")
    if graph.updates:
        raise UnityError(f"func.func @{graph.name}: search before pcg-differentiate, not after it")
    given = optimizer or graph.optimizer
    optimizer = given or Optimizer()
    start = perf_counter()
    serial = erase(graph)
    settings = settings or Settings(seed=seed)
    budget = budget or Budget()
    with _seldom_collected():
        try:
            by = selected(rules)
            with within(budget):
                result = _searched(serial, machine, strategy, optimizer, progress, settings, options, seed, by)
        except KeyboardInterrupt:
            result = _at_hand(serial, machine, strategy, optimizer, budget)
        if budget.ended:
            result = _ended(result, serial, machine, optimizer)
        result = replace(result, budget=budget)
    if given is not None:
        result = replace(result, graph=replace(result.graph, optimizer=given))
    result = replace(result, seconds=perf_counter() - start)
    need = needed(result.graph, result.cost, optimizer)
    if need > machine.device.memory:
        said = f"search: the plan found {lacking(need, machine.device)}; use more devices or a smaller batch"
        raise DoesNotFit(said, result, machine)
    return result


@contextmanager
def _seldom_collected() -> Generator[None]:
    """Tables and graphs live long and are seldom in cycles: looking for those after every few objects finds nothing."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _searched(
    serial: Graph,
    machine: Machine,
    strategy: str,
    optimizer: Optimizer,
    progress: Progress | None,
    settings: Settings,
    options: Options | None,
    seed: int,
    rules: Sequence[Rule],
) -> SearchResult:
    """The result of a strategy. Raises `KeyboardInterrupt` where Ctrl-C comes before there is a plan."""
    if strategy == "mcmc":
        best = mcmc(serial, machine, optimizer, settings, progress)
        explored = sum(chain.proposed for chain in best.chains)
        interrupted = any(chain.interrupted for chain in best.chains)
        priced = cost(best.graph, machine, optimizer)
        return SearchResult(strategy, best.graph, priced, explored=explored, interrupted=interrupted)
    if strategy == "unity":
        chosen = unity(serial, machine, rules, optimizer, options, progress)
        priced = cost(chosen.graph, machine, optimizer)
        return SearchResult(strategy, chosen.graph, priced, chosen.derivation, explored=chosen.explored)
    if strategy not in ("joint", "sequential"):
        parallel = _plan(serial, machine, strategy, optimizer, seed)
        return SearchResult(strategy, parallel, cost(parallel, machine, optimizer))

    def algebra_first() -> JointPlan:
        found = sequential(serial, machine, rules, optimizer, progress=progress)
        again = partial(joint, found.rewritten, machine, (), optimizer)
        return joint_within(found, found.rewritten, lambda solver: again(solver=solver))

    with settling(strategy, serial, machine, optimizer) as settle:
        if strategy == "sequential":
            return settle.result(algebra_first())
        search = partial(joint, serial, machine, rules, optimizer, progress=progress, explored=Explored())
        try:
            found = joint_within(search(), serial, lambda solver: search(solver=solver))
        except Refused as refused:
            return settle.instead(refused)
        result = settle.result(found)
        if found.price > 0 and not result.interrupted:
            # Where memory is short, rewrites are looked for at one price of it: what is fastest on one device may win.
            try:
                result = settle.faster(result, settle.result(algebra_first()))
            except Refused:
                pass
            except KeyboardInterrupt:
                result = replace(result, interrupted=True)
        return result


def _at_hand(serial: Graph, machine: Machine, strategy: str, optimizer: Optimizer, budget: Budget) -> SearchResult:
    """The fastest baseline that fits, for a search that has found nothing yet. Raises `UnityError` if there is none."""
    best: SearchResult | None = None
    for plan, priced in _baselines(serial, machine, optimizer):
        fits = needed(plan, priced, optimizer) <= machine.device.memory
        if fits and (best is None or priced.time < best.cost.time):
            best = SearchResult(strategy, plan, priced, interrupted=True)
    if best is None:
        by, more = ("its budget ended", "; give it more") if budget.ended else ("interrupted", "")
        raise UnityError(f"search: {by} before {strategy} found a plan, and no baseline fits{more}")
    return best


def _baselines(serial: Graph, machine: Machine, optimizer: Optimizer) -> Iterator[tuple[Graph, PlanCost]]:
    """The plans that are made at once, and what they cost."""
    for name in ("data-parallel", "fsdp", "expert"):
        try:
            plan = _plan(serial, machine, name, optimizer, 0)
        except UnityError:
            continue
        yield plan, cost(plan, machine, optimizer)


def _ended(result: SearchResult, serial: Graph, machine: Machine, optimizer: Optimizer) -> SearchResult:
    """
    The result of a search whose budget ended: a baseline that fits, where that is faster as emitted, as it would have
    been compared with at the end; a bound by kernels alone, where none was found.
    """
    solver = None if result.joint is None else result.joint.solver
    result = replace(result, interrupted=True)
    if result.strategy in ("joint", "sequential") and machine.devices > 1:
        emitted = Emitted(machine, optimizer)
        best = emitted.fastest([(result.graph, result.cost), *_baselines(serial, machine, optimizer)])
        if best[0] != result.graph:
            result = replace(result, graph=best[0], cost=best[1], derivation=(), bound=None, joint=None, proved=None)
    if result.bound or result.strategy not in ("joint", "sequential"):
        return result
    of = serial if result.joint is None else result.joint.rewritten
    if solver is None or solver.price != TIME:
        solver = Solver(Spaces(machine), optimizer) if len(machine.mesh.sizes) <= EXACT_AXES else None
    return replace(result, bound=max(of_kernels(of, machine, optimizer), _of_messages(of, solver)))


def _of_messages(graph: Graph, solver: Solver | None) -> float:
    """A bound by a few messages, where every axis has a role of its own; 0 elsewhere."""
    if solver is None or not solver.spaces.axis_by_axis:
        return 0.0
    messages = Messages(SharedTerms(solver, graph).problem())
    with within(Budget().part()), suppress(OutOfBudget):
        for _ in range(PASSES):
            messages.forward()
            messages.backward()
    return certain(max(messages.bound, 0.0), graph, solver.spaces.machine)


def _plan(serial: Graph, machine: Machine, strategy: str, optimizer: Optimizer, seed: int) -> Graph:
    """The plan of a strategy that makes one at once."""
    match strategy:
        case "random":
            return sample(serial, machine, seed)
        case "data-parallel":
            return data_parallel(serial, machine)
        case "fsdp":
            return fsdp(serial, machine)
        case "expert":
            return expert(serial, machine, optimizer)
        case _:
            return tofu(serial, machine, strategy)
