"""Strategies by name."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer, Value, erase
from unity_ir.pcg.layout import Layout
from unity_ir.pcg.recompute import not_kept
from unity_ir.rules.algebraic import selected
from unity_ir.rules.rule import Rule
from unity_ir.search.aside import Aside
from unity_ir.search.branches import apart
from unity_ir.search.counted import Bounds, Known, bounded
from unity_ir.search.data_parallel import data_parallel, fsdp
from unity_ir.search.expert import expert
from unity_ir.search.joint import Explored, JointPlan, Progress, joint
from unity_ir.search.mcmc import Settings, mcmc
from unity_ir.search.memory import Refused, joint_within, needed
from unity_ir.search.portfolio import Emitted, Hands, Offer, Plan
from unity_ir.search.price import Price
from unity_ir.search.realise import placed, realise
from unity_ir.search.result import SearchResult
from unity_ir.search.roles import EXACT_AXES
from unity_ir.search.sample import sample
from unity_ir.search.sequential import sequential
from unity_ir.search.spread import spread
from unity_ir.search.tables import kernels_found
from unity_ir.search.tofu import VARIANTS, tofu
from unity_ir.search.unity import Options, unity

HIDDEN = (0.15, 0.3, 0.5)
"""Parts of what moves weights and their gradients take, in plans for programs that overlap it."""

SMALL = 120
"""Operators of graphs for which the plan of the graph that is fastest on one device is looked at as closely."""

STRATEGIES = ("joint", "unity", "sequential", "data-parallel", "fsdp", "expert", "mcmc", *VARIANTS, "random")


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
) -> SearchResult:
    """
    Search for a parallel graph that computes what `graph` does, for a machine.

    A graph that is already parallel is searched from its erasure; `seed` is for the random strategy, `settings` are for
    mcmc, `options` for Unity's; `rules` says what joint, sequential and unity rewrite by, `library` being all that
    there are (`rules.algebraic.selected`). `optimizer` is what the plan will be trained with, by default
    what the graph says. Ctrl-C ends the search with the best plan so far. Raises `UnityError` for an unknown
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
    by = selected(rules)
    with _seldom_collected():
        try:
            result = _searched(serial, machine, strategy, optimizer, progress, settings, options, seed, by)
        except KeyboardInterrupt:
            result = _at_hand(serial, machine, strategy, optimizer)
    if given is not None:
        result = replace(result, graph=replace(result.graph, optimizer=given))
    result = replace(result, seconds=perf_counter() - start)
    need = needed(result.graph, result.cost, optimizer)
    over = need - machine.device.memory
    if over > 0:
        raise UnityError(
            f"search: the plan found needs {need / 1e9:.2f} GB per device, "
            f"{over / 1e9:.2f} GB more than {machine.device.name} has; use more devices or a smaller batch"
        )
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
    bounds, hands = Bounds(machine, optimizer), Hands(machine, optimizer)
    large = len(machine.mesh.sizes) > EXACT_AXES
    with ExitStack() as stack:
        by_hand = stack.enter_context(Aside(hands, beside=large))
        as_it_was = by_hand.ask((serial, True)) if strategy == "joint" else None
        if large:
            # What both processes need is found before there are two.
            kernels_found(serial)
        bounding = stack.enter_context(Aside(bounds, bounds.ahead(serial), beside=large))
        beside = _Beside(Emitted(machine, optimizer), by_hand, bounding)
        if strategy == "joint":
            search = partial(joint, serial, machine, rules, optimizer, progress=progress, explored=Explored())
            try:
                found = joint_within(search(), serial, lambda solver: search(solver=solver))
            except Refused as refused:
                return _by_hand_instead(refused, serial, beside)
        else:
            found = sequential(serial, machine, rules, optimizer, progress=progress)
            again = partial(joint, found.rewritten, machine, (), optimizer)
            found = joint_within(found, found.rewritten, lambda solver: again(solver=solver))
        result = _settled(strategy, found, machine, beside)
        try:
            if not result.interrupted:
                result = _with_rival(result, found, machine, beside)
            if as_it_was is not None and result.derivation and not result.interrupted:
                result = _as_it_was(result, serial, as_it_was(), beside)
        except KeyboardInterrupt:
            result = replace(result, interrupted=True)
    return result


@dataclass(frozen=True)
class _Beside:
    """What helps to settle on a plan; some of it in other processes."""

    emitted: Emitted
    by_hand: Aside[tuple[Graph, bool], list[Offer]]
    bounding: Aside[Known, tuple[float, Graph | None]]


def _by_hand_instead(refused: Refused, serial: Graph, beside: _Beside) -> SearchResult:
    """The fastest plan by hand that fits, where the search found none. Raises `Refused` if there is none."""
    offers = beside.by_hand.ask((serial, False))()
    if not offers:
        raise refused
    best = beside.emitted.plan(min(offers, key=lambda o: o.emitted))
    _, _, bound = bounded(best, beside.bounding.ask(Known(serial, best[1].time))(), beside.emitted.optimizer)
    return SearchResult("joint", *best, (), bound)


