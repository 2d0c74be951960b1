"""
FlexFlow's search (section 6): Metropolis-Hastings over the assignments of single operators, on the delta simulator.

A proposal gives one operator, drawn at random, another assignment: what each mesh axis does in its task grid, or where
on it the operator is pinned. It is taken with probability min(1, exp(beta * (old - new) / best)). A chain starts from
each of several plans, and ends when its budget of proposals is spent, or when no better plan was found for half of
those it made. All is drawn from the seed, so the same search ends in the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from time import perf_counter

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Optimizer, Value, divide, leaf, rewrite
from unity_ir.pcg.layout import Assignment, place
from unity_ir.search.data_parallel import data_parallel
from unity_ir.search.expert import expert
from unity_ir.simulate.choices import random_assignment
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.streams import TICKS
from unity_ir.tdl.parallel import Configuration

Assignments = Mapping[Node, Assignment]

MAX_CLASSES = 8
"""Devices are told apart along the innermost axes that make no more classes than this."""

STARTS = ("data-parallel", "expert", "random")
"""The plans chains start from."""

PINNING = 0.25
"""How often a proposal pins its operator on some axes."""

PINNED = 0.5
"""How often it then pins each of them."""

PROGRESS_EVERY = 256


@dataclass(frozen=True)
class Settings:
    """How to search: `beta` weighs a slowdown, relative to the best plan; `budget` is of proposals, over all chains."""

    beta: float = 5000.0
    budget: int = 30_000
    seconds: float | None = None
    """Also a limit of time, for which the result may differ from run to run."""
    seed: int = 0
    starts: Sequence[str] = STARTS
    overlap: bool = True


@dataclass(frozen=True)
class Chain:
    """What one chain did."""

    start: str
    first: float
    """Seconds of an iteration of the plan it started from."""
    best: float
    proposed: int
    accepted: int
    found_at: int
    """Proposals until the best plan."""
    seconds: float
    """That the chain took."""


@dataclass(frozen=True)
class Found:
    """The best plan of all chains."""

    graph: Graph
    assignments: Assignments
    seconds: float
    """Simulated, of an iteration."""
    chains: tuple[Chain, ...]


def mcmc(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    settings: Settings | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Found:
    """
    The fastest plan found for a serial graph. `progress` is told the proposals made and the best time.

    Raises `UnityError` for settings that cannot be, and if a graph has nothing to place.
    """
    settings = settings or Settings()
    _check(settings)
    random = Random(settings.seed)
    starts = _starts(graph, machine, optimizer, settings.starts, random)
    axes = told_apart(machine)
    best: tuple[int, Assignments] | None = None
    chains: list[Chain] = []
    proposed = 0
    for i, (name, assignments) in enumerate(starts.items()):
        simulation = Simulation(graph, machine, assignments, optimizer, settings.overlap, axes)
        budget = (settings.budget - proposed) // (len(starts) - i)
        chain, found = _run(name, simulation, axes, settings, budget, random, progress and _shift(progress, proposed))
        proposed += chain.proposed
        chains.append(chain)
        if best is None or found[0] < best[0]:
            best = found
    if best is None:
        raise UnityError(f"mcmc: {', '.join(settings.starts)}: no plan to start from fits; add `random`")
    ticks, assignments = best
    final = Simulation(graph, machine, assignments, optimizer, settings.overlap, axes)
    return Found(final.realised(), assignments, ticks / TICKS, tuple(chains))


def told_apart(machine: Machine) -> tuple[int, ...]:
    """The innermost axes, as many as make at most `MAX_CLASSES` classes of devices: where operators may be pinned."""
    axes: list[int] = []
    classes = 1
    for axis in reversed(range(len(machine.mesh.sizes))):
        classes *= machine.mesh.sizes[axis]
        if classes > MAX_CLASSES:
            break
        axes.append(axis)
    return tuple(reversed(axes))


def _check(settings: Settings) -> None:
    if not settings.beta > 0 or settings.budget < 0 or (settings.seconds is not None and not settings.seconds > 0):
        raise UnityError("mcmc: beta and seconds must be above 0, and the budget no less than 0")
    if unknown := [s for s in settings.starts if s not in STARTS]:
        raise UnityError(f"mcmc: no start {', '.join(unknown)}; known are {', '.join(STARTS)}")


def _starts(
    graph: Graph, machine: Machine, optimizer: Optimizer, names: Sequence[str], random: Random
) -> dict[str, Assignments]:
    found: dict[str, Assignments] = {}
    for name in names:
        try:
            if name == "random":
                nodes = [n for n in graph.nodes() if n.is_compute]
                found[name] = {n: random_assignment(n, machine, random) for n in nodes}
            else:
                plan = data_parallel(graph, machine) if name == "data-parallel" else expert(graph, machine, optimizer)
                found[name] = assignments_of(plan, machine)
        except UnityError:
            if name == "random":
                raise
            # The batch is not divisible: there is no such plan to start from.
    return found


def assignments_of(plan: Graph, machine: Machine) -> dict[Node, Assignment]:
    """What every operator of a plan's erasure does with the mesh's axes."""
    placement = place(plan, machine.mesh)
    found: dict[Node, Assignment] = {}

    def serial(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.is_parallel:
            return operands
        if node.is_leaf:
            return leaf(node.op, node.types[0].serial, None, **dict(node.attributes)).results
        made = divide(node, operands, Configuration())
        found.setdefault(made, placement.assignments[node])
        return made.results

    rewrite(plan, serial)
    return found


def _shift(progress: Callable[[int, float], None], by: int) -> Callable[[int, float], None]:
    return lambda proposed, best: progress(by + proposed, best)


def _run(
    name: str,
    simulation: Simulation,
    axes: Sequence[int],
    settings: Settings,
    budget: int,
    random: Random,
    progress: Callable[[int, float], None] | None,
) -> tuple[Chain, tuple[int, Assignments]]:
    """One chain."""
    start = perf_counter()
    machine, nodes = simulation.streams.machine, simulation.nodes
    now = first = best = simulation.makespan
    kept = simulation.assignments
    proposed = accepted = found_at = 0
    while proposed < budget and proposed - found_at <= max(budget // 4, proposed // 2):
        if settings.seconds is not None and perf_counter() - start > settings.seconds / len(settings.starts):
            break
        proposed += 1
        node = random.choice(nodes)
        new = simulation.propose(
            node, random_assignment(node, machine, random, PINNED if random.random() < PINNING else 0.0, axes)
        )
        if new <= now or random.random() < exp(settings.beta * (now - new) / best):
            simulation.accept()
            now = new
            accepted += 1
            if now < best:
                best, found_at = now, proposed
                kept = simulation.assignments
        else:
            simulation.reject()
        if progress is not None and proposed % PROGRESS_EVERY == 0:
            progress(proposed, best / TICKS)
    took = perf_counter() - start
    return Chain(name, first / TICKS, best / TICKS, proposed, accepted, found_at, took), (best, kept)
