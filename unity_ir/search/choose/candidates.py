"""
Price and simulate the baselines as candidates, so that no baseline is faster than the plan a search returns.

The exact search sums seconds, as if every move were waited for. An emitted program overlaps communication with kernels
as far as dependences allow; plans are compared by simulated time, which accounts for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Literal

from unity_ir.budget import OutOfBudget, own_budget, spend
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.routes import OF_ROWS
from unity_ir.search.baselines.data_parallel import data_parallel, fsdp
from unity_ir.search.baselines.expert import expert
from unity_ir.search.baselines.recipe import Degrees, expert_degrees, recipe
from unity_ir.search.bounds.assign_axes import is_planned_soon
from unity_ir.search.layouts.exchanged import exchange_rows
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.recompute.fit import with_recompute_and_pieces
from unity_ir.search.tofu.search import tofu
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.full import simulate
from unity_ir.simulate.report import fastest_seconds

ByHand = Callable[[Graph, Machine, Optimizer, Callable[[Graph], PlanCost]], Graph]
"""Makes the parallel graph of a serial one; the last argument returns a plan's cost."""

BY_HAND: Mapping[str, ByHand] = {
    "data-parallel": lambda graph, machine, _, __: data_parallel(graph, machine),
    "fsdp": lambda graph, machine, _, __: fsdp(graph, machine),
    "expert": expert,
    "tofu": lambda graph, machine, _, __: tofu(graph, machine),
    "zero3": lambda graph, machine, _, __: recipe(graph, machine, Degrees(zero=3), "zero3"),
}
"""The baselines, by strategy name."""

USUAL = ("data-parallel", "fsdp", "expert", "tofu")
"""
The baselines that every search is compared with; where FSDP does not fit, with ZeRO-3, too, and for mixtures with
expert parallelism of every degree that exchanges tokens (`exchanges`) or their rows (`Baselines._exchanging_rows`).
"""

BaselineKind = Literal["quick", "usual", "exchanging rows"]

QUICK = ("data-parallel", "fsdp")
"""The baselines that are made without a search."""


def exchanges(graph: Graph, machine: Machine) -> dict[str, ByHand]:
    """
    Return, for a serial graph of a mixture whose experts have a capacity, its plans of expert parallelism with ZeRO-2,
    one for each degree, the greatest first, by how the search is asked for each.
    """

    def of(ep: int) -> ByHand:
        return lambda graph, machine, _, __: recipe(graph, machine, Degrees(zero=2, ep=ep))

    return {f"degrees,zero=2,ep={ep}": of(ep) for ep in reversed(expert_degrees(graph, machine))}


PricedPlan = tuple[Graph, PlanCost]
"""A parallel graph and its cost."""


def _by_hand(
    graph: Graph, machine: Machine, optimizer: Optimizer, strategies: Mapping[str, ByHand]
) -> Iterator[tuple[str, PricedPlan]]:
    """
    Yield the distinct plans of a serial graph that `strategies` make, each with its strategy's name and its cost.

    Baselines that do not apply, such as those of a batch that is not divisible, are left out.
    """
    known: dict[Graph, PlanCost] = {}
    made = set[Graph]()

    def price(plan: Graph) -> PlanCost:
        if plan not in known:
            known[plan] = cost(plan, machine, optimizer)
        return known[plan]

    for name, make in strategies.items():
        if name == "tofu" and len(machine.mesh.sizes) > limits().tofu_axes:
            continue
        spend(limits().work_candidate * len(graph.nodes()))
        try:
            plan = make(graph, machine, optimizer, price)
        except UnityError:
            continue  # such as a batch that is not divisible
        if plan not in made and (name != "tofu" or is_planned_soon(plan, machine)):
            made.add(plan)
            yield name, (plan, price(plan))


def estimated(plan: PricedPlan, optimizer: Optimizer) -> float:
    """
    Return the seconds of an iteration of a plan by quick simulation, in which operators are not fused and collectives
    start in the order of the forward (`simulate.build`). It ranks the many plans on parts of the machine that a search
    tries. `optimizer` is used if the graph names none.
    """
    return simulate(task_graph(*plan, optimizer)).seconds


