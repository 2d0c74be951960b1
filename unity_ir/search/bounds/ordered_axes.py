"""
Tighten the bound over axis counts by the order in which axes shard a dim.

An axis enters a dim only inside those that shard it already, so it matters which of two axes shards the columns, and
which the summed dim. The rows left by counting (`search/bounds/axis_counts.py`) are expanded into one row per order of
their equal axes. Axes along the first dim, mostly samples, keep no place in the order, which is a relaxation. The
distance between two orders is that of the cheapest moves of all axes, with free moves between layouts of the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from math import factorial, prod

import numpy as np

from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.sharding import COPY, REPEAT, SUM
from unity_ir.search.exact.elimination import every
from unity_ir.search.exact.factor_graph import NOWHERE, DenseCost, Edge, FactorGraph, Port, port
from unity_ir.search.exact.shared_moves import ScaledCost
from unity_ir.search.exact.solver import FactorGraphBuilder
from unity_ir.search.exact.two_way import TwoWayCost
from unity_ir.search.layouts.axes import AxisGroup, Counts, Floats, Ints
from unity_ir.search.layouts.exchanged import made_role, needed_role
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.operator_table import OperatorTable
from unity_ir.search.layouts.space import LayoutSpace, Spaces
from unity_ir.search.layouts.transitions import PricedMoves


class OrderedSpace:
    """
    The layouts of a value, numbered, told apart by the order in which equal mesh axes have their roles (shard a dim,
    COPY or SUM), where axes that shard dim 0 have no place in that order; and the seconds of resharding between them.
    REPEAT (replicas that all do the same work) counts as COPY, as a change from one to the other moves nothing.

    Made from `on_axes`, the value's layouts with a role for every axis, and `groups`, the groups of equal axes.
    """

    def __init__(self, on_axes: LayoutSpace, groups: Sequence[AxisGroup]):
        self.space = on_axes
        self.groups = groups
        self.gradient = self if on_axes.gradient is on_axes else OrderedSpace(on_axes.gradient, groups)
        """The same layouts, with the seconds of moving the value's gradient."""
        self.floats = 0 if on_axes.rank else NOWHERE
        """The role whose axes have no place in the order; NOWHERE if there is none."""
        self._codes, self._of = np.unique(
            self._code(on_axes.counts[on_axes.without_repeat].argmax(axis=2)), return_inverse=True
        )
        n = len(self._codes)
        self._filled, self._seconds = np.zeros(n, dtype=bool), np.zeros((n, n))

    def _code(self, roles: Ints) -> Ints:
        """Return a code per row of roles [row, axis], equal for rows that differ only in where floating axes are."""
        out = np.zeros(len(roles), dtype=np.int64)
        for group in self.groups:
            within = np.zeros(len(roles), dtype=np.int64)
            for axis in group.axes:
                role = roles[:, axis]
                within = np.where(role == self.floats, within, within * (self.space.roles + 1) + role + 1)
            out = out * (self.space.roles + 1) ** len(group.axes) + within
        return out

    def value_numbers(self, roles: Ints) -> Ints:
        """
        Return the numbers of layouts of the value in this space: [row], given the role of each mesh axis, `roles` [row,
        axis]. Roles are numbers, too: first one per dim, for an axis that shards it, then COPY, SUM and REPEAT.
        """
        return self._find(roles, {COPY: COPY, SUM: SUM, REPEAT: COPY})

    def gradient_numbers(self, roles: Ints) -> Ints:
        """
        Return the numbers of layouts of the value's gradient in this space: [row], given the role of each mesh axis in
        the layout of the value, `roles` [row, axis], numbered as for `value_numbers`. The gradient's layout has COPY
        and SUM exchanged; REPEAT counts as COPY in both.
        """
        return self._find(roles, {COPY: SUM, SUM: COPY, REPEAT: COPY})

    def _find(self, roles: Ints, to: Mapping[int, int]) -> Ints:
        into = np.arange(self.space.roles)
        for role, instead in to.items():
            into[self.space.role(role)] = self.space.role(instead)
        return np.searchsorted(self._codes, self._code(into[roles]))

    @cached_property
    def _moves(self) -> PricedMoves:
        """All moves, the cheapest between each two layouts."""
        sources, targets, seconds = self.space.moves
        pairs = self._of[targets] * len(self._codes) + self._of[sources]
        some = np.lexsort((seconds, pairs))
        some = some[np.diff(pairs[some], prepend=-1) > 0]
        target, source = np.divmod(pairs[some], len(self._codes))
        apart = source != target
        return PricedMoves(len(self._codes), source[apart], target[apart], seconds[some][apart])

    def steps(self, sources: Ints) -> int:
        """
        Return an estimate of the work of `fill` from the layouts with the numbers `sources`: the additions of relaxing
        all moves once.
        """
        return len(sources) * len(self._moves.sources)

    def fill(self, sources: Ints) -> None:
        """
        Compute and keep the seconds from the layouts with the numbers `sources` to all layouts, so that `least` can
        return them; those that are kept already are not computed again.
        """
        missing = np.unique(sources[~self._filled[sources]])
        if len(missing):
            self._seconds[missing] = self._moves.cheapest(missing)
            self._filled[missing] = True

    def least(self, sources: Ints, targets: Ints) -> Floats:
        """
        Return the seconds [source, target] of the cheapest sequences of moves between layouts given by number. Call
        `fill` with `sources` before; the seconds from layouts that were not filled are meaningless.
        """
        return self._seconds[np.ix_(sources, targets)]


