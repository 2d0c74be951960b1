"""
Exchange the rows of experts without a capacity where that is faster as emitted (`plan.routes`).

Searches look for such plans themselves (`layouts.exchanged`), by sums of seconds; here they are compared as emitted,
with the same plan that gathers, and with expert parallelism by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from unity_ir.budget import OutOfBudget, own_budget
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.routes import OF_ROWS
from unity_ir.search.baselines.recipe import Degrees, expert_degrees, recipe
from unity_ir.search.choose.candidates import PricedPlan, SimulatedPlans, fits
from unity_ir.search.recompute.fit import with_recompute_and_pieces
from unity_ir.search.result import SearchResult


def check_imbalance(imbalance: float | None) -> None:
    """Raise `UnityError` unless `imbalance` is None or a number of 1 or more."""
    if imbalance is not None and not 1 <= imbalance < inf:
        raise UnityError(f"search: imbalance is {imbalance}; it is a number of 1 or more")


def most_rows(graph: Graph, machine: Machine, is_allowed: bool, imbalance: float | None) -> float:
    """
    Return `Graph.exchange_rows` of the plans of a serial graph that a search is to look for: 0 if they may not exchange
    rows (`is_allowed`), or have none to exchange; else `imbalance`, or infinity for as many rows as may come.
    """
    has_rows = machine.devices > 1 and any(node.op in OF_ROWS for node in graph.nodes())
    return (imbalance or inf) if is_allowed and has_rows else 0.0


def exchanging_rows(
    result: SearchResult, machine: Machine, optimizer: Optimizer, imbalance: float | None, serial: Graph | None = None
) -> SearchResult:
    """
    Return a search's result or, if one that fits is faster as emitted, that of another plan: the plan found with rows
    exchanged wherever they can be, at most `imbalance` times an even share to a device (None: as many as may come), or
    nowhere; or those of expert parallelism of a `serial` graph by hand (`by_hand`). The bound stays where it is of the
    same graph: it holds for plans that exchange rows, too.
    """
    if machine.devices == 1 or not any(node.op in OF_ROWS for node in result.graph.nodes()):
        return result
    rows, emitted = imbalance or inf, SimulatedPlans(machine, optimizer)
    own = result.graph, result.cost
    with own_budget():
        try:
            same = replace(result.graph, exchange_rows=0.0 if result.graph.exchange_rows else rows)
            priced = same, cost(same, machine, optimizer)
            is_other = bool(result.graph.exchange_rows) or any(r.stays_divided for r in priced[1].reshards)
            others = () if serial is None else by_hand(serial, emitted, rows, emitted.seconds(own))
            best = emitted.fastest([own, *([priced] if is_other else []), *others])
        except OutOfBudget:
            return result
    if best[0] is result.graph:
        return result
    found = replace(result, graph=best[0], cost=best[1], joint=None)
    if best[0] is same:
        return replace(found, proved=min(result.proved or result.cost, best[1], key=lambda each: each.time))
    found = replace(found, derivation=(), waited=None, family="")
    return _bounded(found, None if result.derivation or result.waited is not None else result)


def _bounded(found: SearchResult, of_same: SearchResult | None) -> SearchResult:
    """
    Return a result with the bound of another of the same graph, of plans that gather rows or exchange them, and of the
    two plans' costs the one that is nearer to it; without a bound where there is none.
    """
    if of_same is None or of_same.bound is None:
        return replace(found, bound=None, proved=None)
    least = min(of_same.proved or of_same.cost, found.proved or found.cost, key=lambda each: each.time)
    return replace(found, bound=min(of_same.bound, least.time), proved=None if least is found.cost else least)


def faster_gathering(
    result: SearchResult, gathering: SearchResult, machine: Machine, optimizer: Optimizer
) -> SearchResult:
    """
    Return a search's result or, if its plan is faster as emitted, that of a search in which all plans gather rows, with
    the bound of the first, which holds for plans that exchange rows, too, if both are of one graph.
    """
    plans = [(each.graph, each.cost) for each in (result, gathering)]
    if SimulatedPlans(machine, optimizer).fastest(plans)[0] is result.graph:
        return result
    is_same = erase(result.graph) == erase(gathering.graph)
    return _bounded(gathering, result if is_same else None)


def only_exchanged(
    name: str, serial: Graph, machine: Machine, optimizer: Optimizer, imbalance: float | None
) -> SearchResult | None:
    """
    Return the fastest plan, as emitted, of those `by_hand`, as the result of strategy `name`; None if none
    does. For searches in which no plan fits that gathers rows. `imbalance` is as in `exchanging_rows`.
    """
    if machine.devices == 1:
        return None
    emitted = SimulatedPlans(machine, optimizer)
    fitting = [*by_hand(serial, emitted, imbalance or inf)]
    return SearchResult(name, *emitted.fastest(fitting)) if fitting else None


def by_hand(serial: Graph, emitted: SimulatedPlans, rows: float, faster_than: float = inf) -> Iterator[PricedPlan]:
    """
    Yield plans of expert parallelism that exchange rows, and fit: of each degree, the greatest first, with ZeRO-2, and
    unless that fits as it is also with ZeRO-3, each with recompute where it does not fit without. `rows` is as
    `Graph.exchange_rows`. `emitted` simulates them; those that would need recompute, and take `faster_than` seconds or
    as many as a plan before without it, are left out.
    """
    machine, optimizer = emitted.machine, emitted.optimizer
    for ep in reversed(expert_degrees(serial, machine, OF_ROWS)):
        for zero in (2, 3):
            try:
                plan = replace(recipe(serial, machine, Degrees(zero=zero, ep=ep)), exchange_rows=rows)
            except UnityError:
                return  # such as a batch that is not divisible
            priced = plan, cost(plan, machine, optimizer)
            is_whole = fits(*priced, optimizer)
            if not is_whole:
                if emitted.seconds(priced) >= faster_than:
                    continue
                plan = with_recompute_and_pieces(plan, "auto", None, machine, optimizer, compared=False)
                priced = plan, cost(plan, machine, optimizer)
                if not fits(*priced, optimizer):
                    continue
            faster_than = min(faster_than, emitted.seconds(priced))
            yield priced
            if is_whole:
                break
