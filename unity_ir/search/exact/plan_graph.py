"""Write an exact plan as a parallel graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, Assignment, GridRole, Layout, as_layout
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.axes import AxisGroup, Ints
from unity_ir.search.layouts.exchanged import exchanges_rows


def realise(graph: Graph, plan: ExactPlan, solver: Solver) -> Graph:
    """
    Return the parallel graph of an exact plan for the serial `graph`: its operators sharded, with machine views and the
    parallel operators that reshard values between them. `solver` is the one that found the plan.
    """
    assignments, rests, relays = placed(graph, plan, solver)
    found = materialise(graph, assignments, solver.spaces.machine.mesh, rests, relays, plan.again)
    return replace(found, exchange_rows=solver.spaces.exchange_rows) if exchanges_rows(assignments.values()) else found


def placed(
    graph: Graph, plan: ExactPlan, solver: Solver
) -> tuple[dict[Node, Assignment], dict[Value, Layout], dict[Value, Layout]]:
    """
    Return an exact plan as three mappings, with a role per mesh axis: (assignment of each operator, layouts at rest,
    layouts of relays).

    A leaf (input, weight or constant) is stored in its layout at rest. If several operators read it, it is resharded
    once to the layout of its relay, and from there by each of them; else the two are the same. A computed value with
    several users is resharded once, as soon as it is made, to the layout of its relay, which is its layout at rest,
    too. `graph` is the serial graph, `solver` the one that found the plan.
    """
    groups, with_gradient = solver.spaces.groups, nodes_with_gradient(graph)
    assignments: dict[Node, Assignment] = {}
    for node, row in plan.rows.items():
        table = solver.table(node, with_gradient)
        assignments[node] = roles_of_axes(groups, table.roles, table.counts[row])

    def layout(value: Value, number: int) -> Layout:
        space = solver.space(value)
        names = (*range(space.rank), COPY, SUM, REPEAT)
        return as_layout(roles_of_axes(groups, names, space.counts[number]))

    found = {value: layout(value, number) for value, number in plan.layouts.items()}
    rests = {value: layout(value, number) for value, number in plan.rests.items()}
    return assignments, {**found, **rests}, found


def roles_of_axes(groups: Sequence[AxisGroup], names: Sequence[GridRole], counts: Ints) -> Assignment:
    """
    Return the role of each mesh axis, outermost first, given the role of each group of axes.

    `names` are the possible roles, such as an index variable or dim to divide; `counts` [group, role] is one-hot per
    group: 1 at the index in `names` of its role.
    """
    return tuple(names[int(row.argmax())] for g, row in zip(groups, counts, strict=True) for _ in g.axes)
