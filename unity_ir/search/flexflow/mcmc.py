"""
FlexFlow's search (section 6): Metropolis-Hastings over the assignments of single operators, on the delta simulator.

A proposal gives one operator, drawn at random, another assignment: the role of each mesh axis in its task grid, or the
coordinate at which it is pinned; some copy the assignment of an equal operator. It is accepted with probability min(1,
exp(beta * operators * (old - new) / best)). A chain starts from each of several plans, and ends when its budget of
proposals is spent, or when no better plan was found in half of its proposals. The budget left goes to chains that start
near the best plan. In the first part of a chain nothing is pinned, so that all devices are alike; the last part starts
from its best plan. All random numbers come from the seed, so the same search returns the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from time import perf_counter

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node, Value, divide, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment, place
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.baselines.expert import expert
from unity_ir.search.layouts.limits import limits
from unity_ir.simulate.choices import random_assignment
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.streams import TICKS, pinned_axes
from unity_ir.tdl.parallel import Configuration

Assignments = Mapping[Node, Assignment]


STARTS = ("data-parallel", "expert", "serial", "random")
"""The plans that chains start from."""


AGAIN = "again"
"""Name of the chains that start near the best plan so far."""


PATIENCE = 50
"""Minimum number of proposals per operator that a chain waits for a better plan."""


PROGRESS_EVERY = 256


@dataclass(frozen=True)
class Settings:
    """
    Settings of the search. `beta` weighs a slowdown relative to an operator's mean time in the best plan: higher
    accepts fewer; `budget` is the number of proposals over all chains.
    """

    beta: float = 25.0
    budget: int = 60_000
    seconds: float | None = None
    """A time limit, too; with one, results may differ from run to run."""
    seed: int = 0
    starts: Sequence[str] = STARTS
    """Names of the plans that chains start from, of `STARTS`."""
    overlap: bool = True
    """Whether communication is simulated as overlapping with kernels; otherwise every move is waited for."""
    pinning: float = 0.2
    """Fraction of every chain's proposals, its last ones, in which operators may be pinned."""
    patience: int = PATIENCE
    """Minimum number of proposals per operator that a chain waits for a better plan."""
    beat: float | None = None
    """
    Seconds of a plan that is known: no chain starts near the best plan then, and chains slower than the known plan end
    early.
    """


