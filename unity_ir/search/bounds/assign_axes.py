"""
Turn a plan that counts equal axes into one that names them.

A counted plan says that two of a level's five axes shard the samples and three the columns, but not which. The equal
axes of a level are cut into runs, one per role, and the order of the runs is chosen for every operator, relay and leaf
at once, by elimination, so that resharding costs least.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations, product
from math import prod

import numpy as np

from unity_ir.cost.plan import layouts_wanted
from unity_ir.machine.model import Machine
from unity_ir.pcg.coarse import runs_of
from unity_ir.pcg.differentiate import has_gradient, nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.reshard import Move, move_kind
from unity_ir.pcg.sharding import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Layout,
    Mesh,
    as_layout,
    dual,
    is_shard,
    operand_layout,
    place,
    result_layout,
    shard_count,
)
from unity_ir.plan.moves import plan_moves
from unity_ir.search.exact.elimination import Factor, every, minimise_within
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.layouts.axes import AxisGroup, Floats, Ints
from unity_ir.search.layouts.exchanged import exchanges_rows
from unity_ir.search.layouts.limits import limits


def orders(groups: Sequence[AxisGroup], names: Sequence[GridRole], counts: Ints) -> Iterator[Assignment]:
    """
    Yield every assignment (a role per mesh axis, such as the index variable it divides) with given numbers of axes per
    role: for each group of equal axes, every order of its roles in which axes of one role are neighbours.

    `counts` [group, role] is how many axes of a group have a role; `names` are the roles of its columns.
    """
    each: list[list[tuple[tuple[int, GridRole], ...]]] = []
    for group, row in zip(groups, counts.tolist(), strict=True):
        runs = [(name, count) for name, count in zip(names, row, strict=True) if count]
        each.append(
            [
                tuple(zip(group.axes, (name for name, count in order for _ in range(count)), strict=True))
                for order in permutations(runs)
            ]
        )
    for choice in product(*each):
        yield tuple(role for _, role in sorted(axis for part in choice for axis in part))


class _TooMany(Exception):
    """Raised after `limits().axis_prices` pairs."""


@dataclass
class _MoveCosts:
    """Memo of the planner's seconds between layouts."""

    solver: Solver
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])

    def of(self, value: Value, source: Layout, target: Layout, training: bool) -> float:
        """Return seconds from one layout to another; in training also of the gradient back."""
        if source == target:
            return 0.0
        key = (value.type, source, target, training)
        if key not in self._seen:
            if len(self._seen) == limits().axis_prices:
                raise _TooMany
            seconds = self._one_way(value, source, target, gradient=False)
            if training:
                seconds += self._one_way(value, dual(target), dual(source), gradient=True)
            self._seen[key] = seconds
        return self._seen[key]

    def _one_way(self, value: Value, source: Layout, target: Layout, gradient: bool) -> float:
        machine = self.solver.spaces.machine
        dtype = value.type.grad_dtype if gradient else value.type.dtype
        if len(runs_of(source, target, machine.axis_levels)) <= limits().axis_runs:
            return sum(machine.move_time(m, dtype) for m in plan_moves(value, source, target, machine, gradient))
        moves = _likely_moves(source, target, prod(value.type.micro_shape), machine.mesh)
        return limits().axis_penalty * sum(machine.move_time(m, dtype) for m in moves)

    def between(self, value: Value, made: Iterable[Layout], needs: Sequence[Layout], training: bool) -> Floats:
        """Return seconds [made, needed] between layouts."""
        return np.array([[self.of(value, a, b, training) for b in needs] for a in made])


def _likely_moves(source: Layout, target: Layout, elements: int, mesh: Mesh) -> Iterator[Move]:
    """
    Yield about the moves that the planner would find between two layouts of a value of `elements` elements, without
    looking for them: all axes that change alike move together, in the order in which pieces are small for longest. Axes
    that shard a dim inside others that change are gathered and divided again.
    """
    before, after = ([COPY if role == REPEAT else role for role in layout] for layout in (source, target))
    outermost: dict[int, int] = {}
    for axis, change in enumerate(zip(before, after, strict=True)):
        if change[0] != change[1]:
            for role in change:
                outermost.setdefault(role, axis)
    changes: dict[tuple[int, int], list[int]] = {}
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            changes.setdefault((old, new), []).append(axis)
        elif is_shard(old) and outermost.get(old, axis) < axis:
            changes.setdefault((old, COPY), []).append(axis)
    piece = elements // shard_count(source, mesh.sizes)
    for (old, new), axes in sorted(changes.items(), key=lambda each: _growth(*each[0])):
        move = Move(move_kind(old, new), tuple(axes), old, new, prod(mesh.sizes[axis] for axis in axes), piece)
        piece = move.elements_after
        yield move


def _growth(old: int, new: int) -> tuple[int, bool]:
    """Return whether pieces shrink (-1) or grow (1) as axes change their role, and whether they are whole after it."""
    return is_shard(old) - is_shard(new), new == COPY


