"""
Exchange the rows of experts without a capacity where that is faster as emitted (`plan.routes`).

Searches look for such plans themselves (`layouts.exchanged`), by sums of seconds; here they are compared as emitted
with the same plan that gathers. Expert parallelism by hand that exchanges rows is one of the baselines
(`choose.candidates`).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from unity_ir.budget import OutOfBudget, own_budget
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.routes import OF_ROWS
from unity_ir.search.choose.candidates import SimulatedPlans
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
    result: SearchResult, machine: Machine, optimizer: Optimizer, imbalance: float | None
) -> SearchResult:
    """
    Return a search's result or, if it fits and is faster as emitted, that of the same plan with rows exchanged wherever
    they can be, at most `imbalance` times an even share to a device (None: as many as may come), or nowhere. The bound
    stays: it holds for plans that exchange rows, too.
    """
    if machine.devices == 1 or not any(node.op in OF_ROWS for node in result.graph.nodes()):
        return result
    own = result.graph, result.cost
    try:
        with own_budget():
            same = replace(result.graph, exchange_rows=0.0 if result.graph.exchange_rows else imbalance or inf)
            priced = same, cost(same, machine, optimizer)
            if not result.graph.exchange_rows and not any(r.stays_divided for r in priced[1].reshards):
                return result
            best = SimulatedPlans(machine, optimizer).fastest([own, priced])
    except OutOfBudget:
        return result
    if best[0] is result.graph:
        return result
    found = replace(result, graph=best[0], cost=best[1], joint=None)
    return replace(found, proved=min(result.proved or result.cost, best[1], key=lambda each: each.time))


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
