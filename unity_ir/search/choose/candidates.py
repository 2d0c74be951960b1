"""
What others would do, as a floor: no plan by hand is left to be faster.

The exact search adds seconds up. An emitted program does communication beside kernels, as far as dependences allow: so
says the simulator, by which plans are compared here. Where two take about as long, the sum and the simulator may
disagree.
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
"""What makes a plan; the last says what plans cost."""

BY_HAND: Mapping[str, ByHand] = {
    "data-parallel": lambda graph, machine, _, __: data_parallel(graph, machine),
    "fsdp": lambda graph, machine, _, __: fsdp(graph, machine),
    "expert": expert,
    "tofu": lambda graph, machine, _, __: tofu(graph, machine),
}
"""Plans by hand, by the name of their strategy."""

QUICK = ("data-parallel", "fsdp")
"""Those that need not look for degrees."""


Plan = tuple[Graph, PlanCost]


def by_hand(
    graph: Graph, machine: Machine, optimizer: Optimizer, strategies: Iterable[str] = BY_HAND
) -> Iterator[tuple[str, Plan]]:
    """The plans by hand of a serial graph, each once, with the name of their strategy, and what they cost."""
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
    """Simulated seconds of an iteration, communication overlapped as in the program."""
    return simulate(task_graph(*plan, optimizer)).seconds


def fits(graph: Graph, priced: PlanCost, optimizer: Optimizer) -> bool:
    """Whether a device holds what a plan needs."""
    return needed(graph, priced, optimizer) <= priced.machine.device.memory


def on_parts(priced: PlanCost) -> bool:
    """Whether some operators are on a part of the machine only: no bound is of such plans."""
    return any(map(pins, priced.placement.assignments.values()))


@dataclass(frozen=True)
class Candidate:
    """A plan by hand, how long it takes, and what it needs."""

    graph: Graph
    name: str
    seconds: float
    """Every move waited for."""
    emitted: float
    """Infinite for a plan that does not fit."""
    on_parts: bool
    needs: int
    """Bytes per device."""

    @property
    def fits(self) -> bool:
        """Whether a device holds what it needs."""
        return isfinite(self.emitted)


def that_fit(offers: Iterable[Candidate]) -> list[Candidate]:
    """Those whose plans fit."""
    return [offer for offer in offers if offer.fits]


@dataclass(frozen=True)
class Baselines:
    """
    Makes offers: asked for a serial graph, and whether only what needs no looking for degrees. An offer says no more
    than what is compared, so that it may come from another process.
    """

    machine: Machine
    optimizer: Optimizer

    def __call__(self, question: tuple[Graph, bool]) -> list[Candidate]:
        graph, quick = question
        offers: list[Candidate] = []
        with beside(), suppress(OutOfBudget):
            for name, plan in by_hand(graph, self.machine, self.optimizer, QUICK if quick else BY_HAND):
                needs = needed(*plan, self.optimizer)
                emitted = as_emitted(plan, self.optimizer) if needs <= self.machine.device.memory else inf
                offers.append(Candidate(plan[0], name, plan[1].time, emitted, on_parts(plan[1]), needs))
        return offers


@dataclass
class SimulatedPlans:
    """Which plans are fastest as emitted; each is simulated and priced once."""

    machine: Machine
    optimizer: Optimizer
    _seconds: dict[Graph, float] = field(default_factory=dict[Graph, float])
    _plans: dict[Graph, Plan] = field(default_factory=dict[Graph, Plan])

    def seconds(self, plan: Plan) -> float:
        """See `as_emitted`."""
        if plan[0] not in self._seconds:
            spend(limits().work_candidate * len(plan[0].nodes()))
            self._seconds[plan[0]] = as_emitted(plan, self.optimizer)
        return self._seconds[plan[0]]

    def plan(self, offer: Candidate) -> Plan:
        """The plan of an offer, and what it costs."""
        if offer.graph not in self._plans:
            self._plans[offer.graph] = offer.graph, cost(offer.graph, self.machine, self.optimizer)
        return self._plans[offer.graph]

    def fastest(self, plans: Sequence[Plan], offers: Sequence[Candidate] = ()) -> Plan:
        """The plan that takes the least time as emitted: the first, unless another that fits the devices takes less."""
        best, *others = plans
        for plan in others:
            if self.seconds(plan) < self.seconds(best) * limits().faster and fits(*plan, self.optimizer):
                best = plan
        least, chosen = (self.seconds(best) if others or offers else 0.0), None
        for offer in offers:
            if offer.emitted < least * limits().faster:
                least, chosen = offer.emitted, offer
        return best if chosen is None else self.plan(chosen)
