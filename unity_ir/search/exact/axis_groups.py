"""
Group neighbouring mesh axes of a large machine, so that all axes of a group have one role.

A search over 12 separate axes is too large, and good plans mostly give neighbouring axes one role. The axes, outermost
first, are cut into as many groups as the graph's size allows; then local search moves one cut at a time while the plan
gets faster. If every axis is a group of its own the search is exact; otherwise the plan is the best over the cuts
tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf, prod

from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.shorter import shorter
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.space import Spaces


def solve(
    graph: Graph, machine: Machine, optimizer: Optimizer, like: Graph | None = None, first: Solver | None = None
) -> tuple[Solver, ExactPlan]:
    """
    Return (solver, plan): the fastest plan found of a serial graph in which neighbouring mesh axes, in groups, have one
    role each, and the solver of the grouping it was found with. Local search tries several groupings.

    With few axes each is a group of its own, which is exact. The number of groups depends on the size of the graph
    `like` (by default `graph`), so that a rewritten graph is searched as its source is. Of a large graph with layers
    that repeat, the grouping is that of the graph with few of them. `first` is what `first_solver` has returned for
    the same arguments, if it was called: its tables are used.
    """
    axes = len(machine.mesh.sizes)
    start = first_cuts(machine, groups_for(like or graph, axes))
    short = None if len(start) + 1 >= axes else shortened_if_large(graph)
    if short is not None:
        solver, _ = solve(short, machine, optimizer, like or graph)
        return solver, solver.solve(graph)
    best = _solved(graph, machine, optimizer, start) if first is None else (first, first.solve(graph))
    if len(start) + 1 >= axes:
        return best
    seen, rows, at = {start}, best[1].rows_before, start
    better = True
    while better:
        better = False
        for cuts in _moved(at, axes):
            if cuts in seen or rows > limits().group_rows_tried:
                continue
            seen.add(cuts)
            found = _solved(graph, machine, optimizer, cuts, best[1].seconds)
            rows += found[1].rows_before
            if found[1].seconds < best[1].seconds * (1 - 1e-9):
                best, at, better = found, cuts, True
                break
    return best


def first_solver(graph: Graph, machine: Machine, optimizer: Optimizer) -> Solver:
    """Return the solver of the first grouping of mesh axes that `solve` tries for a graph that is not large."""
    return Solver(Spaces(machine, first_cuts(machine, groups_for(graph, len(machine.mesh.sizes)))), optimizer)


def _solved(
    graph: Graph, machine: Machine, optimizer: Optimizer, cuts: tuple[int, ...], most: float = inf
) -> tuple[Solver, ExactPlan]:
    solver = Solver(Spaces(machine, cuts), optimizer)
    return solver, solver.solve(graph, most)


def shortened_if_large(graph: Graph) -> Graph | None:
    """
    Return a shorter graph to search in the place of a large one, since what is best for a few equal layers is so for
    all: with only `limits().rewritten_layers` of them. Returns None for a graph of at most
    `limits().rewritten_operators` operators, and for one without layers that repeat.
    """
    found = shorter(graph)
    return None if found is None else found.graph


def groups_for(graph: Graph, axes: int) -> int:
    """
    Return the number of groups into which to cut `axes` mesh axes: the greatest at which a search stays within
    `limits().group_rows` ways to shard an operator, added up over all operators of `graph`. Ways are counted as if
    every size could be divided.

    It is at least `limits().exact_axes`, and at most `axes`, at which each axis is a group of its own.
    """
    roles = [len(n.analysis.splittable) + len(n.analysis.carriers) + 2 for n in graph.nodes() if n.is_compute]
    groups = min(limits().exact_axes, axes)
    while groups < axes and sum(r ** (groups + 1) for r in roles) <= limits().group_rows:
        groups += 1
    return groups


def first_cuts(machine: Machine, groups: int) -> tuple[int, ...]:
    """
    Return the first grouping tried: for `groups` groups of mesh axes, the numbers of the axes at which the second and
    later groups begin.

    Groups are cut between machine levels; then the largest group is split, or the smallest neighbours are merged, until
    there are `groups`.
    """
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
    """Yield the cuts with one of them moved between its neighbours, nearest places first."""
    edges = (0, *cuts, axes)
    for by in range(1, axes):
        for i in range(1, len(edges) - 1):
            for place in (edges[i] - by, edges[i] + by):
                if edges[i - 1] < place < edges[i + 1]:
                    yield (*cuts[: i - 1], place, *cuts[i:])
