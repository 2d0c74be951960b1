"""
Find layouts for a step that recomputes, where memory is short.

A plan that is the fastest without a limit is no good start: what it keeps in many layouts may be cheap to make again in
others. So layouts are searched once more, at a price of a byte at which every value is kept or made again, whichever
costs less (`layouts.objective.Price.again`). The price is that at which the fastest plan recomputes just enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.axis_groups import first_cuts
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import least_cost_bound, without_free_moves
from unity_ir.search.exact.solver import Solver
from unity_ir.search.joint.best_first import JointPlan
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.recompute.chosen import ANY_PRICE, Recomputable
from unity_ir.search.recompute.fit import with_recompute_and_pieces


def price_of_memory(plan: Graph, machine: Machine, optimizer: Optimizer) -> float:
    """
    Return the price of a byte, in seconds per byte, at which a placed forward graph recomputes, and gathers weights
    again, just enough to fit a device. It is 0 if the graph fits as it is. If nothing makes it fit, it is the price at
    which the graph keeps as few bytes as it can.
    """
    priced = cost(plan, machine, optimizer)
    limit = machine.device.usable
    held = priced.memory_bytes
    over = (held if held > limit else needed(plan, priced, optimizer)) - limit
    if over <= 0:
        return 0.0
    values = Recomputable.of(priced, plan, with_products=True, with_weights=True)
    most = values.bytes(tuple(frozenset[int]() for _ in values.layers)) - over
    least = values.bytes(values.at(ANY_PRICE))
    return values.price(max(most, least)) or 0.0


@dataclass(frozen=True)
class LayoutsWithRecompute:
    """
    The best layouts of a graph where memory is short, as plans that do not recompute yet; `plans` adds recompute. The
    layouts are searched at a price of a byte, and each value costs its bytes or the seconds of making it again,
    whichever is less. Where the price is 0, they are the fastest layouts without a limit of memory.
    """

    of: JointPlan
    """The plan of the graph as if memory were not short."""
    price: float
    """In seconds per byte."""
    least: float
    """Seconds of the best layouts, with `price` charged for each byte held."""
    layouts: tuple[Graph, ...]
    """
    The parallel graph of the least seconds + price * bytes; where the solver groups mesh axes otherwise than by the
    machine's levels, also the best one grouped by levels, with the greatest of `limits().hidden_shares` of the moves of
    weights free.
    """

    def plans(self, optimizer: Optimizer) -> list[Graph]:
        """
        Return plans in these layouts, each with as little recompute as makes it fit a device, and with the loss in
        pieces if recompute alone does not. A plan that nothing makes fit is the one found that needs the least memory.
        Of graphs with few operators, the layouts that are the fastest without a limit of memory are tried, too.
        """
        few = sum(n.is_compute for n in self.of.rewritten.nodes()) <= limits().rival_operators
        kept = [*self.layouts, self.of.graph] if few and self.of.graph not in self.layouts else self.layouts
        machine = self.of.solver.spaces.machine
        return [
            with_recompute_and_pieces(plan, "auto", None, machine, optimizer, weights=True, compared=False)
            for plan in kept
        ]

    def bound(self) -> float:
        """
        Return a lower bound in seconds on every plan of the graph that fits a device, whatever it recomputes and
        gathers again: the greater of the Lagrangian bound at the price, and of the bound on plans without a limit of
        memory. Call it only if every mesh axis may have a role of its own (`Spaces.axis_by_axis`).
        """
        graph, solver = self.of.rewritten, self.of.solver
        machine = solver.spaces.machine
        least = (
            without_free_moves(least_cost_bound(solver, graph), graph, machine)
            if self.of.bound is None
            else self.of.bound
        )
        if not self.price:
            return least
        again = (
            least_cost_bound(solver.with_price(Price(1.0, self.price, again=True)), graph)
            - self.price * machine.device.usable
        )
        return max(least, without_free_moves(again, graph, machine))


def price_where_short(found: JointPlan, source: Graph, optimizer: Optimizer) -> float:
    """
    Return the price of a byte, in seconds per byte, at which `layouts_with_recompute` searches: that of the plan of
    `source`, or of `found` itself where its search did not rewrite (`price_of_memory`).
    """
    first = _of_both_graphs(found, source)[0]
    return price_of_memory(first.graph, found.solver.spaces.machine, optimizer)


def _of_both_graphs(found: JointPlan, source: Graph) -> list[JointPlan]:
    """Return the fastest plan of `source` without a limit of memory, if `found` is of another graph, and `found`."""
    if not found.derivation or found.source is None:
        return [found]
    before = realise(source, found.source, found.solver)
    return [replace(found, graph=before, rewritten=source, plan=found.source, bound=None, derivation=()), found]


def layouts_with_recompute(found: JointPlan, source: Graph, optimizer: Optimizer) -> Iterator[LayoutsWithRecompute]:
    """
    Yield the best layouts where memory is short, for up to two graphs: that of `found`, the fastest plan without a
    limit of memory, and `source`, the graph before rewrites, since some rewrites save time but keep more bytes. The
    graph that costs less at the price of a byte comes first. If the plan of `source` fits as it is, yield only the
    layouts of `found`, at price 0.
    """
    solver, alike = found.solver, _of_both_graphs(found, source)
    price = price_of_memory(alike[0].graph, solver.spaces.machine, optimizer)
    if not price:
        yield LayoutsWithRecompute(found, 0.0, found.plan.seconds, (found.graph,))
        return
    priced = solver.with_price(Price(1.0, price, again=True))
    solved = [(of, priced.solve(of.rewritten)) for of in alike]
    solved.sort(key=lambda each: each[1].seconds)

    def by_level(graph: Graph) -> list[Graph]:
        levels = first_cuts(solver.spaces.machine, len(solver.spaces.groups))
        if solver.spaces.axis_by_axis or levels == solver.spaces.cuts:
            return []
        spaces = Spaces(solver.spaces.machine, levels)
        overlapped = Solver(spaces, optimizer).with_price(Price(1.0, price, limits().hidden_shares[-1], again=True))
        return [realise(graph, overlapped.solve(graph), overlapped)]

    for of, best in solved:
        layouts = realise(of.rewritten, best, priced), *by_level(of.rewritten)
        yield LayoutsWithRecompute(of, price, best.seconds, tuple(dict.fromkeys(layouts)))
