"""
How much better any plan on a large machine could be: a bound over all layouts, a role for every axis.

Equal axes of a level are told apart by nothing but which pieces of a dim lie next to each other. So they are counted:
a layout says how many of a level's axes have each role. Going from count to count costs no more than from any layout
with the first count to any with the second, so the least sum over counts is a bound on that over layouts. Its choice,
spelled out on axes, is often a better plan than that of grouped axes (`search/groups.py`).

On larger graphs the least sum over counts is bounded in turn: by messages (`search/messages.py`), and where dims are
many, with some of them not told apart (`search/space.py`, `merged_dims`): going between those is free then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, prod

import numpy as np

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.search.assign import assign
from unity_ir.search.exact import BEST, Solver, among_best
from unity_ir.search.finer import finer
from unity_ir.search.messages import Messages
from unity_ir.search.ordered import told
from unity_ir.search.problem import Problem
from unity_ir.search.shared import ROUNDED, Part, SharedTerms, certain, sharpened
from unity_ir.search.space import AxisGroup, Ints, Spaces
from unity_ir.search.stepwise import StepwiseBetween

TABLES = 60_000_000
"""Pairs of layouts, of all kinds of values together, up to which the least sum over counts itself is computed."""

STEPS = 6_000_000_000
"""Sums in one pass of messages, about, up to which they are passed: some five seconds."""

ROWS = 3_000_000
"""Configurations of one operator, likewise."""

PASSES = 4
"""Passes of messages at most, there and back."""

MERGES = (2, 1, 0)
"""How coarsely dims are told apart (see `search/space.py`, `merged_dims`), one after the other."""

CLOSE = 1e-7
"""A plan this near the bound (as a part of it) is proved to be the fastest."""

NEAR = 3e-3
"""A bound this near a plan is not worth many more messages: ..."""

CHEAP = 100_000_000
"""... only such as take fewer steps."""

ABOVE = (5e-3, 2e-2, 1e-1)
"""How far above the bound orders of axes are told apart, as a part of it, one after the other."""

SLOW = 2e-3
"""A bound that passes raise by less, and that leaves half the rows, is not worth another."""


def certified(
    serial: Graph, machine: Machine, optimizer: Optimizer, plan: Graph, priced: PlanCost, steps: int = STEPS
) -> tuple[Graph, PlanCost, float]:
    """A plan of a serial graph, or one found on the way that is faster and fits; its cost; a bound on all plans."""
    least, other = bound(serial, machine, optimizer, priced.time, steps)
    if other is not None:
        found = cost(other, machine, optimizer)
        if found.time < priced.time * (1 - ROUNDED) and found.memory_bytes <= machine.device.memory:
            plan, priced = other, found
    return plan, priced, min(least, priced.time)


def bound(
    graph: Graph, machine: Machine, optimizer: Optimizer, known: float, steps: int = STEPS
) -> tuple[float, Graph | None]:
    """
    Seconds that no placement of a serial graph on the machine is below, and maybe a plan; `known` is what one takes.

    The plan is a parallel graph, and not always better.
    """
    least, plan = _bound(graph, machine, optimizer, known, steps)
    return certain(least, graph, machine), plan


def _bound(
    graph: Graph, machine: Machine, optimizer: Optimizer, known: float, steps: int
) -> tuple[float, Graph | None]:
    if machine.links:
        # Axes of a level are not alike there.
        return _alone(graph, machine, optimizer), None
    groups = Spaces(machine, by_count=True).groups
    if _tables(graph, groups) <= TABLES and _rows(graph, groups) <= ROWS:
        solver = Solver(Spaces(machine, by_count=True), optimizer)
        found = sharpened(solver, graph, solver.solve(graph))
        if known <= found.bound * (1 + CLOSE):
            return found.bound, None
        plan = assign(graph, found, solver)
        return _ordered(graph, machine, optimizer, found.bound, known, plan)
    if _rows(graph, groups) <= ROWS:
        return _messages(graph, machine, optimizer, known, steps), None
    return _alone(graph, machine, optimizer), None


def _messages(graph: Graph, machine: Machine, optimizer: Optimizer, known: float, steps: int) -> float:
    """
    The bound after as many messages as it takes to be near what is known: first where few layouts are told apart, and
    of finer ones only those with rows that may still be part of something better.
    """
    best = 0.0
    passed: list[tuple[SharedTerms, list[Ints]]] = []
    for merge in MERGES:
        spaces = Spaces(machine, by_count=True, merge=merge)
        terms = SharedTerms(Solver(spaces, optimizer, stepwise=True), graph)
        problem = terms.problem()
        if passed:
            left = finer(*passed[-1], terms)
            if not all(map(len, left)):
                return known
            problem = problem.among(left)
        if problem.steps() + _relaxing(problem) > steps:
            break
        best = max(best, _passed(Messages(problem), known))
        if known <= best * (1 + NEAR):
            break
        passed = [(terms, problem.rows)]
    return best or _alone(graph, machine, optimizer)


def _relaxing(problem: Problem) -> int:
    """Sums it takes, about, to find the seconds between all layouts."""
    ways = [k.between.whole if isinstance(k.between, Part) else k.between for k in problem.links]
    spaces = {id(way.space): way.space for way in ways if isinstance(way, StepwiseBetween)}
    return sum(space.steps for space in spaces.values())


def _ordered(
    graph: Graph, machine: Machine, optimizer: Optimizer, least: float, known: float, plan: Graph | None
) -> tuple[float, Graph | None]:
    """
    The bound and a plan, where axes are counted but those that divide one dim are in some order.

    First only rows are told apart that may be in a choice a little above the bound: either it rises to there, or the
    best choice among them is the best of all.
    """
    best = np.inf if plan is None else _seconds(plan, machine, optimizer)
    terms = SharedTerms(Solver(Spaces(machine, by_count=True), optimizer, stepwise=True), graph)
    for part in ABOVE:
        if min(known, best) <= least * (1 + NEAR):
            break
        limit = min(known, best, least * (1 + part))
        counts = Messages(terms.problem())
        found = told(terms, counts.problem) if _below(counts, limit) else None
        if found is None:
            break
        problem, rows = found
        orders = Messages(problem)
        if not _below(orders, limit):
            least = max(least, limit)
            continue
        least = max(least, min(limit, orders.bound))
        (seconds, chosen), _ = among_best(orders.problem, orders.slack, BEST)
        counted = [int(of[row]) for of, row in zip(rows, chosen, strict=True)]
        other = assign(graph, terms.chosen(counts.problem, seconds, counted, least), terms.solver)
        if other is not None and _seconds(other, machine, optimizer) < best:
            plan, best = other, _seconds(other, machine, optimizer)
    return least, plan


def _seconds(plan: Graph, machine: Machine, optimizer: Optimizer) -> float:
    """What a plan takes; infinite if it does not fit."""
    found = cost(plan, machine, optimizer)
    return found.time if found.memory_bytes <= machine.device.memory else np.inf


def _below(messages: Messages, limit: float) -> bool:
    """Whether passes that drop what is above a limit leave any choice below it."""
    for _ in range(PASSES):
        rows = messages.rows
        for passed in (messages.forward, messages.backward):
            if passed(limit) >= limit:
                return False
        if 10 * messages.rows > 9 * rows:
            break
    return True


def _passed(messages: Messages, known: float) -> float:
    """The bound after passes there and back, until it is what is known, or these hardly help or take too long."""
    limit, best = known * (1 + ROUNDED), messages.bound
    for _ in range(PASSES):
        rows = messages.rows
        for passed in (messages.forward, messages.backward):
            least = passed(limit)
            if known <= least * (1 + CLOSE) or (known <= least * (1 + NEAR) and messages.problem.steps() > CHEAP):
                return min(known, messages.bound)
        if messages.bound < best * (1 + SLOW) and 2 * messages.rows > rows:
            break
        best = messages.bound
    return min(known, messages.bound)


def _alone(graph: Graph, machine: Machine, optimizer: Optimizer) -> float:
    """The least time of all kernels, if each is divided by all devices; 0 where measured, for that may be any time."""
    if machine.device.profile is not None:
        return 0.0
    return sum((o.forward + o.backward) / machine.devices for o in cost(graph, machine, optimizer).operators)


def _layouts(rank: int, groups: Sequence[AxisGroup]) -> tuple[int, int]:
    """Layouts of a value, and those without REPEAT."""

    def ways(roles: int) -> int:
        return prod(comb(g.count + roles - 1, g.count) for g in groups)

    return ways(rank + 3), ways(rank + 2)


def _tables(graph: Graph, groups: Sequence[AxisGroup]) -> int:
    types = {v.type for n in graph.nodes() for v in n.results}
    return sum(_layouts(len(t.shape), groups)[0] ** 2 for t in types)


def _rows(graph: Graph, groups: Sequence[AxisGroup]) -> int:
    each = [len(n.analysis.splittable) + len(n.analysis.carriers) + 2 for n in graph.nodes() if n.is_compute]
    return max((prod(comb(g.count + roles - 1, g.count) for g in groups) for roles in each), default=0)
