"""
Group neighbouring mesh axes of a large machine, so that all axes of a group have one role.

A search over 12 separate axes is too large, and good plans mostly give neighbouring axes one role. The axes, outermost
first, are cut into as many groups as the graph's size allows; then local search moves one cut at a time while the plan
gets faster. If every axis is a group of its own the search is exact; otherwise the plan is the best over the cuts
tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise
from math import inf, prod
from typing import Self

from unity_ir.budget import spend
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.shorter import shorter
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.worker import ForkedWorker

LeastSeconds = Callable[[Graph, float], float]
"""Returns a lower bound in seconds on all plans of a serial graph, given the seconds of one of them."""


def solve(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    like: Graph | None = None,
    first: Solver | None = None,
    least: LeastSeconds | None = None,
) -> tuple[Solver, ExactPlan]:
    """
    Return (solver, plan): the fastest plan found of a serial graph in which neighbouring mesh axes, in groups, have one
    role each, and the solver of the grouping it was found with. Local search tries several groupings.

    With few axes each is a group of its own, which is exact. The number of groups depends on the size of the graph
    `like` (by default `graph`), so that a rewritten graph is searched as its source is. Of a large graph with layers
    that repeat, the grouping is that of the graph with few of them. `first` is what `first_solver` has returned for
    the same arguments, if it was called: its tables are used. `least`, if given, is called once there are others to
    try: none is tried after a plan within `limits().group_gap` of that bound.
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
    enough = 0.0 if least is None else least(graph, best[1].seconds) * (1 + limits().group_gap)
    with _Groupings(graph, machine, optimizer, rows >= limits().rows_of_process) as groupings:
        while best[1].seconds > enough:
            others = [cuts for cuts in _moved(at, axes) if cuts not in seen]
            for number, cuts in enumerate(others):
                if rows > limits().group_rows_tried:
                    return best
                seen.add(cuts)
                # Tried next if this one is no better, or if it is.
                after = [*others[number + 1 :], *(moved for moved in _moved(cuts, axes) if moved not in seen)]
                seconds, tried = groupings.outline(cuts, best[1].seconds, after)
                rows += tried
                if seconds < best[1].seconds * (1 - 1e-9):
                    best, at = groupings.solved(cuts, best[1].seconds), cuts
                    break
            else:
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


AxisCuts = tuple[int, ...]
"""A grouping: the numbers of the axes at which the second and later groups begin."""


class _Groupings:
    """
    Plans of a graph with several groupings. A context manager: of a `large` graph, the grouping that is likely tried
    next is solved in a process beside each.
    """

    def __init__(self, graph: Graph, machine: Machine, optimizer: Optimizer, large: bool):
        self.solved = cache(partial(_solved, graph, machine, optimizer))
        """`_solved`, given cuts and the seconds from which on any plan will do; memoised."""
        self._large = large
        self._stack = ExitStack()
        self._asked: dict[AxisCuts, Callable[[], tuple[tuple[float, int], float]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def outline(self, cuts: AxisCuts, most: float, after: Sequence[AxisCuts]) -> tuple[float, int]:
        """
        Return the seconds of the plan found with a grouping, and the number of rows that were looked at; any plan if
        none takes less than `most` seconds. The first of the groupings `after` it that is new is begun beside it.
        """
        following = next((other for other in after if other not in self._asked), None)
        if self._large and following is not None and cuts not in self._asked:
            worker = self._stack.enter_context(ForkedWorker(self._outline))
            if worker.is_forked:
                self._asked[following] = worker.ask_uncounted((following, most))
        if cuts not in self._asked:
            return self._outline((cuts, most))
        (seconds, rows), work = self._asked[cuts]()
        if seconds >= most * (1 - 1e-9):
            spend(work)  # otherwise it is solved here, too
        return seconds, rows

    def _outline(self, question: tuple[AxisCuts, float]) -> tuple[float, int]:
        _, plan = self.solved(*question)
        return plan.seconds, plan.rows_before


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
