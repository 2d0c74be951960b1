"""
Find the fastest choice for a graph among those that fit a device's memory, by Lagrangian relaxation.

    max over l >= 0 of  ( min over choices of seconds + l * bytes )  -  l * limit

is a lower bound on the seconds of all choices that fit (Everett, 1963). The exact search computes the minimum. It is
concave and piecewise linear in l, one line per choice: the next l is where the lines of a choice that fits and of one
that does not cross (Dinkelbach). The choices met on the way, and mixtures of them, are candidate plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, prod

from rich.filesize import decimal

from unity_ir.cost.memory import held, leaf_bytes
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.device import Device
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.pcg.sharding import pins_of
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.rules.derivation import RuleApplication
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import has_shared_moves, least_cost_bound, with_shared_moves, without_free_moves
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.joint.best_first import JointPlan
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import SPACE, Price
from unity_ir.search.memory.peak_descent import descend_to_limit
from unity_ir.search.memory.seconds_and_bytes import Choice, CostModel
from unity_ir.simulate.report import as_emitted

MORE = "more micro-batches, more devices or a smaller batch"
"""What a message advises where activations do not fit."""


@dataclass(frozen=True)
class FittingPlan:
    """
    The fastest plan of a serial graph found within a limit of bytes, and a lower bound on all plans for every price of
    a byte tried (`lines`), from which `bound` computes those within a limit.
    """

    graph: Graph
    """The serial graph."""
    plan: ExactPlan
    bytes: float
    """Bytes that a device holds at the end of the forward."""
    price: float
    """Seconds per byte at which the bound is greatest."""
    lines: tuple[tuple[float, float], ...]
    """For every price of a byte tried, (price, a lower bound on seconds + price * bytes of all choices)."""

    def bound(self, limit: float) -> float:
        """
        Return a lower bound in seconds on all plans of the serial graph that hold at most `limit` bytes on a device:
        the greatest of the Lagrangian bounds (least seconds + price * bytes, less price * limit) at all prices tried.
        """
        return max(least - price * limit for price, least in self.lines)


class NothingFits(UnityError):
    """
    Raised where no choice fits the limit of bytes.

    `plan` is the choice of the fewest `bytes`; `fastest` is a lower bound in seconds on all choices.
    """

    def __init__(self, plan: ExactPlan, bytes: float, fastest: float):
        super().__init__("search: no plan fits")
        self.plan = plan
        self.bytes = bytes
        self.fastest = fastest


@dataclass(frozen=True)
class SmallestPlan:
    """The error message where no plan fits, as text (`str`): what the smallest plan known needs, and advice."""

    needs: float
    """Bytes per device."""
    seconds: float
    """Seconds of its step."""
    device: Device
    advice: str
    """The fix that ends the message, such as a machine with more memory."""
    of: str = "found"
    """Which plan it is, in the words of the message."""

    def __str__(self) -> str:
        needs = shortage_text(self.needs, self.device)
        return (
            f"search: no plan fits: the smallest {self.of} {needs}, and takes {_text(self.seconds * 1e3)} ms; "
            f"{self.advice}"
        )


class Refused(UnityError):
    """
    Raised where the search finds no plan that fits a device; the baselines have not been tried yet, or do not fit
    either. `smallest` is the smallest plan known.
    """

    def __init__(self, message: str, smallest: SmallestPlan | None = None):
        super().__init__(message)
        self.smallest = smallest

    def naming_smaller(self, name: str, needs: float, seconds: float) -> Refused:
        """
        Return an error that names the baseline `name` as the smallest plan known, if it needs fewer bytes than the
        smallest plan that this error names; else this error itself.

        `needs` are the baseline's bytes per device, `seconds` its time per iteration.
        """
        if self.smallest is None or self.smallest.needs <= needs:
            return self
        least = replace(self.smallest, needs=needs, seconds=seconds, of=f"known, that of {name},")
        return Refused(str(least), least)


class Solvers:
    """
    Solvers of one machine, one for each price of a byte asked for; those for time alone, for bytes alone and for the
    last price are kept.
    """

    def __init__(self, solver: Solver):
        self.solver = solver
        self._last = self._space = solver.with_price(SPACE)

    def with_price(self, price: Price) -> Solver:
        """
        Return the solver that minimises the objective `price`, which has the cost of a second and that of a byte held.
        """
        if price == self.solver.price:
            return self.solver
        if price == SPACE:
            return self._space
        if price != self._last.price:
            self._last = self.solver.with_price(price)
        return self._last


class LagrangianCurve:
    """
    The choices for a serial graph that are optimal at some price of a byte, from the fastest to the smallest. A choice
    is a row for each variable of the graph's `CostModel`: how to shard each operator, and the layouts of its values.

    Choices and bounds are kept, so that a search under another limit starts from those on either side of it.
    """

    def __init__(self, solvers: Solvers, graph: Graph, fastest: ExactPlan | None = None):
        """Start from `fastest`, the optimum without a limit, if it is known."""
        self.solvers, self.graph = solvers, graph
        self.model = CostModel(solvers.solver, graph)
        fastest = fastest or with_shared_moves(solvers.solver, graph, solvers.solver.solve(graph))
        self.fastest = self.model.choice(fastest)
        self.lines = [(0.0, fastest.bound)]
        self.met = [self.fastest]
        self._at = {0.0: self.fastest}
        self.good: list[Choice] = []
        """Choices that were the fastest within some limit."""

    @cached_property
    def smallest(self) -> Choice:
        """
        The choice that holds the fewest bytes per device at the end of the forward, if a reshard that several operators
        share counted as a copy for each of them.
        """
        self.met.append(self.model.choice(self.solvers.with_price(SPACE).solve(self.graph)))
        return self.met[-1]

    def bytes(self, choice: Choice) -> float:
        """Return the bytes that a device holds at the end of the forward under a choice."""
        return self.model.costs(choice)[1]

    def seconds(self, choice: Choice) -> float:
        """Return the seconds of an iteration under a choice, each reshard that several operators share charged once."""
        return self.model.costs(choice)[0]

    def bound(self, limit: float) -> float:
        """
        Return a lower bound in seconds on all choices of at most `limit` bytes per device, from the prices of a byte
        solved so far.

        It holds if every operator pays for its own reshards; where several share one, use `with_sound_bounds`.
        """
        return max(least - price * limit for price, least in self.lines)

    def solve(self, price: float) -> Choice:
        """
        Return the choice that minimises seconds + `price` * bytes, where `price` is in seconds per byte held on a
        device; its lower bound is kept for `bound`. Memoised.
        """
        if price not in self._at:
            plan = self.solvers.with_price(Price(1.0, price)).solve(self.graph)
            self._at[price] = self.model.choice(plan)
            self.lines.append((price, plan.bound))
            self.met.append(self._at[price])
        return self._at[price]

    def fitting(self, limit: float) -> FittingPlan:
        """
        Return the fastest choice found that holds at most `limit` bytes per device, with lower bounds. These hold if
        every operator pays for its own reshards; where several share one, pass the result to `with_sound_bounds`.
        Raises `NothingFits` if there is no such choice.
        """
        if self.bytes(self.fastest) <= limit:
            return self._found(self.fastest, limit)
        if self.bytes(self.smallest) > limit:
            choice = min(self.met, key=self.bytes)
            if self.bytes(choice) > limit:
                raise NothingFits(self.model.plan(choice, 0.0), self.bytes(choice), self.lines[0][1])
        over = min((c for c in self.met if self.bytes(c) > limit), key=self.bytes)
        under = max((c for c in self.met if self.bytes(c) <= limit), key=self.bytes)
        good = [c for c in (*self.good, *self.met) if self.bytes(c) <= limit]
        best = _better(self.model, min(good, key=self.seconds), over, under, limit)
        for _ in range(limits().byte_prices):
            (low, much), (high, few) = self.model.costs(over), self.model.costs(under)
            if high <= low or self.seconds(best) <= self.bound(limit) * (1 + limits().close):
                # Either the choice that does not fit is not the faster one, or the bound is reached.
                break
            price = (high - low) / (much - few)
            met = self.solve(price)
            seconds, bytes = self.model.costs(met)
            if bytes <= limit:
                best = _better(self.model, best, over, met, limit)
            else:
                best = _better(self.model, best, met, under, limit)
            if seconds + price * bytes >= (low + price * much) * (1 - 1e-9):
                break
            over, under = (over, met) if bytes <= limit else (met, under)
        self.good.append(best)
        return self._found(best, limit)

    def descended(self, need: Callable[[ExactPlan, Graph], int], limit: float) -> FittingPlan | None:
        """
        Return a plan whose simulated peak memory is at most `limit` bytes per device, found by local search from the
        choices tried so far; None if none is found, or if the graph has more than `limits().peak_operators` operators.

        `need(plan, serial graph)` returns the bytes that a device must have for a plan, with its peak simulated.
        """
        if self.bytes(self.smallest) > limit and not has_shared_moves(self.graph):
            return None
        starts = sorted((*self.good, *self.met), key=self.bytes)
        operators = sum(n.is_compute for n in self.graph.nodes())
        found = descend_to_limit(
            self.model, starts, operators, lambda c: need(self.model.plan(c, 0.0), self.graph), limit
        )
        if found is None:
            return None
        faster = self.model.improved(found, self.bytes(found))
        fits = self.seconds(faster) < self.seconds(found) and need(self.model.plan(faster, 0.0), self.graph) <= limit
        return self._found(faster if fits else found, limit)

    def price(self, limit: float) -> float:
        """
        Return the price of a byte (seconds per byte), among those solved so far, at which the lower bound for `limit`
        bytes per device is greatest.
        """
        return max(self.lines, key=lambda line: line[1] - line[0] * limit)[0]

    def _found(self, choice: Choice, limit: float) -> FittingPlan:
        plan, bytes = self.model.plan(choice, 0.0), self.bytes(choice)
        return FittingPlan(self.graph, plan, bytes, self.price(limit), tuple(self.lines))

    def with_sound_bounds(self, found: FittingPlan) -> FittingPlan:
        """
        Return the plan `found` with its lower bounds replaced by ones that hold even where several operators share a
        reshard: at price 0 and at the plan's price of a byte.

        Returns `found` itself if no operators of the graph can share one.
        """
        if not has_shared_moves(self.graph):
            return found
        least = (
            least_cost_bound(self.solvers.with_price(Price(1.0, found.price)), self.graph)
            if found.price
            else self.lines[0][1]
        )
        return replace(found, lines=(self.lines[0], (found.price, least)))


def fitting(solver: Solver, graph: Graph, limit: float) -> FittingPlan:
    """
    Return the fastest plan found for a serial graph that holds at most `limit` bytes per device at the end of the
    forward, with lower bounds on all such plans.

    `solver` has the machine and minimises seconds. Raises `NothingFits` if there is none.
    """
    curve = LagrangianCurve(Solvers(solver), graph)
    return curve.with_sound_bounds(curve.fitting(limit))


def _better(model: CostModel, best: Choice, over: Choice, under: Choice, limit: float) -> Choice:
    """
    Return the fastest choice within the limit among the incumbent, `under`, and a mixture of `over` and `under` that
    local search improves; `over` exceeds the limit.
    """
    tried = [best, under]
    mixed = model.crossover(over, under, limit)
    if mixed is not None:
        tried.append(model.improved(mixed, limit))
    return min((c for c in tried if model.costs(c)[1] <= limit), key=lambda c: model.costs(c)[0])


def needed(graph: Graph, priced: PlanCost, optimizer: Optimizer) -> int:
    """
    Return the bytes a device must have for a plan: those held at the end of the forward or, if more, the simulated
    peak.

    `graph` is the plan's parallel forward graph, and `priced` its cost. The peak is simulated only where the sum of all
    buffers exceeds the device's memory, or is not known, as where buffers hold the most rows that may come.
    """
    if (
        graph.pipeline is None
        and not graph.exchange_rows
        and not not_kept(graph)
        and peak_upper_bound(graph, priced, optimizer) <= priced.machine.device.usable
    ):
        return priced.memory_bytes
    return max(priced.memory_bytes, as_emitted(graph, priced.machine, optimizer)[1])


def peak_upper_bound(graph: Graph, priced: PlanCost, optimizer: Optimizer) -> int:
    """
    Return an upper bound in bytes on a device's peak memory under a plan without recompute, without simulating it. It
    counts as if no buffer were freed, and each had a gradient; as if every value had, for each operator that reads it,
    a gradient as that operator makes it, one cast, and one added to others; and as if every move copied what it reads
    and what it makes.

    `graph` is the plan's parallel forward graph, and `priced` its cost.
    """
    placement = priced.placement
    values = [(v, placement.layouts[v]) for n in graph.nodes() if not n.is_parallel for v in n.results]
    weights = [r.value.node for r in priced.weight_reshards]
    found = held(values, weights, (), placement.mesh, optimizer)
    more = sum((m.elements + 2 * m.elements_after) * ELEMENT_BYTES[dtype] for m, dtype in priced.moves)
    read = (v.type for n in graph.nodes() if n.is_compute for v in n.operands if v.type.is_floating)
    more += sum(3 * prod(type.piece_shape) * ELEMENT_BYTES[type.grad_dtype] for type in read)
    most = sum(found.values())
    # The device that holds most may not be the one with most activations.
    return more + most + (most if any(map(pins_of, placement.assignments.values())) else found["activations"])


def joint_within(fastest: JointPlan, source: Graph, search: Callable[[Solver], JointPlan]) -> JointPlan:
    """
    Return `fastest` if it fits the device's memory, else the fastest plan found that does (Lagrangian relaxation).

    `source` is a serial graph, and `fastest` a plan for it or for a rewrite of it, found as if memory were not short.
    `search(solver)` searches again for rewrites and layouts of `source`, in the objective of `solver`.

    1. Search for rewrites at the best price of a byte for `source` (its Lagrange multiplier at the limit).
    2. Of `source`, the graph of `fastest` and the rewritten graph, take the fastest choice (a row per variable of its
       `CostModel`) that holds no more than the limit at the end of the forward. While its simulated peak is above the
       limit, allow fewer bytes there.
    3. If that finds no peak within the limit, lower the simulated peak by local search, from the choices tried.

    Raises `Refused` where nothing fits, which names the smallest plan met.
    """
    solver = fastest.solver
    priced = cost(fastest.graph, solver.spaces.machine, solver.optimizer)
    limit, held = priced.machine.device.usable, priced.memory_bytes
    if held <= limit and needed(fastest.graph, priced, solver.optimizer) <= limit:
        return fastest
    within = _SearchWithinMemory(fastest, source)
    within.rewrite(search)
    found = within.tighten() or within.descend()
    if found is None:
        raise _refused(*within.smallest, source, fastest.solver)
    return within.joint_plan(found)


class _SearchWithinMemory:
    """State and steps of `joint_within`: a curve of choices for each graph, and the smallest plan met."""

    def __init__(self, fastest: JointPlan, source: Graph):
        """Raises `Refused` if weights, gradients and optimizer state alone exceed the limit."""
        self.fastest, self.source, self.solver = fastest, source, fastest.solver
        self.limit = self.solver.spaces.machine.device.usable
        self.solvers = Solvers(self.solver)
        first = LagrangianCurve(self.solvers, source)
        if _states(source, self.solver) > self.limit:
            plan = first.model.plan(first.smallest, 0.0)
            raise _refused(self.needed(plan, source), plan, source, self.solver)
        self.curves = {source: first}
        self.derivations: dict[Graph, tuple[RuleApplication, ...]] = {source: (), fastest.rewritten: fastest.derivation}
        self.interrupted = fastest.interrupted
        self.smallest: tuple[float, ExactPlan] = inf, fastest.plan
        """Bytes per device of the smallest plan that `tighten` met, and the plan."""

    def needed(self, plan: ExactPlan, graph: Graph) -> int:
        """Return the bytes a device must have for a plan of a serial graph."""
        return _needed(plan, graph, self.solver)

    def rewrite(self, search: Callable[[Solver], JointPlan]) -> None:
        """Search for rewrites at the byte price of the source graph; make a curve for every graph found."""
        if not self.interrupted:
            try:
                price = Price(1.0, self.curves[self.source].fitting(self.limit).price)
            except NothingFits:
                price = SPACE
            rewritten = search(self.solvers.with_price(price))
            self.derivations.setdefault(rewritten.rewritten, rewritten.derivation)
            self.interrupted = rewritten.interrupted
        others = [graph for graph in self.derivations if graph is not self.source]
        self.curves |= {graph: LagrangianCurve(self.solvers, graph) for graph in others}

    def tighten(self) -> FittingPlan | None:
        """Return the fastest choice found whose simulated peak is within the limit; None after `peak_rounds` tries."""
        low, target = 0.0, float(self.limit)
        for _ in range(limits().peak_rounds):
            found = _fastest(self.curves.values(), target)
            needs = self.needed(found.plan, found.graph)
            if needs <= self.limit:
                return found
            if needs < self.smallest[0]:
                self.smallest = needs, found.plan
            if found.bytes > target == self.limit:
                return None
            if found.bytes > target:
                # No choice holds so little; allow more: least at the end of the forward need not mean the least peak.
                low, target = target, (target + self.limit) / 2
            else:
                target = max(found.bytes - (needs - self.limit), (low + target) / 2)
        return None

    def descend(self) -> FittingPlan | None:
        """Return the first choice that local search on the simulated peak brings within the limit."""
        found = (curve.descended(self.needed, self.limit) for curve in self.curves.values())
        return next((choice for choice in found if choice is not None), None)

    def joint_plan(self, found: FittingPlan) -> JointPlan:
        """Return the joint search's result for a choice, with a lower bound on all that fit."""
        found = self.curves[found.graph].with_sound_bounds(found)
        spaces, graph = self.solver.spaces, found.graph
        return replace(
            self.fastest,
            graph=realise(graph, found.plan, self.solver),
            bound=without_free_moves(found.bound(self.limit), graph, spaces.machine) if spaces.axis_by_axis else None,
            derivation=self.derivations[graph],
            rewritten=graph,
            plan=found.plan,
            price=found.price,
            interrupted=self.interrupted,
        )


