"""
Place equal operators side by side, each on a part of the machine: embedding tables, towers, experts.

The exact search puts every operator on all devices. Here equal independent operators of a plan are pinned in turn along
the innermost axes; a short MCMC chain (`search/flexflow/mcmc.py`) improves the fastest few by simulated time. If no
placement is worth that, operators that are unlike all others are tried under every assignment, one by one; in large
graphs only the first ones, such as a transformer's embedding: their gradients are reduced last, with no kernels left to
overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, GridRole, pinned_at
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.baselines.expert import expert
from unity_ir.search.choose.candidates import PricedPlan, estimated
from unity_ir.search.flexflow.mcmc import Assignments, Settings, assignments_of, mcmc
from unity_ir.search.layouts.limits import limits
from unity_ir.simulate.choices import fits, possible_roles
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.streams import TICKS, pinned_axes


def place_siblings(graph: Graph, machine: Machine, optimizer: Optimizer, plan: Graph) -> PricedPlan | None:
    """
    Return a plan, with its cost, in which equal independent operators (embedding tables, towers, experts) run at once
    on disjoint parts of the machine; or, if that does not pay, one in which operators that have no equal are sharded in
    another way than in `plan`.

    `plan` is a parallel graph of the serial `graph`. Returns None if no such plan is likely to simulate faster than it.
    Callers check that it fits the memory, and simulate it as emitted.
    """
    if machine.devices == 1:
        return None
    large = sum(n.is_compute for n in graph.nodes()) > limits().sibling_operators
    sets = [] if large else _alike(graph)
    odd = _odd(graph, large)
    if not sets and not odd:
        return None
    scored: dict[int, Assignments] = {}
    by_axes: dict[tuple[int, ...], Simulation] = {}
    for assignments in _plans(graph, machine, optimizer, plan, sets):
        axes = pinned_axes(assignments.values())
        made = Simulation(graph, machine, assignments, optimizer, axes=axes, like=by_axes.get(axes))
        by_axes.setdefault(axes, made)
        # Keep one of equally fast plans: they mostly differ in what makes no difference.
        scored.setdefault(made.makespan, assignments)
    now = estimated((plan, cost(plan, machine, optimizer)), optimizer)
    if not scored or min(scored) / TICKS > limits().sibling_worth * now:
        seconds, assignments = _one_by_one(graph, machine, optimizer, plan, odd)
        if seconds >= now:
            return None
        found = materialise(graph, assignments, machine.mesh)
        return found, cost(found, machine, optimizer)
    starts = {str(ticks): scored[ticks] for ticks in sorted(scored)[: limits().sibling_plans]}
    settings = Settings(
        budget=limits().sibling_budget, starts=(), pinning=0.5, patience=limits().sibling_patience, beat=now
    )
    found = mcmc(graph, machine, optimizer, settings, plans=starts).graph
    return found, cost(found, machine, optimizer)


def _one_by_one(
    graph: Graph, machine: Machine, optimizer: Optimizer, plan: Graph, odd: Sequence[Node]
) -> tuple[float, Assignments]:
    """
    Give each of the operators `odd` its best assignment in turn, with one role for all axes of a level.

    Returns the simulated seconds and the assignments.
    """
    before = assignments_of(plan, machine)
    simulation = Simulation(graph, machine, before, optimizer, axes=pinned_axes(before.values()))
    best = simulation.makespan
    levels = sorted(set(machine.axis_levels))
    for node in odd:
        may = possible_roles(node)
        if len(may) ** len(levels) > limits().sibling_assignments:
            continue
        for way in product(may, repeat=len(levels)):
            assignment = tuple(way[levels.index(level)] for level in machine.axis_levels)
            if fits(node, assignment, machine.mesh):
                new = simulation.propose(node, assignment)
                if new < best:
                    simulation.accept()
                    best = new
                else:
                    simulation.reject()
    return best / TICKS, simulation.assignments


def _odd(graph: Graph, large: bool) -> list[Node]:
    """
    Return the operators with weight matrices that no other operator equals.

    In a large graph, only those without operands that have a gradient, and with a large share of the weights.
    """
    nodes = [n for n in graph.nodes() if n.is_compute and _has_matrix(n)]
    kinds = Counter(map(_kind, nodes))
    odd = [n for n in nodes if kinds[_kind(n)] == 1]
    if not large:
        return odd
    with_gradient, much = (
        nodes_with_gradient(graph),
        limits().sibling_weights * sum(_size(n.result) for n in graph.weights()),
    )

    def first(node: Node) -> bool:
        others = [v for v in node.operands if v.node.op != "weight"]
        weights = [v for v in node.operands if v.node.op == "weight"]
        return not any(v.node in with_gradient for v in others) and sum(map(_size, weights)) > much

    return list(filter(first, odd))


def _size(value: Value) -> int:
    return prod(value.shape)


def _kind(node: Node) -> object:
    return node.op, node.attributes, tuple(v.type for v in node.operands)


def _has_matrix(node: Node) -> bool:
    return any(v.node.op == "weight" and len(v.shape) > 1 for v in node.operands)


def _alike(graph: Graph) -> list[list[Node]]:
    """Return sets of two or more equal, mutually independent operators with weight matrices."""
    above: dict[Node, frozenset[Node]] = {}
    sets: dict[object, list[Node]] = {}
    for node in graph.nodes():
        above[node] = frozenset().union(*({v.node, *above[v.node]} for v in node.operands))
        if node.is_compute and _has_matrix(node):
            others = sets.setdefault(_kind(node), [])
            if not any(o in above[node] for o in others):
                others.append(node)
    return [s for s in sets.values() if len(s) > 1]


def _plans(
    graph: Graph, machine: Machine, optimizer: Optimizer, plan: Graph, sets: Sequence[Sequence[Node]]
) -> Iterator[Assignments]:
    """Yield the assignments of the plan and of baselines, each with one set of operators spread over inner axes."""
    if not sets:
        return
    rests = [assignments_of(plan, machine)]
    for by_hand in (lambda: data_parallel(graph, machine), lambda: expert(graph, machine, optimizer)):
        try:
            rests.append(assignments_of(by_hand(), machine))
        except UnityError:
            continue  # such as a batch that is not divisible
    sizes = machine.mesh.sizes
    for rest in rests:
        for nodes in sets:
            for outer in range(len(sizes)):
                if prod(sizes[outer:]) > limits().sibling_devices:
                    continue
                for role in (None, REPEAT, *nodes[0].analysis.splittable):
                    yield from _spread(rest, nodes, machine, outer, role)


def _spread(
    rest: Assignments, nodes: Sequence[Node], machine: Machine, outer: int, role: GridRole | None
) -> Iterator[Assignments]:
    sizes = machine.mesh.sizes
    new = dict(rest)
    for i, node in enumerate(nodes):
        coordinates: list[int] = []
        for size in reversed(sizes[outer:]):
            coordinates.append(i % size)
            i //= size
        before = rest[node][:outer] if role is None else (role,) * outer
        new[node] = (*before, *map(pinned_at, reversed(coordinates)))
        if not fits(node, new[node], machine.mesh):
            return
    yield new
