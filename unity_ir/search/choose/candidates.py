"""
Price and simulate the baselines as candidates, so that no baseline is faster than the plan a search returns.

The exact search sums seconds, as if every move were waited for. An emitted program overlaps communication with kernels
as far as dependences allow; plans are compared by simulated time, which accounts for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite

from unity_ir.budget import OutOfBudget, beside, spend
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.pcg.sharding import pins
from unity_ir.search.baselines.data_parallel import data_parallel, fsdp
from unity_ir.search.baselines.expert import expert
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.tofu.search import tofu
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.full import simulate

ByHand = Callable[[Graph, Machine, Optimizer, Callable[[Graph], PlanCost]], Graph]
"""Makes the parallel graph of a serial one; the last argument returns a plan's cost."""

BY_HAND: Mapping[str, ByHand] = {
    "data-parallel": lambda graph, machine, _, __: data_parallel(graph, machine),
    "fsdp": lambda graph, machine, _, __: fsdp(graph, machine),
    "expert": expert,
    "tofu": lambda graph, machine, _, __: tofu(graph, machine),
}
"""The baselines, by strategy name."""

QUICK = ("data-parallel", "fsdp")
"""The baselines that are made without a search."""


Plan = tuple[Graph, PlanCost]
"""A parallel graph and its cost."""


def by_hand(
    graph: Graph, machine: Machine, optimizer: Optimizer, strategies: Iterable[str] = BY_HAND
) -> Iterator[tuple[str, Plan]]:
    """Yield the distinct baselines of a serial graph, each with its strategy's name and its cost."""
    known: dict[Graph, PlanCost] = {}
    made = set[Graph]()

    def price(plan: Graph) -> PlanCost:
        if plan not in known:
            known[plan] = cost(plan, machine, optimizer)
        return known[plan]

    for name in strategies:
        if name == "tofu" and len(machine.mesh.sizes) > limits().tofu_axes:
            continue
        spend(limits().work_candidate * len(graph.nodes()))
        try:
            plan = BY_HAND[name](graph, machine, optimizer, price)
        except UnityError:
            continue  # such as a batch that is not divisible
        if plan not in made:
            made.add(plan)
            yield name, (plan, price(plan))


def as_emitted(plan: Plan, optimizer: Optimizer) -> float:
    """Return the simulated seconds of an iteration, with communication overlapped as in the program."""
    return simulate(task_graph(*plan, optimizer)).seconds


def fits(graph: Graph, priced: PlanCost, optimizer: Optimizer) -> bool:
    """Return whether a plan fits a device's memory."""
    return needed(graph, priced, optimizer) <= priced.machine.device.memory


def on_parts(priced: PlanCost) -> bool:
    """Return whether some operators are on a part of the machine: no bound covers such plans."""
    return any(map(pins, priced.placement.assignments.values()))


@dataclass(frozen=True)
class Candidate:
    """A baseline, its seconds and its bytes."""

    graph: Graph
    name: str
    seconds: float
    """Seconds with every move waited for."""
    emitted: float
    """Simulated seconds; infinite for a plan that does not fit."""
    on_parts: bool
    needs: int
    """Bytes per device."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits a device's memory."""
        return isfinite(self.emitted)


def that_fit(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that fit."""
    return [candidate for candidate in candidates if candidate.fits]


@dataclass(frozen=True)
class Baselines:
    """
    Given a serial graph and a flag, makes its baselines; if the flag is set, the `QUICK` ones only.

    A question and its answer are small, so that a worker process can make them.
    """

    machine: Machine
    optimizer: Optimizer

    def __call__(self, question: tuple[Graph, bool]) -> list[Candidate]:
        graph, quick = question
        candidates: list[Candidate] = []
        with beside(), suppress(OutOfBudget):
            for name, plan in by_hand(graph, self.machine, self.optimizer, QUICK if quick else BY_HAND):
                needs = needed(*plan, self.optimizer)
                emitted = as_emitted(plan, self.optimizer) if needs <= self.machine.device.memory else inf
                candidates.append(Candidate(plan[0], name, plan[1].time, emitted, on_parts(plan[1]), needs))
        return candidates


@dataclass
class SimulatedPlans:
    """Memo of the simulated time of plans, and of the cost of candidates."""

    machine: Machine
    optimizer: Optimizer
    _seconds: dict[Graph, float] = field(default_factory=dict[Graph, float])
    _plans: dict[Graph, Plan] = field(default_factory=dict[Graph, Plan])

    def seconds(self, plan: Plan) -> float:
        """Return the simulated seconds of a plan (`as_emitted`)."""
        if plan[0] not in self._seconds:
            spend(limits().work_candidate * len(plan[0].nodes()))
            self._seconds[plan[0]] = as_emitted(plan, self.optimizer)
        return self._seconds[plan[0]]

    def plan(self, candidate: Candidate) -> Plan:
        """Return the plan of a candidate, priced."""
        if candidate.graph not in self._plans:
            self._plans[candidate.graph] = candidate.graph, cost(candidate.graph, self.machine, self.optimizer)
        return self._plans[candidate.graph]

    def fastest(self, plans: Sequence[Plan], candidates: Sequence[Candidate] = ()) -> Plan:
        """
        Return the plan with the least simulated time: the first, unless another one that fits is faster by
        `limits().faster`.
        """
        best, *others = plans
        for plan in others:
            if self.seconds(plan) < self.seconds(best) * limits().faster and fits(*plan, self.optimizer):
                best = plan
        least, chosen = (self.seconds(best) if others or candidates else 0.0), None
        for candidate in candidates:
            if candidate.emitted < least * limits().faster:
                least, chosen = candidate.emitted, candidate
        return best if chosen is None else self.plan(chosen)
