"""Summarise the simulated iteration for `--stats`."""

from __future__ import annotations

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.cost.stats import Simulated
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.full import Timeline, simulate
from unity_ir.simulate.memory import memory


def simulated(graph: Graph, plan: PlanCost, optimizer: Optimizer | None = None) -> Simulated:
    """
    Return the simulated times of an iteration, overlapped and not, and its peak memory, for a
    graph whose cost is `plan`.

    `optimizer` is used if the graph names none.
    """
    overlapped = simulate(task_graph(graph, plan, optimizer))
    waiting = simulate(task_graph(graph, plan, optimizer, overlap=False))
    return Simulated(overlapped.seconds, waiting.seconds, peak(graph, plan, optimizer, overlapped))


def peak(graph: Graph, plan: PlanCost, optimizer: Optimizer | None = None, timeline: Timeline | None = None) -> int:
    """
    Return the peak memory of an overlapped iteration: the most bytes a device holds at once.

    `timeline` is the simulated iteration, if it is known. A forward with recomputed operators is simulated as the
    differentiated step, where it is explicit when they run.
    """
    if not graph.updates and not_kept(graph):
        graph = differentiate(graph, graph.optimizer or optimizer or Optimizer(), plan.machine.mesh)
        plan, timeline = cost(graph, plan.machine), None
    timeline = timeline or simulate(task_graph(graph, plan, optimizer))
    return max(memory(timeline, k).peak for k in range(timeline.tasks.streams.classes))
