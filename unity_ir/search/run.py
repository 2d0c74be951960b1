"""Run a search: a serial graph in, the best plan for a machine out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter

from unity_ir.budget import Budget, OutOfBudget, own_budget, within
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.micro_batches import micro_batch
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.bounds.axis_counts import bound, of_kernels
from unity_ir.search.choose.candidates import SimulatedPlans
from unity_ir.search.exact.shared_moves import SharedFactorGraphBuilder, without_free_moves
from unity_ir.search.exact.solver import Solver
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.exchange import most_rows
from unity_ir.search.in_time import in_time
from unity_ir.search.joint.best_first import Progress
from unity_ir.search.layouts.exchanged import exchanging
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import TIME
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.memory.lagrangian import MORE, Refused, needed, shortage_text, size_text
from unity_ir.search.offload import (
    ASKED,
    AUTO,
    at_host,
    check_offload,
    fastest_that_fits,
    least_seconds,
    may_offload,
)
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.recompute.chosen import check_kind
from unity_ir.search.recompute.fit import (
    bytes_needed,
    recomputed,
    same_plan,
    with_recompute_and_pieces,
    without_recompute,
)
from unity_ir.search.result import SearchResult
from unity_ir.search.strategies.by_hand import OnePlan
from unity_ir.search.strategies.joint import JointOptions
from unity_ir.search.strategy import OptionValue, SearchContext, make_options, strategy_named
from unity_ir.simulate.report import as_emitted, fastest_seconds, with_best_bucket


class DoesNotFit(UnityError):
    """
    Raised where the plan of the requested strategy needs more memory than a device of `machine` has; carries the
    `SearchResult` (`result`).
    """

    def __init__(self, message: str, result: SearchResult, machine: Machine):
        super().__init__(message)
        self.result = result
        self.machine = machine


def run(
    graph: Graph,
    machine: Machine,
    strategy: str = "joint",
    optimizer: Optimizer | None = None,
    options: Mapping[str, OptionValue] | None = None,
    progress: Progress | None = None,
    budget: Budget | None = None,
    micro_batches: int = 1,
    recompute: str | None = None,
    loss_pieces: str | None = None,
    stages: Stages | None = None,
    offload: str | None = None,
    known: float = inf,
) -> SearchResult:
    """
    Search for a plan: a parallel graph that computes what `graph` does, placed on the devices of `machine`.

    A parallel `graph` is made serial first (`erase`). `strategy` is a name in `search.strategy.all_strategies`,
    `options` are its options by name (`search.strategy.option_types`): `{"rules": "library"}` of joint, `{"seed": 3}`
    of mcmc. `optimizer` is the one the plan will be trained with, by default the graph's or else `Optimizer()`.
    `progress` is called with the number of candidates priced and the best seconds so far. If Ctrl-C or the end of
    `budget` (by default about 100 seconds of work) ends the search, the result is the best plan so far or else the
    fastest baseline that fits, and is marked `interrupted`.

    `micro_batches` is their number in a step: a plan is found for one, and the step runs it for each in turn
    (`search.in_time`). `recompute` is one of `search.recompute.chosen.KINDS`: for the strategies joint and sequential,
    which search within the memory, only `auto`, their default; the default of others is `none`. `loss_pieces` is the
    number of pieces in which a step makes its loss, or `auto`, for as few as make the plan fit: the default of joint
    and sequential; that of others is 1. With `stages` the plan is a pipeline of so many stages: the strategy plans one
    part of the machine, and that plan is cut (`with_stages` chooses all of it together); `micro_batches` must then be 2
    or more.

    `offload` says what rests in the memory of the host, one of `search.offload.KINDS`: nothing (`none`), the
    optimizer's state (`state`), between forward and backward what the one saves for the other (`activations`), both
    (`all`), or any of these where memory is short and it costs less than recompute (`auto`, the default of joint and
    sequential; that of others is `none`). Stages keep all of it on the devices.

    `known` is the number of seconds, as emitted, of the best plan known: of a slower one, where memory is short, no
    bound is computed.

    Raises `UnityError` for an unknown strategy or option, for a graph that already has its backward and for one that
    cannot be divided into so many micro-batches, or whose loss cannot be made in so many pieces, and `DoesNotFit` for a
    plan that does not fit the machine's memory.
    """
    offloaded = _offload(strategy, offload, stages)
    given = strategy, optimizer, options, progress, budget, micro_batches, recompute, loss_pieces, stages, known
    try:
        return _run(graph, machine, *given, offloaded, offloaded == AUTO)
    except (DoesNotFit, Refused):
        found = optimizer or graph.optimizer or Optimizer()
        if offloaded == AUTO and stages is None and may_offload(machine) and found.states:
            # With all state at the host, other layouts may fit.
            with suppress(UnityError):
                return _run(graph, machine, *given, "state", True)
        raise


def _run(
    graph: Graph,
    machine: Machine,
    strategy: str,
    optimizer: Optimizer | None,
    options: Mapping[str, OptionValue] | None,
    progress: Progress | None,
    budget: Budget | None,
    micro_batches: int,
    recompute: str | None,
    loss_pieces: str | None,
    stages: Stages | None,
    known: float,
    offloaded: str,
    is_compared: bool,
) -> SearchResult:
    """
    Search as `run` does, with a kind of offload, one of `search.offload.KINDS`, for the layouts found alone. With
    `is_compared`, these are compared with the same ones with more at the host.
    """
    chosen = strategy_named(strategy)
    if stages is not None:
        if micro_batches == 1:
            raise UnityError("search: stages of a pipeline run micro-batches; give micro_batches, 2 or more")
        stages.rank_of(micro_batches)
    kind, pieces = recompute_kind(strategy, recompute), _pieces(strategy, loss_pieces)
    if graph.updates:
        raise UnityError(f"func.func @{graph.name}: search before pcg-differentiate, not after it")
    given = optimizer or graph.optimizer
    optimizer = given or Optimizer()
    if offloaded in ASKED:
        _ = machine.host_link
    if offloaded in ("state", "all"):
        optimizer = optimizer.offloaded
    is_open = is_compared and stages is None and may_offload(machine)
    start = perf_counter()
    serial = replace(erase(graph), offload="state" if optimizer.at_host else "none")
    dims: Mapping[str, int] = sample_dims(serial) if micro_batches != 1 else {}
    if micro_batches != 1:
        serial = micro_batch(serial, dims, micro_batches)
    budget = budget or Budget()
    own = make_options(chosen, options or {})
    rows = most_rows(serial, machine, own.exchange, own.imbalance) if isinstance(own, JointOptions) else 0.0

    def search(machine: Machine) -> SearchResult:
        try:
            with within(budget):
                found = chosen.search(serial, machine, own, SearchContext(optimizer, progress, micro_batches, known))
        except KeyboardInterrupt:
            found = _at_hand(serial, machine, strategy, optimizer, budget)
        if budget.ended:
            with exchanging(rows):
                found = _ended(found, serial, machine, optimizer)
        return with_offload(found)

    def with_offload(found: SearchResult) -> SearchResult:
        plan = placed(found.graph)
        if offloaded not in ("activations", "all"):
            return replace(found, graph=plan)
        # Bounds are of plans whose values stay on the devices.
        return replace(found, graph=plan, cost=cost(plan, machine, optimizer), bound=None, proved=None)

    def placed(plan: Graph) -> Graph:
        """Return a plan with what was asked for at the host."""
        return at_host(plan, offloaded) if offloaded in ASKED else plan

    on = machine if stages is None else stages.part(machine)

    def rivals() -> list[Graph]:
        return [placed(plan) for plan, _ in _baselines(serial, on, optimizer)] if strategy == "joint" else []

    def again(plan: Graph, whole: Callable[[Graph], Graph] | None = None) -> Graph:
        found = fitted(plan, whole)
        if not is_open:
            return found
        own = partial(fitted, whole=whole)
        few = partial(recomputed, kind="attention", machine=on, optimizer=optimizer, whole=whole)
        step = whole or same_plan
        return least_seconds(found, plan, own, few if kind == "auto" else None, step, machine, optimizer)

    def fitted(plan: Graph, whole: Callable[[Graph], Graph] | None) -> Graph:
        found = with_recompute_and_pieces(plan, kind, pieces, on, optimizer, whole, on=machine)
        if stages is None or whole is None or kind != "auto":
            return found

        def need(plan: Graph) -> int:
            step = whole(plan)
            return needed(step, cost(step, machine, optimizer), optimizer)

        if need(found) <= machine.device.usable:
            return found
        # Where recompute is not enough, stages gather weights in every micro-batch, and again for its backward.
        return min(
            found,
            with_recompute_and_pieces(plan, kind, pieces, on, optimizer, whole, weights=True, on=machine),
            key=need,
        )

    with _seldom_collected():
        if micro_batches == 1:
            result = search(machine)
            plan = again(result.graph)
            if is_open and result.runner_up is not None and not result.interrupted:
                plan = fastest_that_fits(
                    [plan, again(placed(result.runner_up))],
                    bytes_needed(same_plan, machine, optimizer),
                    lambda plan: fastest_seconds(plan, machine, optimizer),
                    machine.device.usable,
                )
            if plan != result.graph:
                result = replace(result, graph=plan, cost=cost(plan, machine, optimizer), bound=None, proved=None)
            elif strategy in WITHIN_MEMORY and pieces is None and not result.interrupted:
                result = _with_loss_pieces(result, machine, optimizer)
            if strategy in WITHIN_MEMORY and result.bound is None and not result.interrupted:
                with exchanging(rows):
                    result = _bounded(result, machine, optimizer, known)
        else:
            is_made = isinstance(chosen, OnePlan)
            is_each = is_made and chosen.sums_each(own)
            result = in_time(
                search, serial, dims, micro_batches, machine, optimizer, not is_made, is_each, rivals, again, stages
            )
        result = replace(result, budget=budget)
    need = needed(result.graph, result.cost, optimizer)
    if need <= machine.device.usable and not result.interrupted:
        result = _with_best_bucket(result, machine, optimizer)
    if given is not None:
        result = replace(result, graph=replace(result.graph, optimizer=given))
    result = replace(result, seconds=perf_counter() - start)
    if result.cost.host_shortage:
        what = {"state": "the state takes", "activations": "activations take"}.get(result.graph.offload)
        said = f"offload: {what or 'state and activations take'} {size_text(result.cost.at_host)} of the host for "
        said += "each device, and "
        said += f"{machine.name} has {size_text(machine.host_link.memory)}; use more devices, or leave offload out"
        raise DoesNotFit(said, result, machine)
    if need > machine.device.usable:
        is_whole = kind == "auto" or micro_batches > 1
        advice = "" if is_whole else _with_recompute(result.graph, need, pieces, machine, optimizer)
        said = f"search: the plan found {shortage_text(need, machine.device)}; {advice}use {MORE}"
        raise DoesNotFit(said, result, machine)
    return result


def _with_best_bucket(result: SearchResult, machine: Machine, optimizer: Optimizer) -> SearchResult:
    """
    Return the result with the size of buckets with which its plan is fastest as emitted; as it is if that has no
    program, or if Ctrl-C ends the comparison, marked as interrupted.
    """
    try:
        return replace(result, graph=with_best_bucket(result.graph, machine, optimizer))
    except UnityError:
        return result
    except KeyboardInterrupt:
        return replace(result, interrupted=True)


def _bounded(result: SearchResult, machine: Machine, optimizer: Optimizer, known: float) -> SearchResult:
    """
    Return the result of a search that has put something at the host with a lower bound on all plans of its graph,
    whatever memory they take: what is at the host changes neither kernels nor moves between devices. Bounds are of
    plans that make the loss whole; others, and those slower than `known` seconds, are returned as they are.
    """
    plan = result.graph
    if plan.offload == "none" or plan.loss_pieces > 1:
        return result
    if known < inf and fastest_seconds(plan, machine, optimizer) * limits().faster > known:
        return result
    with own_budget():
        try:
            least, _ = bound(erase(plan), machine, optimizer, result.cost.time)
        except OutOfBudget:
            least = of_kernels(erase(plan), machine, optimizer)
    return replace(result, bound=min(least, result.cost.time))


def _with_loss_pieces(result: SearchResult, machine: Machine, optimizer: Optimizer) -> SearchResult:
    """
    Return the result of a search within the memory or, where it recomputes, its plan with the loss in pieces and as
    much less recompute, if that simulates faster: that has no bound, since bounds are of plans that make it whole.
    Plans of many operators are left as they are.
    """
    if result.graph.loss_pieces > 1 or not not_kept(result.graph):
        return result
    if len(result.cost.operators) > limits().rewritten_operators:
        return result
    plan = with_recompute_and_pieces(without_recompute(result.graph), "auto", None, machine, optimizer, weights=True)
    priced = cost(plan, machine, optimizer)
    fits = plan.loss_pieces > 1 and needed(plan, priced, optimizer) <= machine.device.usable
    now, other = (fastest_seconds(each, machine, optimizer) for each in (result.graph, plan))
    if not fits or other >= now * limits().faster:
        return result
    return replace(result, graph=plan, cost=priced, joint=None, bound=None, proved=None)


def _with_recompute(plan: Graph, need: int, pieces: int | None, machine: Machine, optimizer: Optimizer) -> str:
    """
    Return the beginning of advice: the bytes that a plan which needs `need` would need with recompute, and with its
    loss in pieces if that does not fit either, if fewer.
    """
    said = ""
    for options, count in (("recompute=auto", plan.loss_pieces), ("recompute=auto,loss_pieces=auto", None)):
        if count is None and pieces != 1:
            break
        less = with_recompute_and_pieces(plan, "auto", count, machine, optimizer)
        least = needed(less, cost(less, machine, optimizer), optimizer)
        if least < need:
            found = "fits into" if least <= machine.device.usable else "still needs"
            said, need = f"with {options} it {found} {size_text(least)}; or ", least
        if least <= machine.device.usable:
            break
    return said


WITHIN_MEMORY = ("joint", "sequential")
"""Strategies that search within the memory of a device, and decide what is recomputed."""


def recompute_kind(strategy: str, given: str | None) -> str:
    """
    Return the kind of recompute that a strategy's plans get. `given` is what the user asked for, one of
    `search.recompute.chosen.KINDS`; None means `auto` for joint and sequential, and `none` for other strategies. Raises
    `UnityError` for an unknown kind, and for joint and sequential for any but `auto`.
    """
    if given is None:
        return "auto" if strategy in WITHIN_MEMORY else "none"
    check_kind(given)
    if strategy in WITHIN_MEMORY and given != "auto":
        raise UnityError(
            f"search: {strategy} finds what to recompute by itself (auto); recompute={given} is for plans by hand"
        )
    return given


def _offload(strategy: str, given: str | None, stages: Stages | None) -> str:
    """
    Return the kind of offload that a strategy's plans get: as given, or `auto` for joint and sequential, and `none` for
    others. Raises `UnityError` for an unknown kind, and for state at the host with stages.
    """
    if given is None:
        return AUTO if strategy in WITHIN_MEMORY else "none"
    check_offload(given, stages is not None)
    return given


def _pieces(strategy: str, given: str | None) -> int | None:
    """
    Return the number of pieces of the loss, None for as few as make a plan fit. Raises `UnityError` for another text.
    """
    if given is None:
        return None if strategy in WITHIN_MEMORY else 1
    if given == "auto":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise UnityError(f"search: loss_pieces is {given!a}; it is a number of pieces, 1 or more, or auto")
    return int(given)


def run_in_time(
    graph: Graph,
    machine: Machine,
    strategy: str = "joint",
    optimizer: Optimizer | None = None,
    options: Mapping[str, OptionValue] | None = None,
    progress: Progress | None = None,
    budget: Budget | None = None,
    recompute: str | None = None,
    loss_pieces: str | None = None,
    stages: Stages | None = None,
    offload: str | None = None,
) -> SearchResult:
    """
    Search as `run` does, and choose the number of micro-batches, too: that with which the step is fastest as emitted,
    of those that fit. It tries 1, 2, 4, .. (with `stages` 2, 4, ..), as long as they divide the samples, until one that
    fits is slower than one that fit before. Each number is a search of its own; a `budget` is for all of them together,
    and by default each has one.

    Arguments and errors are those of `run`. If the search fails for every number tried, raises its error for the first.
    """
    best: tuple[float, SearchResult] | None = None
    failed: UnityError | None = None
    serial = erase(graph)
    dims = sample_dims(serial)
    # One micro-batch is no pipeline.
    count = first = 2 if stages is not None and _is_divisible(serial, dims, 2) else 1
    while count == first or _is_divisible(serial, dims, count):
        try:
            given = strategy, optimizer, options, progress, budget, count, recompute, loss_pieces, stages, offload
            found = run(graph, machine, *given)
            seconds = as_emitted(found.graph, machine, optimizer or graph.optimizer or Optimizer())[0]
        except UnityError as error:
            failed = failed or error
        else:
            if best is not None and seconds >= best[0]:
                return best[1]
            best = seconds, found
        count *= 2
    if best is not None:
        return best[1]
    assert failed is not None
    raise failed


def _is_divisible(serial: Graph, dims: Mapping[str, int], count: int) -> bool:
    """Return whether a step can run its batch in `count` micro-batches."""
    with suppress(UnityError):
        return bool(micro_batch(serial, dims, count))
    return False


@contextmanager
def _seldom_collected() -> Generator[None]:
    """Raise the garbage collector's threshold for the length of the `with` statement."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], limits().collected_objects) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _at_hand(serial: Graph, machine: Machine, strategy: str, optimizer: Optimizer, budget: Budget) -> SearchResult:
    """Return the fastest baseline that fits, for a search that found nothing. Raises `UnityError` if there is none."""
    best: SearchResult | None = None
    for plan, priced in _baselines(serial, machine, optimizer):
        if strategy in WITHIN_MEMORY:
            less = with_recompute_and_pieces(plan, "auto", None, machine, optimizer, weights=True)
            plan, priced = less, priced if less == plan else cost(less, machine, optimizer)
        fits = needed(plan, priced, optimizer) <= machine.device.usable
        if fits and (best is None or priced.time < best.cost.time):
            best = SearchResult(strategy, plan, priced, interrupted=True)
    if best is None:
        by, more = ("its budget ended", "; give it more") if budget.ended else ("interrupted", "")
        raise UnityError(f"search: {by} before {strategy} found a plan, and no baseline fits{more}")
    return best