def fits(graph: Graph, priced: PlanCost, optimizer: Optimizer) -> bool:
    """
    Return whether a plan fits a device: the bytes that it needs (those held at the end of the forward or, if more, the
    simulated peak) are at most those that a plan may take of the device's memory. `graph` is its parallel forward
    graph, and `priced` its cost.
    """
    return needed(graph, priced, optimizer) <= priced.machine.device.usable


def beyond_bounds(priced: PlanCost) -> bool:
    """
    Return whether a plan may be faster than the lower bounds, which are for plans with every operator on all devices
    and with weights gathered once per step: it pins some operators to a part of the machine, or gathers weights again
    for the backward.
    """
    return any(map(pins_of, priced.placement.assignments.values())) or any(r.again for r in priced.reshards)


@dataclass(frozen=True)
class Candidate:
    """
    A plan, mostly a baseline, for the choice between plans: its seconds with every move waited for, its simulated
    seconds as emitted (with communication beside kernels), and its bytes per device. It is small enough for a worker to
    return.
    """

    graph: Graph
    name: str
    """A baseline's strategy; ends in ` with recompute` where that was added. Otherwise how the plan was made."""
    seconds: float
    """Seconds with every move waited for."""
    emitted: float
    """Simulated seconds as emitted; infinite for a plan that does not fit."""
    beyond_bounds: bool
    """Whether lower bounds do not cover the plan, as `beyond_bounds` returns or since it recomputes."""
    needs: int
    """Bytes that a device needs at the peak."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits a device's memory."""
        return isfinite(self.emitted)


def candidate(name: str, plan: PricedPlan, optimizer: Optimizer) -> Candidate:
    """Return a plan as a candidate called `name`, simulated as emitted if it fits a device's memory."""
    graph, priced = plan
    needs = needed(graph, priced, optimizer)
    emitted = fastest_seconds(graph, priced.machine, optimizer) if needs <= priced.machine.device.usable else inf
    return Candidate(graph, name, priced.time, emitted, beyond_bounds(priced), needs)


