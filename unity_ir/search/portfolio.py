"""
What others would do, as a floor: no plan by hand is left to be faster.

The exact search adds seconds up. An emitted program does communication beside kernels, as far as dependences allow: so
says the simulator, by which plans are compared here. Where two take about as long, the sum and the simulator may
disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.pcg.layout import pins
from unity_ir.search.data_parallel import data_parallel, fsdp
from unity_ir.search.expert import expert
from unity_ir.search.memory import needed
from unity_ir.search.tofu import tofu
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.full import simulate

AXES = 9
"""Axes of a machine up to which Tofu's plans are looked at: each axis is cut by itself, and what it takes to go between
such layouts of more axes is too long to find."""

ByHand = Callable[[Graph, Machine, Optimizer, Callable[[Graph], PlanCost]], Graph]
"""What makes a plan; the last says what plans cost."""

BY_HAND: Sequence[ByHand] = (
    lambda graph, machine, _, __: data_parallel(graph, machine),
    lambda graph, machine, _, __: fsdp(graph, machine),
    expert,
    lambda graph, machine, _, __: tofu(graph, machine),
)

QUICK = BY_HAND[:2]
"""Those that need not look for degrees."""

FASTER = 1 - 1e-6
"""A plan that takes more than this part of another's time is no faster."""

Plan = tuple[Graph, PlanCost]


def by_hand(
    graph: Graph, machine: Machine, optimizer: Optimizer, strategies: Sequence[ByHand] = BY_HAND
) -> Iterator[Plan]:
    """The plans by hand of a serial graph, each once, and what they cost."""
    known: dict[Graph, PlanCost] = {}
    made = set[Graph]()

    def price(plan: Graph) -> PlanCost:
        if plan not in known:
            known[plan] = cost(plan, machine, optimizer)
        return known[plan]

    for strategy in strategies if len(machine.mesh.sizes) <= AXES else strategies[: len(BY_HAND) - 1]:
        try:
            plan = strategy(graph, machine, optimizer, price)
        except UnityError:
            continue  # such as a batch that is not divisible
        if plan not in made:
            made.add(plan)
            yield plan, price(plan)


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
class Offer:
    """A plan by hand that fits, and how long it takes."""

    graph: Graph
    seconds: float
    """Every move waited for."""
    emitted: float
    on_parts: bool


@dataclass(frozen=True)
class Hands:
    """
    Makes offers: asked for a serial graph, and whether only what needs no looking for degrees. An offer says no more
    than what is compared, so that it may come from another process.
    """

    machine: Machine
    optimizer: Optimizer

    def __call__(self, question: tuple[Graph, bool]) -> list[Offer]:
        graph, quick = question
        plans = by_hand(graph, self.machine, self.optimizer, QUICK if quick else BY_HAND)
        return [
            Offer(plan[0], plan[1].time, as_emitted(plan, self.optimizer), on_parts(plan[1]))
            for plan in plans
            if fits(*plan, self.optimizer)
        ]


@dataclass
class Emitted:
    """Which plans are fastest as emitted; each is simulated and priced once."""

    machine: Machine
    optimizer: Optimizer
    _seconds: dict[Graph, float] = field(default_factory=dict[Graph, float])
    _plans: dict[Graph, Plan] = field(default_factory=dict[Graph, Plan])

    def seconds(self, plan: Plan) -> float:
        """See `as_emitted`."""
        if plan[0] not in self._seconds:
            self._seconds[plan[0]] = as_emitted(plan, self.optimizer)
        return self._seconds[plan[0]]

    def plan(self, offer: Offer) -> Plan:
        """The plan of an offer, and what it costs."""
        if offer.graph not in self._plans:
            self._plans[offer.graph] = offer.graph, cost(offer.graph, self.machine, self.optimizer)
        return self._plans[offer.graph]

    def fastest(self, plans: Sequence[Plan], offers: Sequence[Offer] = ()) -> Plan:
        """The plan that takes the least time as emitted: the first, unless another that fits the devices takes less."""
        best, *others = plans
        for plan in others:
            if self.seconds(plan) < self.seconds(best) * FASTER and fits(*plan, self.optimizer):
                best = plan
        least, chosen = (self.seconds(best) if others or offers else 0.0), None
        for offer in offers:
            if offer.emitted < least * FASTER:
                least, chosen = offer.emitted, offer
        return best if chosen is None else self.plan(chosen)