def _baselines(serial: Graph, machine: Machine, optimizer: Optimizer) -> Iterator[tuple[Graph, PlanCost]]:
    """Yield the baselines, which are plans of `serial` itself, and their costs."""
    settings: dict[str, dict[str, OptionValue]] = {"data-parallel": {}, "fsdp": {}, "expert": {"rewrite": False}}
    for name, options in settings.items():
        baseline = strategy_named(name)
        with suppress(UnityError):
            found = baseline.search(serial, machine, make_options(baseline, options), SearchContext(optimizer))
            yield found.graph, found.cost


def _ended(result: SearchResult, serial: Graph, machine: Machine, optimizer: Optimizer) -> SearchResult:
    """
    Complete the result of a search whose budget ended: take a baseline that fits if it simulates faster; bound by
    kernels or a few messages if there is no bound.
    """
    solver = None if result.joint is None else result.joint.solver
    result = replace(result, interrupted=True)
    if result.strategy in ("joint", "sequential") and machine.devices > 1:
        emitted = SimulatedPlans(machine, optimizer)
        best = emitted.fastest([(result.graph, result.cost), *_baselines(serial, machine, optimizer)])
        if best[0] != result.graph:
            result = replace(result, graph=best[0], cost=best[1], derivation=(), bound=None, joint=None, proved=None)
    if result.bound or result.strategy not in ("joint", "sequential"):
        return result
    of = serial if result.joint is None else result.joint.rewritten
    if solver is None or solver.price != TIME:
        solver = Solver(Spaces(machine), optimizer) if len(machine.mesh.sizes) <= limits().exact_axes else None
    return replace(result, bound=max(of_kernels(of, machine, optimizer), _of_messages(of, solver)))


def _of_messages(graph: Graph, solver: Solver | None) -> float:
    """Return a lower bound in seconds by a few message passes, where every axis has its own role; 0 elsewhere."""
    if solver is None or not solver.spaces.axis_by_axis:
        return 0.0
    messages = Messages(SharedFactorGraphBuilder(solver, graph).problem())
    with within(Budget().part()), suppress(OutOfBudget):
        for _ in range(limits().ended_passes):
            messages.forward()
            messages.backward()
    return without_free_moves(max(messages.bound, 0.0), graph, solver.spaces.machine)