@cache
def _words(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return every distinct order of a multiset with `counts` of each element."""
    if not any(counts):
        return ((),)
    return tuple(
        (role, *rest)
        for role, count in enumerate(counts)
        if count
        for rest in _words((*counts[:role], count - 1, *counts[role + 1 :]))
    )


def _ways(counts: Counts, floats: int) -> int:
    """Return the number of orders of axes, given counts [group, role]."""
    out = 1
    for group in counts.tolist():
        ordered = [n for role, n in enumerate(group) if role != floats]
        out *= factorial(sum(ordered)) // prod(map(factorial, ordered))
    return out


def _spelled(groups: Sequence[AxisGroup], counts: Counts, floats: int) -> tuple[Ints, Ints]:
    """Return, for counts [row, group, role] in every order: the row of each, and roles [order, axis]."""
    axes = sum(len(group.axes) for group in groups)
    of: list[int] = []
    out: list[Ints] = []
    for number, row in enumerate(counts):
        each: list[list[tuple[int, ...]]] = []
        for group in row.tolist():
            first = (floats,) * (group[floats] if floats >= 0 else 0)
            ordered = tuple(0 if role == floats else n for role, n in enumerate(group))
            each.append([(*first, *word) for word in _words(ordered)])
        for choice in product(*each):
            roles = np.zeros(axes, dtype=np.int64)
            for group, word in zip(groups, choice, strict=True):
                roles[list(group.axes)] = word
            of.append(number)
            out.append(roles)
    return np.array(of, dtype=np.int64), np.array(out, dtype=np.int64).reshape(-1, axes)


_End = tuple[int, Value, tuple[int, ...]]
"""A variable, a value it makes or needs, and the value's role for each role of the variable."""


class _AxisOrders:
    """The rows left in a factor graph over counts, expanded into orders of axes; equal variables are expanded once."""

    def __init__(self, builder: FactorGraphBuilder, problem: FactorGraph):
        self.builder, self.counted = builder, problem
        self.solver = builder.solver
        self.on_axes = Spaces(self.solver.spaces.machine)
        self.ends = list(self._ends())
        self.spaces: dict[int, OrderedSpace] = {}
        self._rows: dict[tuple[object, ...], tuple[Ints, Ints]] = {}
        self._ports: dict[tuple[object, ...], tuple[Port, Ints, Ints]] = {}
        self._betweens: dict[tuple[object, ...], DenseCost] = {}
        self.counts: list[Counts] = []
        self.floats: list[int] = []
        for (key, number), rows in zip(builder.numbers.items(), problem.rows, strict=True):
            of = self._table(key) if isinstance(key, Node) else self.solver.space(key)
            self.counts.append(of.counts[rows])
            self.floats.append(self._floats(number, of.counts.shape[2]))

    def _table(self, node: Node) -> OperatorTable:
        return self.solver.table(node, self.builder.with_gradient)

    def _ends(self) -> Iterator[tuple[_End, _End]]:
        """Yield both ends of each edge, in the order of the edges."""
        builder = self.builder
        for node in builder.nodes:
            if node.is_leaf:
                continue
            for i, value in enumerate(node.operands):
                if builder.relayed(value) or not value.node.is_leaf:
                    yield (
                        self._made(value),
                        self._at(node, value, [needed_role(node.analysis, i, r) for r in self._table(node).roles]),
                    )
            for value in node.results:
                if builder.relayed(value):
                    yield self._by_operator(value), self._relay(value)

    def _made(self, value: Value) -> _End:
        return self._relay(value) if self.builder.relayed(value) else self._by_operator(value)

    def _relay(self, value: Value) -> _End:
        return self._at(value, value, (*range(len(value.shape)), COPY, SUM, REPEAT))

    def _by_operator(self, value: Value) -> _End:
        node = value.node
        return self._at(node, value, [made_role(node.analysis, value.index, r) for r in self._table(node).roles])

    def _at(self, key: Node | Value, value: Value, roles: Sequence[int]) -> _End:
        space = self.solver.space(value)
        return self.builder.numbers[key], value, tuple(space.role(role) for role in roles)

    def _floats(self, variable: int, roles: int) -> int:
        """Return the role that is along the first dim of all values at a variable's edges; NOWHERE if there is none."""
        ends = [end for edge in self.ends for end in edge if end[0] == variable]
        along = [r for r in range(roles) if all(value.shape and to[r] == 0 for _, value, to in ends)]
        return along[0] if along and ends else NOWHERE

    def small(self) -> bool:
        """Return whether layouts and rows are within the limits."""
        axes = len(self.solver.spaces.machine.mesh.sizes)
        values = {value for edge in self.ends for _, value, _ in edge}
        if any((len(value.shape) + 2) ** axes > limits().order_layouts for value in values):
            return False
        ways: dict[tuple[object, ...], int] = {}
        for number, (counts, floats) in enumerate(zip(self.counts, self.floats, strict=True)):
            key = self._key(number)
            if key not in ways:
                ways[key] = sum(_ways(row, floats) for row in counts)
        edges = {(self._key(a), self._key(b)) for (a, _, _), (b, _, _) in self.ends}
        return (
            max(ways.values(), default=0) <= limits().order_rows
            and sum(ways[a] * ways[b] for a, b in edges) <= limits().order_pairs
        )

    def problem(self) -> FactorGraph | None:
        """Return the factor graph; None if computing distances would take too long."""
        for (_, value, _), _ in self.ends:
            if id(self.solver.space(value)) not in self.spaces:
                on_axes = self.on_axes.of_value(value)
                self.spaces[id(self.solver.space(value))] = OrderedSpace(on_axes, self.solver.spaces.groups)
        wanted: dict[OrderedSpace, list[Ints]] = {}
        for edge, (made, needs) in zip(self.counted.edges, self.ends, strict=True):
            way, _ = _whole(edge)
            space = self.spaces[id(self.solver.space(made[1]))]
            wanted.setdefault(space, []).append(self._port(made, way.training, None)[1])
            if way.training:
                wanted.setdefault(space.gradient, []).append(self._port(needs, way.training, edge.needs)[2])
        sources = {space: np.unique(np.concatenate(some)) for space, some in wanted.items()}
        if any(space.steps(some) > limits().order_sums for space, some in sources.items()):
            return None
        for space, some in sources.items():
            space.fill(some)
        of = [self._spelled(n)[0] for n in range(len(self.counts))]
        seconds = [s[rows] for s, rows in zip(self.counted.seconds, of, strict=True)]
        edges = [self._add_edge(*each) for each in zip(self.counted.edges, self.ends, strict=True)]
        return FactorGraph([np.arange(len(rows)) for rows in of], seconds, [every(len(rows)) for rows in of], edges)

    def counted_rows(self) -> list[Ints]:
        """Return, per variable, the counted row of each row."""
        return [rows[self._spelled(number)[0]] for number, rows in enumerate(self.counted.rows)]

    def _key(self, number: int) -> tuple[object, ...]:
        """Return a key, equal for variables of one structure with the same rows."""
        return id(self.builder.variables[number]), self.floats[number], self.counted.rows[number].tobytes()

    def _spelled(self, number: int) -> tuple[Ints, Ints]:
        key = self._key(number)
        if key not in self._rows:
            self._rows[key] = _spelled(self.solver.spaces.groups, self.counts[number], self.floats[number])
        return self._rows[key]

    def _port(self, end: _End, training: bool, counted: Port | None) -> tuple[Port, Ints, Ints]:
        """
        Return the port of rows in every order, with where value and gradient are; NOWHERE where no counted row needs
        it.
        """
        number, value, roles = end
        space = self.spaces[id(self.solver.space(value))]
        nowhere = counted is not None and counted.layouts[0] == NOWHERE
        key = (self._key(number), id(space), roles, training, (number if nowhere else None))
        if key not in self._ports:
            of, spelled = self._spelled(number)
            at = np.array(roles)[spelled]
            there = space.value_numbers(at)
            both = there * _MANY + (space.gradient_numbers(at) if training else 0)
            if counted is not None and nowhere:
                both[(counted.layouts[counted.at] == NOWHERE)[of]] = NOWHERE
            found = port(both)
            somewhere = found.layouts[found.layouts != NOWHERE]
            self._ports[key] = found, somewhere // _MANY, somewhere % _MANY
        return self._ports[key]

    def _add_edge(self, edge: Edge, ends: tuple[_End, _End]) -> Edge:
        way, part = _whole(edge)
        space = self.spaces[id(self.solver.space(ends[0][1]))]
        made, from_there, to_back = self._port(ends[0], way.training, None)
        needs, to_there, from_back = self._port(ends[1], way.training, edge.needs)
        key = id(space), id(made), id(needs), way.training, part
        if key not in self._betweens:
            seconds = space.least(from_there, to_there)
            if way.training:
                seconds = seconds + space.gradient.least(from_back, to_back).T
            nowhere = len(needs.layouts) - seconds.shape[1]
            seconds = np.hstack([np.zeros((len(seconds), nowhere)), part * seconds])
            self._betweens[key] = DenseCost(made, needs, seconds)
        return Edge(edge.source, edge.target, self._betweens[key])


_MANY = 1 << 31
"""Above any number of layouts: packs two indices into one integer."""


def _whole(edge: Edge) -> tuple[TwoWayCost, float]:
    """Return the two-way cost of an edge, and the factor it is scaled by."""
    way, part = edge.between, 1.0
    if isinstance(way, ScaledCost):
        way, part = way.whole, way.share
    if not isinstance(way, TwoWayCost):
        raise TypeError("search: orders are told apart where only messages are passed")
    return way, part


def with_axis_order(builder: FactorGraphBuilder, problem: FactorGraph) -> tuple[FactorGraph, list[Ints]] | None:
    """
    Expand a factor graph in which equal mesh axes are only counted into one that also tells in which order they shard a
    dim; its lower bound is tighter. Returns None if it would be too large (`limits().order_rows` and others).

    `builder` made `problem`, with `Spaces.by_count` and a stepwise `Solver`. A variable's rows are its choices: ways to
    shard an operator, or layouts of a value. Returns (the new factor graph, origins). `origins` has an array per
    variable: [new row], the row of `problem` that the new row refines, as `problem.rows` numbers them. A choice of new
    rows costs at most what the plan does in which each axis has the role that these rows give it.
    """
    found = _AxisOrders(builder, problem)
    orders = found.problem() if found.small() else None
    return None if orders is None else (orders, found.counted_rows())
