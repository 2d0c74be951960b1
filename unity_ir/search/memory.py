"""
The fastest choice for a graph among those that fit a device's memory.

    max over l >= 0 of  ( min over choices of seconds + l * bytes )  -  l * limit

is a lower bound on the seconds of all choices that fit (Lagrange; Everett, 1963). The minimum is what the exact search
finds. As a function of l it is concave, of one line for each choice: the next l to try is where the lines of a choice
that fits and of one that does not cross (Dinkelbach). The choices met on the way, and those between them, are plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.rules.derivation import Application
from unity_ir.search.exact import CLOSE, ExactPlan, Solver
from unity_ir.search.joint import JointPlan
from unity_ir.search.ledger import Choice, Ledger
from unity_ir.search.price import SPACE, Price
from unity_ir.search.realise import realise
from unity_ir.search.shared import bounded, certain, shares, sharpened
from unity_ir.simulate.report import peak

TRIES = 24
"""Prices of a byte at most."""


@dataclass(frozen=True)
class Fitting:
    """A plan that fits, ..."""

    graph: Graph
    """... of this graph, ..."""
    plan: ExactPlan
    bytes: float
    price: float
    """... seconds a byte costs at which the bound is best, ..."""
    lines: tuple[tuple[float, float], ...]
    """... and for every price tried what no choice is below: seconds + price * bytes."""

    def bound(self, limit: float) -> float:
        """Seconds that no choice of so many bytes is below."""
        return max(least - price * limit for price, least in self.lines)


class NothingFits(UnityError):
    """No choice fits: `plan`, which takes the fewest `bytes`, does not. None takes fewer seconds than `fastest`."""

    def __init__(self, plan: ExactPlan, bytes: float, fastest: float):
        super().__init__("search: no plan fits")
        self.plan = plan
        self.bytes = bytes
        self.fastest = fastest


def fitting(solver: Solver, graph: Graph, limit: float, fastest: ExactPlan | None = None) -> Fitting:
    """
    The fastest choice found of at most `limit` bytes on each device.

    `fastest` is the choice without a limit, if it is known. Raises `NothingFits`.
    """
    ledger = Ledger(solver, graph)
    fastest = fastest or sharpened(solver, graph, solver.solve(graph))
    lines = [(0.0, fastest.bound)]
    over, (seconds, bytes) = ledger.choice(fastest), ledger.costs(ledger.choice(fastest))
    if bytes <= limit:
        return Fitting(graph, fastest, bytes, 0.0, tuple(lines))
    smallest = solver.at(SPACE).solve(graph)
    under = ledger.choice(smallest)
    if ledger.costs(under)[1] > limit:
        raise NothingFits(ledger.plan(under, 0.0), ledger.costs(under)[1], fastest.bound)
    best = _better(ledger, under, over, under, limit)
    found = 0.0
    for _ in range(TRIES):
        (low, much), (high, few) = ledger.costs(over), ledger.costs(under)
        if high <= low:
            # Not slower and smaller: what does not fit was not the fastest but near the bound.
            break
        price = (high - low) / (much - few)
        plan = solver.at(Price(1.0, price)).solve(graph)
        lines.append((price, plan.bound))
        met = ledger.choice(plan)
        seconds, bytes = ledger.costs(met)
        if plan.bound - price * limit >= max(least - p * limit for p, least in lines):
            found = price
        if bytes <= limit:
            best = _better(ledger, best, over, met, limit)
        else:
            best = _better(ledger, best, met, under, limit)
        bound = max(least - p * limit for p, least in lines)
        done = seconds + price * bytes >= (low + price * much) * (1 - 1e-9)
        if done or ledger.costs(best)[0] <= bound * (1 + CLOSE):
            break
        over, under = (over, met) if bytes <= limit else (met, under)
    return Fitting(graph, ledger.plan(best, 0.0), ledger.costs(best)[1], found, _sound(solver, graph, lines, found))


def _sound(
    solver: Solver, graph: Graph, lines: Sequence[tuple[float, float]], price: float
) -> tuple[tuple[float, float], ...]:
    """
    What no choice is below when operators share moves: the line without a price and that at this one; all that the
    search went by, if in this graph they never do.
    """
    if not shares(graph):
        return tuple(lines)
    return (lines[0], (price, bounded(solver.at(Price(1.0, price)), graph)))


def _better(ledger: Ledger, best: Choice, over: Choice, under: Choice, limit: float) -> Choice:
    """The fastest within the limit of the best so far, and of what lies between two choices and near that."""
    tried = [best, under]
    mixed = ledger.between(over, under, limit)
    if mixed is not None:
        tried.append(ledger.improved(mixed, limit))
    return min((c for c in tried if ledger.costs(c)[1] <= limit), key=lambda c: ledger.costs(c)[0])


ROUNDS = 6
"""Times the limit is tightened because the simulated peak is above what is held at the end of the forward."""


def needed(graph: Graph, priced: PlanCost, optimizer: Optimizer) -> int:
    """
    Bytes a device must have for a plan: what is held at the end of the forward, or, where more, the simulated peak.

    Simulated only where gradients of activations could make it more than the device has.
    """
    held = priced.memory_bytes
    if not not_kept(graph) and held + priced.memory["activations"] <= priced.machine.device.memory:
        return held
    return max(held, peak(graph, priced, optimizer))


def joint_within(fastest: JointPlan, source: Graph, search: Callable[[Solver], JointPlan]) -> JointPlan:
    """
    The joint search under the device's memory: `fastest`, if it fits, else the best plan found that does.

    The rewrites are those that help when a byte costs what it does for the source graph at the limit. `search` is the
    joint search with a solver. Raises `UnityError` where nothing fits, and says what is closest.
    """
    solver, machine = fastest.solver, fastest.solver.spaces.machine
    limit = machine.device.memory

    def need(plan: ExactPlan, graph: Graph) -> int:
        made = realise(graph, plan, solver)
        return needed(made, cost(made, machine, solver.optimizer), solver.optimizer)

    if need(fastest.plan, fastest.rewritten) <= limit:
        return fastest
    candidates: dict[Graph, tuple[Application, ...]] = {source: (), fastest.rewritten: fastest.derivation}
    interrupted = fastest.interrupted
    if not interrupted:
        rewritten = search(_at_limit(solver, source, limit))
        candidates.setdefault(rewritten.rewritten, rewritten.derivation)
        interrupted = rewritten.interrupted
    smallest: tuple[float, ExactPlan] | None = None
    low, target = 0.0, float(limit)
    for _ in range(ROUNDS):
        found = _fastest(solver, candidates, target)
        needs = need(found.plan, found.graph)
        if needs <= limit:
            bound = certain(found.bound(limit), found.graph, machine) if solver.spaces.axis_by_axis else None
            return replace(
                fastest,
                graph=realise(found.graph, found.plan, solver),
                bound=bound,
                derivation=candidates[found.graph],
                rewritten=found.graph,
                plan=found.plan,
                price=found.price,
                interrupted=interrupted,
            )
        if smallest is None or needs < smallest[0]:
            smallest = needs, found.plan
        if found.bytes > target:
            # Nothing is held so little: what is least at the end of the forward is not at the peak.
            low, target = target, (target + limit) / 2
        else:
            target = max(found.bytes - (needs - limit), (low + target) / 2)
    assert smallest is not None
    needs, plan = smallest
    raise UnityError(
        f"search: no plan fits: the smallest found needs {needs / 1e9:.3g} GB per device, "
        f"{(needs - limit) / 1e9:.3g} GB more than {machine.device.name} has, and takes "
        f"{plan.seconds * 1e3:.3g} ms; use more devices or a smaller batch"
    )


def _fastest(solver: Solver, graphs: Iterable[Graph], limit: float) -> Fitting:
    """The fastest plan within the limit of any of the graphs; the smallest where there is none."""
    best: Fitting | None = None
    smallest: Fitting | None = None
    for graph in graphs:
        try:
            found = fitting(solver, graph, limit)
        except NothingFits as error:
            if smallest is None or error.bytes < smallest.bytes:
                smallest = Fitting(graph, error.plan, error.bytes, 0.0, ((0.0, error.fastest),))
            continue
        if best is None or found.plan.seconds < best.plan.seconds * (1 - 1e-9):
            best = found
    found = best or smallest
    assert found is not None
    return found


def _at_limit(solver: Solver, graph: Graph, limit: float) -> Solver:
    """The solver for which a byte costs what it does at the limit; bytes alone where nothing fits."""
    try:
        return solver.at(Price(1.0, fitting(solver, graph, limit).price))
    except NothingFits:
        return solver.at(SPACE)