def _needed(plan: ExactPlan, graph: Graph, solver: Solver) -> int:
    made = realise(graph, plan, solver)
    return needed(made, cost(made, solver.spaces.machine, solver.optimizer), solver.optimizer)


def _refused(needs: float, plan: ExactPlan, source: Graph, solver: Solver) -> Refused:
    """
    Return the error for the smallest plan found, with a lower bound on all plans if that is over the limit already.
    """
    machine = solver.spaces.machine
    limit, least = machine.device.usable, _states(source, solver)
    over = least > limit
    alone = f"weights, gradients and the optimizer's state alone, in equal parts, take {size_text(least)}; "
    advice = f"{alone}use more devices or a smaller model" if over else f"use {MORE}"
    smallest = SmallestPlan(needs, plan.seconds, machine.device, advice)
    return Refused(str(smallest), smallest)


def shortage_text(needs: float, device: Device) -> str:
    """
    Return text for an error message: the bytes that a plan `needs` per device, and by how much they exceed those that a
    plan may take of the device.
    """
    return f"needs {size_text(needs)} per device, {size_text(needs - device.usable)} more than {device.limit_text}"


def size_text(bytes: float) -> str:
    """Return a number of bytes as messages print it: `79.87 GB`."""
    return decimal(ceil(bytes), precision=2)


