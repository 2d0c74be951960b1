"""
What others would do, as a floor: on machines too large to search axis by axis, no plan by hand is left to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.search.data_parallel import data_parallel
from unity_ir.search.expert import expert
from unity_ir.search.memory import needed
from unity_ir.search.tofu import tofu

ByHand = Callable[[Graph, Machine, Optimizer], Graph]

BY_HAND: Sequence[ByHand] = (
    lambda graph, machine, _: data_parallel(graph, machine),
    expert,
    lambda graph, machine, _: tofu(graph, machine),
)


def fastest_by_hand(
    graph: Graph, machine: Machine, optimizer: Optimizer, than: PlanCost
) -> tuple[Graph, PlanCost] | None:
    """The fastest plan by hand of a serial graph that fits the devices, if one is faster than a plan of this cost."""
    best: tuple[Graph, PlanCost] | None = None
    for strategy in BY_HAND:
        try:
            plan = strategy(graph, machine, optimizer)
        except UnityError:
            continue  # such as a batch that is not divisible
        priced = cost(plan, machine, optimizer)
        if priced.time >= (best[1] if best else than).time * (1 - 1e-9):
            continue
        if needed(plan, priced, optimizer) <= machine.device.memory:
            best = plan, priced
    return best