@dataclass(frozen=True)
class Chain:
    """Statistics of one Markov chain of the search."""

    start: str
    """Name of the plan it started from; `again` near the best plan of the chains before."""
    first: float
    """Simulated seconds of the plan it started from."""
    best: float
    """Simulated seconds of its best plan."""
    proposed: int
    """Number of proposals made."""
    accepted: int
    """Number of these that were accepted."""
    found_at: int
    """Number of proposals made before its best plan."""
    seconds: float
    """Seconds the chain ran for."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""


@dataclass(frozen=True)
class McmcPlan:
    """The fastest plan of all chains, by simulated time, and the statistics of the chains."""

    graph: Graph
    assignments: Assignments
    seconds: float
    """Simulated seconds of an iteration."""
    chains: tuple[Chain, ...]


def mcmc(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    settings: Settings | None = None,
    progress: Callable[[int, float], None] | None = None,
    space: Mapping[Node, Sequence[Assignment]] | None = None,
    plans: Mapping[str, Assignments] | None = None,
) -> McmcPlan:
    """
    Return the fastest plan found for a serial graph by Metropolis-Hastings (FlexFlow, section 6) over the assignments
    of its operators: the role of each mesh axis, such as the index variable it divides. Memory limits are not looked
    at.

    `settings` None is the defaults. `progress` is called with the proposals made and the best time in seconds. `space`
    lists the assignments each operator may have (None: all that fit); those of starting plans that are not in it are
    replaced. `plans` are starting plans by name, an assignment per operator, tried before those the settings name.
    Ctrl-C and the end of the work budget end the search: it returns the best plan so far, with `interrupted` set in the
    last of its `chains`.

    Raises `UnityError` for invalid settings, and if no starting plan fits.
    """
    settings = settings or Settings()
    _check(settings)
    random = Random(settings.seed)
    starts = {**(plans or {}), **_starts(graph, machine, optimizer, settings.starts, random, space)}
    search = _ChainSearch(graph, machine, optimizer, settings, random, space)
    best: tuple[int, Assignments] | None = None
    chains: list[Chain] = []
    proposed = 0
    share = settings.budget // max(1, len(starts))
    waiting = list(starts.items())
    while waiting or (
        best is not None and settings.beat is None and settings.budget - proposed >= limits().mcmc_least_chain
    ):
        name, assignments = waiting.pop(0) if waiting else (AGAIN, search.shaken(best[1] if best else {}))
        budget = share if name != AGAIN else settings.budget - proposed
        chain, found = search.chain(name, assignments, budget, progress and _shift(progress, proposed))
        proposed += chain.proposed
        chains.append(chain)
        if best is None or found[0] < best[0]:
            best = found
        if chain.interrupted or search.late():
            break
    if best is None:
        raise UnityError(f"mcmc: {', '.join(settings.starts)}: no plan to start from fits; add `random`")
    ticks, assignments = best
    return McmcPlan(materialise(graph, assignments, machine.mesh), assignments, ticks / TICKS, tuple(chains))


def pinnable_axes(machine: Machine) -> tuple[int, ...]:
    """
    Return the numbers of the mesh axes on which operators may be pinned to one coordinate: the innermost ones, of at
    most `limits().mcmc_classes` coordinates in all.
    """
    axes: list[int] = []
    classes = 1
    for axis in reversed(range(len(machine.mesh.sizes))):
        classes *= machine.mesh.sizes[axis]
        if classes > limits().mcmc_classes:
            break
        axes.append(axis)
    return tuple(reversed(axes))


def _check(settings: Settings) -> None:
    if not 0 <= settings.pinning <= 1:
        raise UnityError("mcmc: the part of a chain that pins must be between 0 and 1")
    if not settings.beta > 0 or settings.budget < 0 or (settings.seconds is not None and not settings.seconds > 0):
        raise UnityError("mcmc: beta and seconds must be above 0, and the budget no less than 0")
    if unknown := [s for s in settings.starts if s not in STARTS]:
        raise UnityError(f"mcmc: no start {', '.join(unknown)}; known are {', '.join(STARTS)}")


def _starts(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    names: Sequence[str],
    random: Random,
    space: Mapping[Node, Sequence[Assignment]] | None,
) -> dict[str, Assignments]:
    found: dict[str, Assignments] = {}
    for name in names:
        try:
            if name == "random":
                nodes = [n for n in graph.nodes() if n.is_compute]
                found[name] = {n: random_assignment(n, machine, random) for n in nodes}
            elif name == "serial":
                # Everything everywhere: what small models are fastest by.
                found[name] = {n: (REPEAT,) * len(machine.mesh.sizes) for n in graph.nodes() if n.is_compute}
            else:
                plan = data_parallel(graph, machine) if name == "data-parallel" else expert(graph, machine, optimizer)
                found[name] = assignments_of(plan, machine)
        except UnityError:
            if name == "random":
                raise
            # The batch is not divisible: there is no such plan to start from.
    if space is not None:
        found = {
            k: {n: a if a in space[n] else random.choice(space[n]) for n, a in v.items()} for k, v in found.items()
        }
    return found


def assignments_of(plan: Graph, machine: Machine) -> dict[Node, Assignment]:
    """
    Return the assignment of every operator of a plan, the role of each mesh axis in it (such as the index variable it
    divides), keyed by the operators of the plan's serial graph.
    """
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


class _ChainSearch:
    """State shared by all chains: memoised costs, and classes of equal operators."""

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        optimizer: Optimizer,
        settings: Settings,
        random: Random,
        space: Mapping[Node, Sequence[Assignment]] | None,
    ):
        self.graph = graph
        self.machine = machine
        self.optimizer = optimizer
        self.settings = settings
        self.random = random
        self.space = space
        self.start = perf_counter()
        self.costs: dict[tuple[int, ...], Simulation] = {}
        alike: dict[object, list[Node]] = {}
        for node in graph.nodes():
            if node.is_compute:
                alike.setdefault((node.op, node.attributes, tuple(v.type for v in node.operands)), []).append(node)
        self.alike = {node: nodes for nodes in alike.values() for node in nodes}

    def chain(
        self, name: str, assignments: Assignments, budget: int, progress: Callable[[int, float], None] | None
    ) -> tuple[Chain, tuple[int, Assignments]]:
        """Run one chain from the given assignments; return its statistics, and its best plan with its ticks."""
        start = perf_counter()
        pinning = (
            0 if self.space is not None or not pinnable_axes(self.machine) else round(budget * self.settings.pinning)
        )
        ends = start + self.settings.seconds / len(self.settings.starts) if self.settings.seconds else None
        first = best = None
        beta = self.settings.beta * len(self.alike)
        proposed = accepted = found_at = 0
        interrupted = False
        try:
            for part, pins_some in ((budget - pinning, False), (pinning, True)):
                if not part and best is not None:
                    continue
                simulation = self._simulation(assignments, pins_some)
                now = simulation.makespan
                if first is None:
                    first = now
                if best is None or now < best:
                    best = now
                made = better_at = 0
                while self.alike and made < part and made - better_at <= self._patience(made, best):
                    if ends is not None and perf_counter() > ends:
                        break
                    made += 1
                    node, assignment = self._draw(simulation, pins_some)
                    new = simulation.propose(node, assignment)
                    if new <= now or self.random.random() < exp(beta * (now - new) / best):
                        simulation.accept()
                        now = new
                        accepted += 1
                        if now < best:
                            best, better_at, found_at = now, made, proposed + made
                            assignments = simulation.assignments
                    else:
                        simulation.reject()
                    if progress is not None and made % PROGRESS_EVERY == 0:
                        progress(proposed + made, best / TICKS)
                proposed += made
        except KeyboardInterrupt:
            if best is None:
                raise
            interrupted = True
        assert first is not None
        assert best is not None
        took = perf_counter() - start
        return Chain(name, first / TICKS, best / TICKS, proposed, accepted, found_at, took, interrupted), (
            best,
            assignments,
        )

    def _patience(self, made: int, best: int) -> int:
        """Return the proposals that a chain whose best takes `best` ticks waits for a better plan."""
        settings, operators = self.settings, len(self.alike)
        if settings.beat is None:
            return max(settings.patience * operators, made // 2)
        return (settings.patience if best < settings.beat * TICKS else limits().mcmc_behind) * operators

    def late(self) -> bool:
        """Return whether the time limit has passed."""
        return self.settings.seconds is not None and perf_counter() - self.start > self.settings.seconds

    def shaken(self, assignments: Assignments) -> Assignments:
        """Return a plan with some assignments drawn anew."""
        random = self.random
        return {
            node: self._any(node) if random.random() < limits().mcmc_shaken else assignment
            for node, assignment in assignments.items()
        }

    def _any(self, node: Node) -> Assignment:
        if self.space is not None:
            return self.random.choice(self.space[node])
        return random_assignment(node, self.machine, self.random)

    def _simulation(self, assignments: Assignments, pins_some: bool) -> Simulation:
        """Return a simulation that distinguishes devices along axes that are, or may be, pinned."""
        axes = set(pinned_axes(assignments.values())).union(pinnable_axes(self.machine) if pins_some else ())
        key = tuple(sorted(axes))
        found = Simulation(
            self.graph, self.machine, assignments, self.optimizer, self.settings.overlap, key, self.costs.get(key)
        )
        self.costs.setdefault(key, found)
        return found

    def _draw(self, simulation: Simulation, pins_some: bool) -> tuple[Node, Assignment]:
        """Draw an operator and an assignment of it."""
        random = self.random
        node = random.choice(simulation.nodes)
        if self.space is not None:
            return node, random.choice(self.space[node])
        if random.random() < limits().mcmc_alike:
            other = random.choice(self.alike[node])
            if other is not node:
                return node, simulation.assignment(other)
        pinned = limits().mcmc_pinned if pins_some and random.random() < limits().mcmc_pinning else 0.0
        return node, random_assignment(node, self.machine, random, pinned, simulation.streams.axes)