def _text(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


def _states(graph: Graph, solver: Solver) -> float:
    """Return the bytes per device of weights, gradients and optimizer state, if all were sharded evenly."""
    with_gradient = nodes_with_gradient(graph)
    held = sum(
        leaf_bytes(n, n in with_gradient, solver.optimizer) * n.types[0].elements
        for n in graph.nodes()
        if n.op == "weight"
    )
    return held / solver.spaces.machine.devices


def _fastest(curves: Iterable[LagrangianCurve], limit: float) -> FittingPlan:
    """Return the fastest plan within the limit on any of the curves; the smallest plan where none fits."""
    best: FittingPlan | None = None
    smallest: FittingPlan | None = None
    for curve in curves:
        if best is not None:
            # Skip a curve whose bound, at the price of the best plan so far, cannot beat that plan.
            curve.solve(best.price)
            if curve.bound(limit) >= min(best.bound(limit), best.plan.seconds * (1 - limits().close)) * (1 - 1e-9):
                continue
        try:
            found = curve.fitting(limit)
        except NothingFits as error:
            if smallest is None or error.bytes < smallest.bytes:
                smallest = FittingPlan(curve.graph, error.plan, error.bytes, 0.0, ((0.0, error.fastest),))
            continue
        if best is None or found.plan.seconds < best.plan.seconds * (1 - 1e-9):
            best = found
    found = best or smallest
    assert found is not None
    return found
