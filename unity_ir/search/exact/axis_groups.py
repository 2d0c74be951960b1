"""
Which axes of a large machine have one role together.

Searching 12 axes one by one is out of reach, and most of what that could find has neighbouring axes in one role anyway.
So the axes, outermost first, are cut into as many groups as the graph allows in reasonable time, and the cuts are
moved, one at a time, as long as the plan gets faster. On machines where every axis is a group of its own the search is
exact; otherwise its plan is the best of those cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.axes import EXACT_AXES
from unity_ir.search.layouts.space import Spaces

ROWS = 400_000
"""Configurations and layouts of a whole graph up to which axes are cut into more than `EXACT_AXES` groups."""

TRIED = 600_000
"""Configurations and layouts to be looked at with different cuts, in all."""


def solve(graph: Graph, machine: Machine, optimizer: Optimizer, like: Graph | None = None) -> tuple[Solver, ExactPlan]:
    """
    The fastest parallelization found with the best cuts, and the solver for these: into as many groups as for a graph
    `like` it, if that is given.
    """
    axes = len(machine.mesh.sizes)
    start = first_cuts(machine, groups_for(like or graph, axes))
    best = _solved(graph, machine, optimizer, start)
    if len(start) + 1 >= axes:
        return best
    seen, rows, at = {start}, best[1].rows_before, start
    better = True
    while better:
        better = False
        for cuts in _moved(at, axes):
            if cuts in seen or rows > TRIED:
                continue
            seen.add(cuts)
            found = _solved(graph, machine, optimizer, cuts)
            rows += found[1].rows_before
            if found[1].seconds < best[1].seconds * (1 - 1e-9):
                best, at, better = found, cuts, True
                break
    return best


def _solved(graph: Graph, machine: Machine, optimizer: Optimizer, cuts: tuple[int, ...]) -> tuple[Solver, ExactPlan]:
    solver = Solver(Spaces(machine, cuts), optimizer)
    return solver, solver.solve(graph)


def groups_for(graph: Graph, axes: int) -> int:
    """As many groups as leave the graph few enough configurations and layouts; at least `EXACT_AXES`."""
    roles = [len(n.analysis.splittable) + len(n.analysis.carriers) + 2 for n in graph.nodes() if n.is_compute]
    groups = min(EXACT_AXES, axes)
    while groups < axes and sum(r ** (groups + 1) for r in roles) <= ROWS:
        groups += 1
    return groups


def first_cuts(machine: Machine, groups: int) -> tuple[int, ...]:
    """Cuts into so many groups: between levels, then the largest group in two, or the smallest neighbours as one."""
    sizes, levels = machine.mesh.sizes, machine.axis_levels
    cuts = [a for a in range(1, len(sizes)) if levels[a] != levels[a - 1]]
    while len(cuts) + 1 < groups:
        largest = max(
            (e for e in pairwise([0, *cuts, len(sizes)]) if e[1] - e[0] > 1),
            key=lambda e: (prod(sizes[e[0] : e[1]]), -e[0]),
        )
        cuts = sorted([*cuts, (largest[0] + largest[1] + 1) // 2])
    while len(cuts) + 1 > max(groups, 1):
        edges = [0, *cuts, len(sizes)]
        least = min(range(len(cuts)), key=lambda i: (prod(sizes[edges[i] : edges[i + 2]]), -i))
        del cuts[least]
    return tuple(cuts)


def _moved(cuts: tuple[int, ...], axes: int) -> Iterator[tuple[int, ...]]:
    """The cuts with one of them elsewhere between its neighbours, nearest places first."""
    edges = (0, *cuts, axes)
    for by in range(1, axes):
        for i in range(1, len(edges) - 1):
            for place in (edges[i] - by, edges[i] + by):
                if edges[i - 1] < place < edges[i + 1]:
                    yield (*cuts[: i - 1], place, *cuts[i:])