def assign_axes(graph: Graph, plan: ExactPlan, solver: Solver) -> Graph | None:
    """
    Return the parallel graph of a plan that says only how many of a machine level's equal mesh axes have each role:
    here it is chosen which, so that resharding costs least.

    `graph` is the serial graph; `solver` is the one over such counts (`Spaces.by_count`) that found `plan`. Returns
    None if more than `limits().axis_prices` pairs of layouts would have to be priced, or if choosing takes too long.
    """
    try:
        return _AxisAssignment(graph, plan, solver).graph()
    except _TooMany:
        return None


def is_planned_soon(plan: Graph, machine: Machine) -> bool:
    """Return whether the moves between the layouts of a plan are planned within seconds."""
    placement, levels = place(plan, machine.mesh), machine.axis_levels
    changes = {(placement.layouts[value], target) for value, target in layouts_wanted(plan, placement)}
    return all(len(runs_of(*change, levels)) <= limits().planned_runs for change in changes)


@dataclass(frozen=True, slots=True)
class _Rest:
    """Key of the layout where a leaf with several users rests."""

    value: Value


_Key = Node | Value | _Rest


class _AxisAssignment:
    def __init__(self, serial: Graph, plan: ExactPlan, solver: Solver):
        self.serial, self.solver, self.prices = serial, solver, _MoveCosts(solver)
        self.with_gradient = nodes_with_gradient(serial)
        groups = solver.spaces.groups
        self.numbers: dict[_Key, int] = {}
        self.ways: list[list[Assignment]] = []
        for node, row in plan.rows.items():
            table = solver.table(node, self.with_gradient)
            self._enter(node, orders(groups, table.roles, table.counts[row]))
        for key, number in (*plan.layouts.items(), *((_Rest(v), n) for v, n in plan.rests.items())):
            space = solver.space(key.value if isinstance(key, _Rest) else key)
            self._enter(key, orders(groups, (*range(space.rank), COPY, SUM, REPEAT), space.counts[number]))

    def _enter(self, key: _Key, ways: Iterable[Assignment]) -> None:
        self.numbers[key] = len(self.ways)
        self.ways.append(list(islice(ways, limits().axis_orders)))

    def graph(self) -> Graph | None:
        """
        Choose an order of axes for every variable; return the parallel graph, or None if elimination would take too
        long.
        """
        sizes = {i: len(ways) for i, ways in enumerate(self.ways)}
        found = minimise_within(limits().axis_entries, sizes, list(self._factors()))
        if found is None:
            return None
        chosen = {key: self.ways[i][found[1][i]] for key, i in self.numbers.items()}
        found = {key: as_layout(way) for key, way in chosen.items() if isinstance(key, Value)}
        rests = {key.value: as_layout(way) for key, way in chosen.items() if isinstance(key, _Rest)}
        assignments = {key: way for key, way in chosen.items() if isinstance(key, Node)}
        made = materialise(self.serial, assignments, self.solver.spaces.machine.mesh, {**found, **rests}, found)
        rows = self.solver.spaces.exchange_rows
        return replace(made, exchange_rows=rows) if exchanges_rows(assignments.values()) else made

    def _factors(self) -> Iterator[Factor]:
        for key in self.numbers:
            if isinstance(key, _Rest):
                rests, found = ([as_layout(way) for way in self._ways(k)] for k in (key, key.value))
                training = has_gradient(key.value, self.with_gradient)
                yield self._factor(key, key.value, self.prices.between(key.value, rests, found, training))
        for node in self.serial.nodes():
            if not node.is_compute:
                continue
            for i, value in enumerate(node.operands):
                needs = [operand_layout(node.analysis, i, way) for way in self._ways(node)]
                training = has_gradient(value, self.with_gradient, (node,))
                yield self._link(value, node, needs, training)
            for i, value in enumerate(node.results):
                if value in self.numbers:
                    # Which users send a gradient back is ignored: it hardly changes the order.
                    made = [result_layout(node.analysis, i, way) for way in self._ways(node)]
                    there = [as_layout(way) for way in self._ways(value)]
                    table = self.prices.between(value, made, there, has_gradient(value, self.with_gradient))
                    yield self._factor(node, value, table)

    def _ways(self, key: _Key) -> list[Assignment]:
        return self.ways[self.numbers[key]]

    def _link(self, value: Value, user: Node, needs: Sequence[Layout], training: bool) -> Factor:
        """Return the factor between where a value is found and an operator that needs it."""
        if value in self.numbers:
            source: _Key = value
            made = [as_layout(way) for way in self._ways(value)]
        else:
            source = value.node
            made = [result_layout(source.analysis, value.index, way) for way in self._ways(source)]
        return self._factor(source, user, self.prices.between(value, made, needs, training))

    def _factor(self, source: _Key, target: _Key, table: Floats) -> Factor:
        axes = (every(table.shape[0]), every(table.shape[1]))
        return Factor((self.numbers[source], self.numbers[target]), axes, table)
