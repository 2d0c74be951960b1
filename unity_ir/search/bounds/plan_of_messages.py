"""
Find a plan where messages (TRW-S) have bounded all plans that count equal mesh axes.

The bound comes with how much worse than it any choice with a row must be, the row's slack. Among the rows of least
slack the best choice is searched exactly, and its axes are named (`search/bounds/assign_axes.py`). On machines of many
axes with few samples it is often faster than the plan of grouped axes, in which neighbouring axes have one role.
"""

from __future__ import annotations

import numpy as np

from unity_ir.pcg.graph import Graph
from unity_ir.search.bounds.assign_axes import assign_axes, is_planned_soon
from unity_ir.search.bounds.refine import two_way_cost
from unity_ir.search.exact.elimination import Memo
from unity_ir.search.exact.factor_graph import DenseCost, Edge, FactorGraph, PairwiseCost
from unity_ir.search.exact.known_messages import PLAIN, KnownMessages, Start
from unity_ir.search.exact.minimum import minimum
from unity_ir.search.exact.shared_moves import ScaledCost
from unity_ir.search.exact.solver import FactorGraphBuilder
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.layouts.limits import limits


def plan_of_messages(graph: Graph, builder: FactorGraphBuilder, messages: Messages) -> Graph | None:
    """
    Return a parallel graph of the serial `graph`: of the best choice among the rows of least slack of each variable
    (`limits().counted_rows`), with axes named; None where naming them, or planning its moves, takes long.

    `builder` made the factor graph of `messages`; in its layouts equal axes are counted, and all dims told apart.
    """
    rows = [np.sort(np.argsort(slack, kind="stable")[: limits().counted_rows]) for slack in messages.slack]
    few = _tabulated(messages.problem.among(rows))
    seconds, chosen, least = minimum(few, Memo(), Start(KnownMessages(), (), [PLAIN] * len(few.rows)))
    plan = assign_axes(graph, builder.chosen(few, seconds, chosen, least), builder.solver)
    return plan if plan is not None and is_planned_soon(plan, builder.solver.spaces.machine) else None


def _tabulated(problem: FactorGraph) -> FactorGraph:
    """Return a factor graph with the same costs in dense tables."""
    tables: dict[int, DenseCost] = {}
    edges: list[Edge] = []
    for edge in problem.edges:
        key = id(edge.between)
        if key not in tables:
            tables[key] = DenseCost(edge.made, edge.needs, _share(edge.between) * two_way_cost(edge).seconds)
        edges.append(Edge(edge.source, edge.target, tables[key]))
    return FactorGraph(problem.rows, problem.seconds, problem.own, edges)


def _share(cost: PairwiseCost) -> float:
    return cost.share if isinstance(cost, ScaledCost) else 1.0
