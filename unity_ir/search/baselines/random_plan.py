"""Draw random legal plans, for tests and calibration."""

from __future__ import annotations

from random import Random

import numpy as np

from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.axis_groups import first_cuts
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.space import Spaces


def sample(graph: Graph, machine: Machine, seed: int) -> Graph:
    """
    Return a random parallel graph of a serial one, for tests and calibration. These are drawn from `seed`: the sharding
    of every operator, the layout in which each leaf is stored, and the layout in which all users of a value read it, if
    there are several. The plan need not fit the memory.

    On machines with more than `limits().exact_axes` mesh axes, neighbouring axes form groups, and all axes of a group
    have the same role.
    """
    solver = Solver(
        Spaces(machine, first_cuts(machine, min(limits().exact_axes, len(machine.mesh.sizes)))), Optimizer()
    )
    nodes = graph.nodes()
    with_gradient = nodes_with_gradient(graph)
    users = graph.users()
    random = Random(seed)
    rows: dict[Node, int] = {}
    layouts: dict[Value, int] = {}
    for node in nodes:
        if node.is_leaf:
            layouts[node.result] = random.choice(
                [int(i) for i in np.flatnonzero(np.isfinite(solver.rest(node, with_gradient)))]
            )
            continue
        rows[node] = random.randrange(len(solver.table(node, with_gradient)))
        for value in node.results:
            if len(users.get(value, ())) > 1:
                layouts[value] = random.randrange(len(solver.space(value)))
    return realise(graph, ExactPlan(0.0, rows, layouts), solver)
