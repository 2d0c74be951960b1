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
    The plan, what it costs, how it was derived, and a bound.

    `bound` is the least time (seconds) any placement of the final, rewritten graph on all devices can have under the
    cost model, in which moves are waited for. As emitted, with moves beside kernels and branches on parts of the
    machine, plans may take less; the one that then takes least need not be the one nearest to the bound.
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
    proved: PlanCost | None = None
    """Cost of the plan nearest to the bound, where another is faster as emitted."""

    @property
    def gap(self) -> float | None:
        """Relative gap between the bound and the plan nearest to it."""
        return None if not self.bound else (self.proved or self.cost).time / self.bound - 1
