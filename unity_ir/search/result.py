"""Define the result of a search."""

from __future__ import annotations

from dataclasses import dataclass

from unity_ir.budget import Budget
from unity_ir.cost.plan import PlanCost
from unity_ir.pcg.graph import Graph
from unity_ir.rules.derivation import RuleApplication
from unity_ir.search.joint.best_first import JointPlan


@dataclass(frozen=True)
class SearchResult:
    """
    The plan that a search found (`graph`, placed), its cost, the rewrites that led to it (`derivation`), and a lower
    bound.

    `bound` is a lower bound in seconds, None without one, on every plan of the final, rewritten graph with all
    operators on all devices, under the cost model in which every move is waited for: on those that keep what the
    backward reads or, if the returned plan recomputes, on all that fit a device. The returned plan is chosen by
    simulated time, with communication overlapped, maybe branches on parts of the machine, or as ZeRO-3: it may be
    faster than `bound`, and need not be the one nearest to it.
    """

    strategy: str
    graph: Graph
    cost: PlanCost
    derivation: tuple[RuleApplication, ...] = ()
    bound: float | None = None
    explored: int = 1
    """Graphs whose optimal parallelization was computed."""
    seconds: float = 0.0
    """Seconds the search took."""
    joint: JointPlan | None = None
    """What the joint search found, which `search.explain` explains."""
    interrupted: bool = False
    """Whether it ended early, by Ctrl-C or its budget: this is the best plan until then."""
    budget: Budget | None = None
    """Work allowed and spent."""
    of_micro_batch: PlanCost | None = None
    """Cost of the plan of one micro-batch, where a step has several: that which `search.explain` explains."""
    proved: PlanCost | None = None
    """Cost of the plan nearest to the bound, where another is faster as emitted."""
    family: str = ""
    """Of a pipeline: which pipelines `bound` bounds, in seconds of a step whose moves are all waited for."""
    waited: float | None = None
    """Of a pipeline: the seconds of its step if all moves are waited for, as the search and its bound have them."""

    runner_up: Graph | None = None
    """
    Where memory is short, the next plan, if it takes at most `limits().about_equal` times as long: it may become the
    faster one once state or activations go to the host.
    """

    @property
    def gap(self) -> float | None:
        """
        How far the plan is above the lower bound, as a fraction: (seconds - bound) / bound; None without a bound.
        Seconds and bound are those of a step whose moves are all waited for. The returned plan is the fastest as
        emitted; if the search found another one that is nearer to the bound, the seconds are those of that other plan
        (`proved`).
        """
        if not self.bound:
            return None
        return (self.waited or (self.proved or self.cost).time) / self.bound - 1
