"""Find plans that are fastest if a part of the seconds of their weights' moves is hidden behind kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unity_ir.cost.plan import cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.choose.candidates import PricedPlan
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.joint.best_first import JointPlan
from unity_ir.search.layouts.objective import Price

Shares = Sequence[float]
"""Shares (0 to 1) of the seconds of weights' moves that are taken to be free, as overlapped with kernels, ascending."""


def plans_with_hidden_moves(
    found: JointPlan,
    machine: Machine,
    optimizer: Optimizer,
    shares: Shares,
    meanwhile: Callable[[Graph], object] = lambda _: None,
) -> Iterator[tuple[Shares, PricedPlan]]:
    """
    Yield further plans of `found.rewritten`, each with its cost, and before it the share for which it is optimal: one
    of the ascending `shares` of the seconds of weights' moves that is taken to be free, as overlapped with kernels.
    Plans equal to `found.graph` are left out; yields none where memory is short (`found.price` above 0). `meanwhile` is
    called with each plan as soon as it is found.
    """

    def fastest(share: float) -> Graph:
        solver = found.solver.with_price(Price(hidden=share))
        plan = realise(found.rewritten, solver.solve(found.rewritten), solver)
        if plan != found.graph:
            meanwhile(plan)
        return plan

    def between(low: Graph, shares: Shares, high: Graph) -> dict[Graph, float]:
        """
        Return plans for the shares between two; a plan's cost is linear in the share, so equal ends need no search.
        """
        if not shares or low == high:
            return {}
        *others, share = shares
        middle = fastest(share)
        return between(low, others, middle) | {middle: share}

    if found.price == 0 and shares:
        *others, most = shares
        last = fastest(most)
        plans = between(found.graph, others, last)
        for plan, share in (plans | {last: plans.get(last, most)}).items():
            if plan != found.graph:
                yield (share,), (plan, cost(plan, machine, optimizer))