def that_fit(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that fit a device's memory."""
    return [candidate for candidate in candidates if candidate.fits]


@dataclass(frozen=True)
class Baselines:
    """
    Called with (serial graph, kind), returns the graph's baseline plans as candidates, those that do not fit included:
    the `usual` ones, of these only the `quick` ones, or those `exchanging rows`. One that does not fit comes with
    recompute as well, FSDP also as ZeRO-3. Baselines that do not apply to the graph are left out, and those for which
    the budget does not last.

    Arguments and results are small, so that a worker process can do it.
    """

    machine: Machine
    optimizer: Optimizer

    def __call__(self, question: tuple[Graph, BaselineKind]) -> list[Candidate]:
        graph, kind = question
        if kind == "exchanging rows":
            return self._exchanging_rows(graph)
        usual = {name: BY_HAND[name] for name in (QUICK if kind == "quick" else USUAL)}
        found = self._candidates(graph, usual | exchanges(graph, self.machine))
        if any(c.name == "fsdp" and not c.fits for c in found):
            # With recompute, FSDP may gather weights again, too.
            found += self._candidates(graph, {"zero3": BY_HAND["zero3"]}, recompute=False)
        return found

    def _candidates(self, graph: Graph, strategies: Mapping[str, ByHand], recompute: bool = True) -> list[Candidate]:
        candidates: list[Candidate] = []
        with own_budget(), suppress(OutOfBudget):
            for name, plan in _by_hand(graph, self.machine, self.optimizer, strategies):
                candidates.append(candidate(name, plan, self.optimizer))
                if recompute and not candidates[-1].fits:
                    candidates += self._recomputed(name, plan)
        return candidates

    def _exchanging_rows(self, graph: Graph) -> list[Candidate]:
        """
        Return plans of expert parallelism that exchange rows, in searches for such plans: of each degree, the greatest
        first, with ZeRO-2, and unless that fits as it is also with ZeRO-3. Those that do not fit get recompute, the
        fastest without it first, as long as one may be the fastest.
        """
        degrees = expert_degrees(graph, self.machine, OF_ROWS) if exchange_rows() else []
        candidates: list[Candidate] = []
        short: list[tuple[float, str, PricedPlan]] = []
        with own_budget(), suppress(OutOfBudget, UnityError):  # such as a batch that is not divisible
            for ep in reversed(degrees):
                for zero in (2, 3):
                    spend(limits().work_candidate * len(graph.nodes()))
                    made = recipe(graph, self.machine, Degrees(zero=zero, ep=ep))
                    made = replace(made, exchange_rows=exchange_rows())
                    plan, name = (made, self._cost(made)), f"degrees,zero={zero},ep={ep},exchange=true"
                    candidates.append(candidate(name, plan, self.optimizer))
                    if candidates[-1].fits:
                        break
                    short.append((fastest_seconds(made, self.machine, self.optimizer), name, plan))
            for seconds, name, plan in sorted(short, key=lambda each: each[0]):
                if seconds >= min(c.emitted for c in candidates):
                    break
                candidates += self._recomputed(name, plan)
        return candidates

    def _recomputed(self, name: str, plan: PricedPlan) -> list[Candidate]:
        """Return a baseline that does not fit with as little recompute as makes it fit, or with the least peak."""
        graph = with_recompute_and_pieces(
            plan[0], "auto", None, self.machine, self.optimizer, weights=True, compared=False
        )
        if graph == plan[0]:
            return []
        recomputing = graph, self._cost(graph)
        return [replace(candidate(f"{name} with recompute", recomputing, self.optimizer), beyond_bounds=True)]

    def _cost(self, plan: Graph) -> PlanCost:
        return cost(plan, self.machine, self.optimizer)


@dataclass
class SimulatedPlans:
    """
    Memo of the simulated seconds of plans as emitted (with communication beside kernels, as the program runs it), and
    of the costs of candidates, on one machine.
    """

    machine: Machine
    optimizer: Optimizer
    _seconds: dict[Graph, float] = field(default_factory=dict[Graph, float])
    _plans: dict[Graph, PricedPlan] = field(default_factory=dict[Graph, PricedPlan])

    def seconds(self, plan: PricedPlan) -> float:
        """
        Return the simulated seconds of a plan's step as it is emitted with its best size of buckets
        (`simulate.report.fastest_seconds`), memoised; the first call charges work to the budget.
        """
        if plan[0] not in self._seconds:
            spend(limits().work_candidate * len(plan[0].nodes()))
            self._seconds[plan[0]] = fastest_seconds(plan[0], self.machine, self.optimizer)
        return self._seconds[plan[0]]

    def plan(self, candidate: Candidate) -> PricedPlan:
        """Return the parallel graph of a candidate with its cost."""
        if candidate.graph not in self._plans:
            self._plans[candidate.graph] = candidate.graph, cost(candidate.graph, self.machine, self.optimizer)
        return self._plans[candidate.graph]

    def fastest(self, plans: Sequence[PricedPlan], candidates: Sequence[Candidate] = ()) -> PricedPlan:
        """
        Return the plan with the least simulated time as emitted, of `plans`, at least one, and of `candidates`,
        baselines that fit. Earlier plans are preferred: a later one must take less than `limits().faster` (a little
        below 1) times the best one's seconds. Plans after the first must also fit the memory.
        """
        best, *others = plans
        for plan in others:
            if self._is_faster(self.seconds(plan), best) and fits(*plan, self.optimizer):
                best = plan
        for candidate in candidates:
            if self._is_faster(candidate.emitted, best):
                self._seconds[candidate.graph] = candidate.emitted
                best = self.plan(candidate)
        return best

    def _is_faster(self, seconds: float, best: PricedPlan) -> bool:
        return seconds < self.seconds(best) * limits().faster
