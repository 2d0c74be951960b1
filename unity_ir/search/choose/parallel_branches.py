"""
Place parallel branches on disjoint parts of the machine where that lowers the simulated time (Unity, section 5.2).

The layout search puts every operator on all devices, so two branches run one after the other. Here branches are pinned
at different coordinates of some axes, one place of the graph after another, and a change is kept if the simulated time
drops. Only one plan is changed, to keep the search short: most operators are best left on all devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Assignment, Layout, pinned_at
from unity_ir.search.choose.candidates import PricedPlan, estimated, fits
from unity_ir.search.flexflow.mcmc import assignments_of
from unity_ir.search.layouts.limits import limits
from unity_ir.search.unity import series_parallel
from unity_ir.search.unity.series_parallel import Flow, Parallel, Region
from unity_ir.simulate.delta import Simulation


def place_branches(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    plan: Graph,
    places: Sequence[Mapping[Value, Layout]] = ({}, {}),
) -> PricedPlan | None:
    """
    Return a plan, with its cost, in which some parallel branches of the graph (that do not read each other's values)
    run at once on disjoint parts of the machine, and that fits the memory and is faster than `plan` by quick simulation
    (`estimated`); None if none was found.

    `graph` is the serial graph of `plan`. `places` are two mappings from values to layouts, as `materialise` takes
    them, in which new plans keep what they can of `plan`: the layout in which a value is stored, or to which it is
    brought once made (`rests`), and the layout to which a leaf is resharded once for all its users (`relays`). Both are
    empty if they are not known. Every new plan is tried twice: with these layouts for all values that no moved operator
    makes or reads, and without any of them.
    """
    sites = _sites(series_parallel.decompose(Flow(graph)))
    if not sites:
        return None
    assignments = assignments_of(plan, machine)
    least = estimated((plan, cost(plan, machine, optimizer)), optimizer) * (1 - limits().branch_gain)
    best: PricedPlan | None = None
    left = min(limits().branch_proposals, limits().branch_operators // len(assignments))
    for axes in _parts(machine, assignments):
        changed, used = _pinned(graph, machine, optimizer, assignments, sites, axes, left)
        left -= used
        for found in _written(graph, machine, assignments, changed, places):
            priced = cost(found, machine, optimizer)
            seconds = estimated((found, priced), optimizer)
            if seconds < least and fits(found, priced, optimizer):
                best, least = (found, priced), seconds
    return best


def _sites(region: Region) -> list[list[tuple[Node, ...]]]:
    """Return, for every parallel region, the operators of each branch; outer regions first."""
    match region:
        case series_parallel.Sequence(left, _, right):
            return [*_sites(left), *_sites(right)]
        case Parallel():
            branches = list(_branches(region))
            inner = [site for branch in branches for site in _sites(branch)]
            with_operators = [b.inner for b in branches if b.inner]
            return [with_operators, *inner] if len(with_operators) > 1 else inner
        case _:
            return []


def _branches(region: Region) -> Iterator[Region]:
    if isinstance(region, Parallel):
        yield from _branches(region.first)
        yield from _branches(region.rest)
    else:
        yield region


def _parts(machine: Machine, assignments: Mapping[Node, Assignment]) -> list[tuple[int, ...]]:
    """
    Return sets of mesh axes to cut the machine along: the innermost axes of each level, up to `limits().branch_parts`
    parts.

    Axes of a level are alike, so those count as innermost that the plan `assignments` uses unlike the others: what they
    divide, such as columns of weights, its operators would no longer exchange.
    """
    sizes, levels, out = machine.mesh.sizes, machine.axis_levels, dict[tuple[int, ...], None]()
    unlike = [0] * len(sizes)
    for level in dict.fromkeys(levels):
        alike = [axis for axis in range(len(sizes)) if levels[axis] == level]
        for assignment in assignments.values():
            roles = [assignment[axis] for axis in alike]
            usual = max(roles, key=roles.count)
            for axis in alike:
                unlike[axis] += assignment[axis] != usual
    order = sorted(range(len(sizes)), key=lambda axis: (levels[axis], unlike[axis], axis))
    for end in reversed(range(len(sizes))):
        if end + 1 < len(sizes) and levels[end] == levels[end + 1]:
            continue
        start = end
        while start >= 0 and prod(sizes[axis] for axis in order[start : end + 1]) <= limits().branch_parts:
            out[tuple(sorted(order[start : end + 1]))] = None
            start -= 1
    return list(out)


def _pinned(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    assignments: Mapping[Node, Assignment],
    sites: Sequence[Sequence[tuple[Node, ...]]],
    axes: tuple[int, ...],
    left: int,
) -> tuple[Mapping[Node, Assignment], int]:
    """
    Return the assignments with branches pinned on `axes` wherever that helps, and the number of proposals made, at most
    `left`.
    """
    if left < min(map(_moves, sites)):
        return assignments, 0
    simulation = Simulation(graph, machine, assignments, optimizer, axes=axes)
    parts = list(product(*(range(machine.mesh.sizes[a]) for a in axes)))
    used = 0
    in_vain: set[object] = set()
    for site in sites:
        moves = _moves(site)
        # Layers are alike: what was no faster in one will not be in the next, of the same operators, sharded alike.
        kind = tuple(tuple((n.op, n.attributes, n.types, simulation.assignment(n)) for n in branch) for branch in site)
        if used + moves > left or kind in in_vain:
            continue
        used += moves
        old, least = simulation.assignments, simulation.makespan
        try:
            for node, part in _dealt(site, parts, simulation).items():
                new = list(old[node])
                for axis, coordinate in zip(axes, part, strict=True):
                    new[axis] = pinned_at(coordinate)
                _assign(simulation, node, tuple(new))
            # What is long may be better off everywhere, after all.
            for branch in sorted(site, key=lambda b: -sum(simulation.ticks(n) for n in b)):
                pinned, with_pins = simulation.assignments, simulation.makespan
                _restore(simulation, branch, old)
                if simulation.makespan >= with_pins:
                    _restore(simulation, branch, pinned)
        except UnityError:
            pass  # a size that what is left of the machine does not divide
        else:
            if simulation.makespan < least:
                continue
        in_vain.add(kind)
        for branch in site:
            _restore(simulation, branch, old)
    return simulation.assignments, used


def _moves(site: Sequence[tuple[Node, ...]]) -> int:
    """Return the proposals that trying the branches of a site takes at most."""
    return 4 * sum(map(len, site))


def _restore(simulation: Simulation, nodes: Iterable[Node], to: Mapping[Node, Assignment]) -> None:
    for node in nodes:
        _assign(simulation, node, to[node])


def _assign(simulation: Simulation, node: Node, assignment: Assignment) -> None:
    if simulation.assignment(node) != assignment:
        simulation.propose(node, assignment)
        simulation.accept()


def _dealt(
    site: Sequence[tuple[Node, ...]], parts: Sequence[tuple[int, ...]], simulation: Simulation
) -> dict[Node, tuple[int, ...]]:
    """
    Return a part of the machine for every operator: the longest branch first, each on the part with the least work.
    """
    ticks = [sum(simulation.ticks(n) for n in branch) for branch in site]
    busy = [0] * len(parts)
    out: dict[Node, tuple[int, ...]] = {}
    for i in sorted(range(len(site)), key=lambda i: -ticks[i]):
        free = busy.index(min(busy))
        busy[free] += max(1, ticks[i])
        out |= dict.fromkeys(site[i], parts[free])
    return out


def _written(
    graph: Graph,
    machine: Machine,
    before: Mapping[Node, Assignment],
    after: Mapping[Node, Assignment],
    places: Sequence[Mapping[Value, Layout]],
) -> Iterator[Graph]:
    """
    Yield the plans of changed assignments: first with untouched values resting and relayed as before, then with none.
    """
    changed = {n for n, assignment in after.items() if assignment != before[n]}
    if not changed:
        return
    touched = {v for n in changed for v in (*n.operands, *n.results)}
    rests, relays = ({v: layout for v, layout in of.items() if v not in touched} for of in places)
    yield materialise(graph, after, machine.mesh, rests, relays)
    if rests or relays:
        yield materialise(graph, after, machine.mesh)
