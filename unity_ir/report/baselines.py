"""Price the plans that people make by hand for a plan's model, to compare it with."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from unity_ir.cost.plan import PlanCost
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.choose.candidates import Baselines
from unity_ir.search.memory.lagrangian import needed


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan of a model on a machine, with what it costs, to be compared with others of the same."""

    name: str
    seconds: float | None
    """Simulated seconds as emitted; None for a plan that does not fit."""
    waiting: float
    """Seconds of all kernels and moves one after the other."""
    bytes: int
    """Bytes that a device needs."""


def with_baselines(graph: Graph, plan: PlanCost, seconds: float) -> list[Alternative]:
    """
    Return the plan of a placed graph, as the first alternative, then plans that people make by hand for the same model
    (the baselines of every search), fastest first, and those that do not fit a device last. The baselines compute the
    whole batch at once (without micro-batches).

    `plan` is the cost of the graph, `seconds` its simulated time as emitted. Raises `UnityError` for a graph that has
    its backward already.
    """
    if graph.updates:
        raise UnityError(f"@{graph.name}: baselines are of a forward, but it has its backward; plan the forward alone")
    optimizer = graph.optimizer or Optimizer()
    candidates = Baselines(plan.machine, optimizer)((erase(graph), "usual"))
    found = [Alternative(c.name, c.emitted if isfinite(c.emitted) else None, c.seconds, c.needs) for c in candidates]
    own = Alternative("this plan", seconds, plan.time, needed(graph, plan, optimizer))
    return [own, *sorted(found, key=lambda a: (a.seconds is None, a.seconds or a.waiting))]
