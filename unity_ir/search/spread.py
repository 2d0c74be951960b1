"""
Operators alike side by side, each on a part of the machine: embedding tables, towers, experts.

The exact search has all devices do the same. Where branches at once pay, a plan is put together from the exact one or
one by hand, with alike operators that do not depend on each other pinned in turn along the innermost axes; the best
few are improved by a short walk (`search/mcmc.py`), scored by the simulator as emitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Node, Optimizer
from unity_ir.pcg.layout import PINNED, REPEAT, GridRole, at
from unity_ir.search.data_parallel import data_parallel
from unity_ir.search.expert import expert
from unity_ir.search.mcmc import Assignments, Settings, assignments_of, mcmc
from unity_ir.search.portfolio import Plan, as_emitted
from unity_ir.simulate.choices import fits
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.streams import TICKS

OPERATORS = 120
"""Of graphs of more, simulating so many plans takes longer than the exact search."""

BRANCHES = 16
"""Devices told apart at most."""

KEPT = 2
"""Plans that are improved by a walk."""

BUDGET = 4000
"""Proposals of all walks."""

WORTH = 2
"""Times the seconds of the plan, from which on no walk makes one faster."""


def spread(graph: Graph, machine: Machine, optimizer: Optimizer, plan: Graph) -> Plan | None:
    """A plan of a serial graph with operators side by side, and its cost; None if none may be faster than `plan`."""
    sets = _alike(graph)
    if not sets or machine.devices == 1 or sum(n.is_compute for n in graph.nodes()) > OPERATORS:
        return None
    scored: list[tuple[int, int, Assignments]] = []
    for number, assignments in enumerate(_plans(graph, machine, optimizer, plan, sets)):
        axes = tuple(sorted({i for a in assignments.values() for i, r in enumerate(a) if _pinned(r)}))
        made = Simulation(graph, machine, assignments, optimizer, axes=axes)
        scored.append((made.makespan, number, assignments))
    starts = {str(number): a for _, number, a in sorted(scored, key=lambda s: s[:2])[:KEPT]}
    now = as_emitted((plan, cost(plan, machine, optimizer)), optimizer)
    if not starts or min(scored)[0] / TICKS > WORTH * now:
        return None
    found = mcmc(graph, machine, optimizer, Settings(budget=BUDGET, starts=(), pinning=0.5), plans=starts).graph
    return found, cost(found, machine, optimizer)


def _pinned(role: GridRole) -> bool:
    return isinstance(role, int) and role <= PINNED


def _alike(graph: Graph) -> list[list[Node]]:
    """Operators on matrices of weights, alike and none on the way to another, in sets of two or more."""
    above: dict[Node, frozenset[Node]] = {}
    sets: dict[object, list[Node]] = {}
    for node in graph.nodes():
        above[node] = frozenset().union(*({v.node, *above[v.node]} for v in node.operands))
        if node.is_compute and any(v.node.op == "weight" and len(v.shape) > 1 for v in node.operands):
            key = (node.op, node.attributes, tuple(v.type for v in node.operands))
            others = sets.setdefault(key, [])
            if not any(o in above[node] for o in others):
                others.append(node)
    return [s for s in sets.values() if len(s) > 1]


def _plans(
    graph: Graph, machine: Machine, optimizer: Optimizer, plan: Graph, sets: Sequence[Sequence[Node]]
) -> Iterator[Assignments]:
    """The plan and those by hand; each with a set spread over inner axes, and what else it does on the outer ones."""
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
                if prod(sizes[outer:]) > BRANCHES:
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
        new[node] = (*before, *map(at, reversed(coordinates)))
        if not fits(node, new[node], machine.mesh):
            return
    yield new
