"""
Recompute in a plan, as asked for; by itself (`auto`), as little as makes the plan fit a device.

`auto` lowers the bytes that are saved until the simulated peak is within the limit: the values that are cheapest to
recompute for the bytes they take come first, at one price per byte in all layers (`chosen.Recomputable`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

from unity_ir.budget import spend
from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.moves import ByIdentity
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.recompute.chosen import ANY_PRICE, Recomputable, check_kind, in_blocks, in_groups


def recomputed(
    plan: Graph,
    kind: str,
    machine: Machine,
    optimizer: Optimizer,
    whole: Callable[[Graph], Graph] | None = None,
    *,
    weights: bool = False,
) -> Graph:
    """
    Return a placed forward graph with recompute of a kind (`chosen.KINDS`); marks that it has already stay. If `auto`
    finds none with which the plan fits a device of `machine`, the one with which it needs the least memory.

    `whole` returns the plan of the step of which `plan` is that of a micro-batch; None if it is that step. With
    `weights`, `auto` may also gather weights again for the backward instead of keeping what was gathered. Raises
    `UnityError` for another kind, and where there are no layers to recompute.
    """
    check_kind(kind)
    if kind == "none":
        return plan
    if kind == "block":
        return in_blocks(plan)
    if kind == "all":
        return in_groups(plan)
    if kind == "attention":
        few = Recomputable.of(cost(plan, machine, optimizer), plan, with_products=False)
        return few.marked(few.at(ANY_PRICE))
    if whole is None:
        return _fitted(plan, ByIdentity(machine), optimizer, weights)
    return _fitting(plan, machine, optimizer, whole, weights)


@lru_cache(maxsize=64)
def _fitted(plan: Graph, machine: ByIdentity, optimizer: Optimizer, weights: bool) -> Graph:
    return _fitting(plan, machine.machine, optimizer, lambda plan: plan, weights)


def _fitting(
    plan: Graph, machine: Machine, optimizer: Optimizer, whole: Callable[[Graph], Graph], weights: bool
) -> Graph:
    """Return the plan with the least recompute that fits a device; with that of the least peak, if none does."""
    limit = machine.device.usable

    @cache
    def priced(plan: Graph) -> PlanCost:
        step = whole(plan)
        spend(limits().work_candidate * len(step.nodes()))
        return cost(step, machine, optimizer)

    @cache
    def need(plan: Graph) -> int:
        # What is held at the end of the forward may be too much already: then the peak is not simulated.
        held = priced(plan).memory_bytes
        return held if held > limit else needed(whole(plan), priced(plan), optimizer)

    if need(plan) <= limit:
        return plan
    alone = cost(plan, machine, optimizer)
    if alone.memory_bytes - alone.memory["activations"] > limit:
        return plan  # weights and what belongs to them are too large by themselves
    tried = [plan]
    for by_groups in (False, True):
        within = Recomputable.of(alone, plan, True, by_groups, weights)
        found = _least(within, need(plan) - limit, need, limit)
        if need(found) <= limit:
            return found
        tried.append(found)
    return min(tried, key=need)


def _least(within: Recomputable, over: int, need: Callable[[Graph], int], limit: int) -> Graph:
    """
    Return the plan with the fewest seconds of recompute found that fits; if none does, the one with all there can be.

    `over` is by how many bytes the plan without recompute exceeds the limit, at least.
    """
    none, most = tuple(frozenset[int]() for _ in within.layers), within.marked(within.at(ANY_PRICE))
    best, low, high = None, within.bytes(within.at(ANY_PRICE)), within.bytes(none)
    spare = limits().spare_memory * limit
    target = high - over - spare / 2
    for _ in range(limits().peak_rounds):
        # Bytes that are saved between those of a plan that fits and one that does not.
        if not low < target < high:
            if best is None and need(most) > limit:
                break
            best, target = best or most, (low + high) / 2
        again = within.with_least_time(target)
        assert again is not None
        plan = within.marked(again)
        over = need(plan) - limit
        if over <= 0:
            best, low = plan, target
            if -over < spare:
                break
        else:
            high = target
        # Bytes that are saved come in steps: aim at the middle of what may be left free.
        target -= over + spare / 2
    return best or most
