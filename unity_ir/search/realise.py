"""
From counts of axes to axes: the parallel graph of an exact plan.

Going forward through the graph, each operator's axes are chosen among those its counts allow so that its operands need
the cheapest resharding from where they already are. Then the graph is written out with its parallel operators and
views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations, product
from typing import TypeVar

from unity_ir.cost.plan import plan_moves
from unity_ir.pcg.differentiate import trained
from unity_ir.pcg.graph import Graph, Node, Value
from unity_ir.pcg.layout import (
    COPY,
    REPEAT,
    SUM,
    Assignment,
    GridRole,
    Layout,
    as_layout,
    dual,
    operand_layout,
    result_layout,
)
from unity_ir.pcg.materialise import assigned, reshard, rested
from unity_ir.search.exact import ExactPlan, Solver
from unity_ir.search.space import AxisClass, Ints

CANDIDATES = 256
"""Ways to choose axes that are priced by the planner; beyond it only those that keep most axes in place."""


def realise(graph: Graph, plan: ExactPlan, solver: Solver) -> Graph:
    """The parallel graph, with views, that carries out an exact plan of a serial graph."""
    return _Realisation(graph, plan, solver).graph()


class _Realisation:
    def __init__(self, graph: Graph, plan: ExactPlan, solver: Solver):
        self.source = graph
        self.plan = plan
        self.solver = solver
        self.machine = solver.spaces.machine
        self.mesh = self.machine.mesh
        self.classes = solver.spaces.classes
        self.with_gradient = trained(graph)
        self.made: dict[Value, Layout] = {}
        """Where each serial value is made (or, for a leaf, rests)."""
        self.relay: dict[Value, Layout] = {}
        """Where its users find it."""
        self.new: dict[Value, Value] = {}
        """The parallel value, as its users find it."""

    def graph(self) -> Graph:
        for node in self.source.nodes():
            if not node.is_leaf:
                self._operator(node)
        inputs = tuple(self._leaf(n.result).node for n in self.source.inputs)
        outputs = tuple(self._leaf(v) if v.node.is_leaf else self.new[v] for v in self.source.outputs)
        return Graph(self.source.name, inputs, outputs)

    # -- choosing axes

    def _seconds(self, value: Value, source: Layout, target: Layout) -> float:
        moves = plan_moves(value, source, target, self.machine)
        if value.node in self.with_gradient:
            moves += plan_moves(value, dual(target), dual(source), self.machine)
        return sum(self.machine.move_time(m, value.type.dtype) for m in moves) + 1e-12 * len(moves)

    def _best_layout(self, value: Value, number: int, towards: Layout, forward: bool) -> Layout:
        """Axes for a layout of a value, cheapest to (`forward`) or from where it is needed."""
        space = self.solver.space(value)
        names = (*range(space.rank), COPY, SUM, REPEAT)
        ways = [as_layout(w) for w in _ways(self.classes, names, space.counts[number], len(self.mesh.sizes))]
        near = _nearest(ways, [(1.0, towards)], lambda roles: [roles])
        return min(
            near,
            key=lambda w: self._seconds(value, w, towards) if forward else self._seconds(value, towards, w),
        )

    def _operator(self, node: Node) -> None:
        table = self.solver.table(node, self.with_gradient)
        row = self.plan.rows[node]
        analysis = node.analysis
        ways = _ways(self.classes, table.roles, table.counts[row], len(self.mesh.sizes))
        placed = [(i, v) for i, v in enumerate(node.operands) if v in self.relay]

        def needs(way: Assignment) -> list[Layout]:
            return [operand_layout(analysis, i, way) for i, _ in placed]

        near = _nearest(ways, [(float(v.type.elements), self.relay[v]) for _, v in placed], needs)
        assignment = min(
            near,
            key=lambda way: sum(
                self._seconds(v, self.relay[v], need) for (_, v), need in zip(placed, needs(way), strict=True)
            ),
        )
        operands = [self._operand(v, operand_layout(analysis, i, assignment)) for i, v in enumerate(node.operands)]
        built = assigned(node, operands, assignment, self.mesh)
        for i, (old, value) in enumerate(zip(node.results, built.results, strict=True)):
            self.made[old] = self.relay[old] = result_layout(analysis, i, assignment)
            self.new[old] = value
            if old in self.plan.layouts:
                self.relay[old] = self._best_layout(old, self.plan.layouts[old], self.made[old], forward=False)
                self.new[old] = reshard(value, self.made[old], self.relay[old], self.mesh)

    # -- writing it out

    def _leaf(self, value: Value, towards: Layout | None = None) -> Value:
        """A leaf where it rests: nearest to its first use."""
        if value not in self.new:
            if towards is None:
                towards = (REPEAT,) * len(self.mesh.sizes)
            number = self.plan.layouts.get(value)
            layout = towards if number is None else self._best_layout(value, number, towards, forward=True)
            self.made[value] = self.relay[value] = layout
            self.new[value] = rested(value, layout, self.mesh)
        return self.new[value]

    def _operand(self, value: Value, needed: Layout) -> Value:
        if value.node.is_leaf:
            self._leaf(value, needed)
        return reshard(self.new[value], self.relay[value], needed, self.mesh)


def _ways(classes: Sequence[AxisClass], names: Sequence[GridRole], counts: Ints, axes: int) -> Iterator[Assignment]:
    """Every choice of axes with these counts of roles, outer axes given to earlier roles first."""
    per_class = [
        list(dict.fromkeys(permutations([n for n, k in zip(names, row, strict=False) for _ in range(int(k))])))
        for row in counts
    ]
    for combination in product(*per_class):
        out: list[GridRole] = [REPEAT] * axes
        for axis_class, roles in zip(classes, combination, strict=True):
            for axis, role in zip(axis_class.axes, roles, strict=True):
                out[axis] = role
        yield tuple(out)


Way = TypeVar("Way", bound=Assignment)


def _nearest(
    ways: Iterable[Way], wanted: Sequence[tuple[float, Layout]], needs: Callable[[Way], Sequence[Layout]]
) -> list[Way]:
    """The ways that move fewest elements by a plain count of axes whose role changes; at most `CANDIDATES`."""

    def changed(way: Way) -> float:
        return sum(
            weight * sum(a != b for a, b in zip(have, need, strict=True))
            for (weight, have), need in zip(wanted, needs(way), strict=True)
        )

    return sorted(ways, key=changed)[:CANDIDATES]
