"""What `--stats` says of the simulated iteration."""

from __future__ import annotations

from unity_ir.cost.plan import PlanCost
from unity_ir.cost.stats import Simulated
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.full import simulate
from unity_ir.simulate.memory import memory


def simulated(graph: Graph, plan: PlanCost, optimizer: Optimizer | None = None) -> Simulated:
    """The simulated iteration of a graph that costs `plan`."""
    overlapped = simulate(task_graph(graph, plan, optimizer))
    waiting = simulate(task_graph(graph, plan, optimizer, overlap=False))
    peak = max(memory(overlapped, k).peak for k in range(overlapped.tasks.streams.classes))
    return Simulated(overlapped.seconds, waiting.seconds, peak)