def _with_rival(result: SearchResult, found: JointPlan, machine: Machine, beside: _Beside) -> SearchResult:
    """The result, unless the graph that is fastest on one device has a plan that is faster as emitted."""
    rival, emitted = found.rival if found.price == 0 else None, beside.emitted
    if rival is None:
        return result
    now, other = (result.graph, result.cost), (rival.graph, cost(rival.graph, machine, emitted.optimizer))
    if emitted.fastest([now, other]) is now and len(result.cost.operators) > SMALL:
        return result
    settled = _settled(result.strategy, rival, machine, beside)
    better = emitted.fastest([now, (settled.graph, settled.cost)]) is not now
    return replace(settled if better else result, explored=result.explored, interrupted=settled.interrupted)


def _as_it_was(result: SearchResult, serial: Graph, offers: Sequence[Offer], beside: _Beside) -> SearchResult:
    """The result, unless a plan by hand of the graph without rewrites is faster as emitted."""
    emitted, now = beside.emitted, (result.graph, result.cost)
    best = emitted.fastest([now], offers)
    if best is now:
        return result
    least = emitted.plan(min(offers, key=lambda o: o.seconds))
    found = beside.bounding.ask(Known(serial, least[1].time))()
    plan, priced, bound = bounded(least, found, emitted.optimizer)
    proved = None if plan is best[0] else priced
    return SearchResult(result.strategy, *best, (), bound, result.explored, proved=proved)


def _settled(strategy: str, found: JointPlan, machine: Machine, beside: _Beside) -> SearchResult:
    """
    The result with its bound: of what was found and the plans by hand, the fastest as emitted, and with branches on
    parts of the machine, if it is faster so.
    """
    emitted = beside.emitted
    optimizer = emitted.optimizer
    own = found.graph, cost(found.graph, machine, optimizer)
    result = SearchResult(strategy, *own, found.derivation, found.bound, found.explored, interrupted=found.interrupted)
    result = replace(result, joint=found)
    if found.interrupted or machine.devices == 1:
        return result
    try:
        bounding = None
        if found.bound is None:
            bounding = beside.bounding.ask(Known(found.rewritten, own[1].time, own[1].memory_bytes, found.price))
        by_hand = beside.by_hand.ask((found.rewritten, False))
        others = [own, *_hidden(found, machine, optimizer)]
        for plan in others:
            emitted.seconds(plan)
        offers = by_hand()
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


def _in_parts(plan: Plan, is_own: bool, found: JointPlan, machine: Machine, emitted: Emitted) -> Plan:
    """A plan (`is_own`: the one `found`), or a faster one with operators side by side or branches on parts."""
    if not_kept(plan[0]):
        return plan
    rests = relays = dict[Value, Layout]()
    if is_own:
        _, rests, relays = placed(found.rewritten, found.plan, found.solver)
    beside = spread(found.rewritten, machine, emitted.optimizer, plan[0])
    branches = apart(found.rewritten, machine, emitted.optimizer, plan[0], (rests, relays))
    return emitted.fastest([plan, *(p for p in (beside, branches) if p is not None)])


def _hidden(found: JointPlan, machine: Machine, optimizer: Optimizer) -> Iterator[Plan]:
    """
    The fastest plans if parts of what moves weights and their gradients take cost nothing, being overlapped; where they
    are others than `found`.
    """

    def fastest(part: float) -> Graph:
        solver = found.solver.at(Price(hidden=part))
        return realise(found.rewritten, solver.solve(found.rewritten), solver)

    def between(low: Graph, parts: Sequence[float], high: Graph) -> list[Graph]:
        """Of parts between those of which two plans are: what a plan takes is linear in the part that is hidden."""
        if not parts or low == high:
            return []
        middle = fastest(parts[-1])
        return [*between(low, parts[:-1], middle), middle]

    if found.price == 0:
        *parts, most = HIDDEN
        last = fastest(most)
        for plan in dict.fromkeys([*between(found.graph, parts, last), last]):
            if plan != found.graph:
                yield plan, cost(plan, machine, optimizer)


def _at_hand(serial: Graph, machine: Machine, strategy: str, optimizer: Optimizer) -> SearchResult:
    """The fastest baseline that fits, for a search that has found nothing yet. Raises `UnityError` if there is none."""
    best: SearchResult | None = None
    for name in ("data-parallel", "fsdp", "expert"):
        try:
            plan = _plan(serial, machine, name, optimizer, 0)
        except UnityError:
            continue
        priced = cost(plan, machine, optimizer)
        fits = needed(plan, priced, optimizer) <= machine.device.memory
        if fits and (best is None or priced.time < best.cost.time):
            best = SearchResult(strategy, plan, priced, interrupted=True)
    if best is None:
        raise UnityError(f"search: interrupted before {strategy} found a plan, and no baseline fits")
    return best


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
