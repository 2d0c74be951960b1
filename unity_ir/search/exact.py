"""
The fastest parallelization of one serial graph, exactly.

    min over configurations c_op, resting layouts r_leaf, relay layouts l_value of
        sum over operators  of  seconds(c_op)
      + sum over leaves     of  update(r_leaf)
      + sum over values     of  reshard(made(c_producer) -> l_value)
      + sum over their uses of  reshard(l_value -> needed(c_user))

`reshard` counts the forward and, where there is one, the backward (`LayoutSpace.training`). A value with one user
needs no relay. A relay is where several users share what they can of the way (`search/exact.py` builds the terms,
`search/eliminate.py` minimises them). The layouts are counts of axes (`search/space.py`), so the minimum is a lower
bound on every placement of this graph, and is attained when `search/realise.py` finds axes that fit the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from unity_ir.cost.plan import update_time
from unity_ir.cost.work import repeats
from unity_ir.pcg.differentiate import trained
from unity_ir.pcg.graph import Graph, Node, Optimizer, Value, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.search.eliminate import Factor, minimise
from unity_ir.search.space import Floats, Ints, LayoutSpace, Spaces
from unity_ir.search.tables import OperatorTable, operator_table


@dataclass(frozen=True)
class ExactPlan:
    """A minimum: the row of every operator's table, the layout of every relayed value and every leaf."""

    seconds: float
    rows: Mapping[Node, int]
    layouts: Mapping[Value, int]
    """Layout numbers of values with several uses, and of leaves."""


@dataclass
class Solver:
    """Solves graphs on one machine; tables of operators it has seen are kept."""

    spaces: Spaces
    optimizer: Optimizer
    _tables: dict[tuple[object, ...], OperatorTable] = field(default_factory=dict[tuple[object, ...], OperatorTable])
    _edges: dict[tuple[object, ...], Floats] = field(default_factory=dict[tuple[object, ...], Floats])
    _rests: dict[tuple[object, ...], Floats] = field(default_factory=dict[tuple[object, ...], Floats])

    def table(self, node: Node, with_gradient: set[Node]) -> OperatorTable:
        """The table of a serial compute node."""
        needs = tuple(node in with_gradient and v.node in with_gradient for v in node.operands)
        key = (node.op, node.attributes, tuple(v.type for v in node.operands), repeats(node), needs)
        if key not in self._tables:
            self._tables[key] = operator_table(node, needs, self.spaces)
        return self._tables[key]

    def space(self, value: Value) -> LayoutSpace:
        """The layouts of a value."""
        return self.spaces.of(value.type.shape, value.type.dtype)

    def solve(self, graph: Graph) -> ExactPlan:
        """The minimum for a serial forward graph."""
        return _Problem(self, graph).solve()

    def rest(self, node: Node, with_gradient: set[Node]) -> Floats:
        """Seconds a leaf costs by resting in each layout: the update of a weight; copies and addends never rest."""
        (type,) = node.types
        updated = node.op == "weight" and node in with_gradient
        key = (type, updated)
        if key not in self._rests:
            self._rests[key] = self._make_rest(node, updated)
        return self._rests[key]

    def _make_rest(self, node: Node, updated: bool) -> Floats:
        space = self.space(node.result)
        (type,) = node.types
        barred = space.degrees[:, space.rank] * space.degrees[:, space.rank + 1] > 1
        seconds = np.where(barred, np.inf, 0.0)
        if not updated:
            return seconds
        for i in np.flatnonzero(~barred):
            degrees = tuple(int(d) for d in space.degrees[i, : space.rank])
            piece = leaf("weight", tensor_type(type.shape, type.dtype, degrees), name="piece")
            seconds[i] = update_time(piece, self.optimizer, self.spaces.machine)
        return seconds


class _Problem:
    """The terms of one graph."""

    def __init__(self, solver: Solver, graph: Graph):
        self.solver = solver
        self.nodes = graph.nodes()
        self.with_gradient = trained(graph)
        self.uses = graph.users()
        self.numbers: dict[Node | Value, int] = {}
        self.sizes: dict[int, int] = {}
        self.factors: list[Factor] = []
        self.single_leaves: list[tuple[Value, Node, Floats]] = []

    def variable(self, key: Node | Value, size: int) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.sizes[self.numbers[key]] = size
        return self.numbers[key]

    def reshard(self, value: Value, users: Iterable[Node]) -> Floats:
        space = self.solver.space(value)
        has_gradient = value.node in self.with_gradient and not self.with_gradient.isdisjoint(users)
        return space.training if has_gradient else space.forward

    def relayed(self, value: Value) -> bool:
        """Whether where a value's users find it is a choice of its own: not if it has one user, who decides it."""
        return len(self.uses.get(value, ())) > 1 or (value.node.is_leaf and value not in self.uses)

    def solve(self) -> ExactPlan:
        for node in self.nodes:
            if node.is_leaf:
                if self.relayed(node.result):
                    rest = self.solver.rest(node, self.with_gradient)
                    self.factors.append(Factor((self.variable(node.result, len(rest)),), rest))
            else:
                self._operator(node)
        seconds, found = minimise(self.sizes, self.factors)
        by_key = {key: found[number] for key, number in self.numbers.items()}
        rows = {key: row for key, row in by_key.items() if isinstance(key, Node)}
        layouts = {key: row for key, row in by_key.items() if isinstance(key, Value)}
        for value, user, table in self.single_leaves:
            layouts[value] = int(table[:, rows[user]].argmin())
        return ExactPlan(seconds, rows, layouts)

    def _operator(self, node: Node) -> None:
        table = self.solver.table(node, self.with_gradient)
        own = self.variable(node, len(table))
        self.factors.append(Factor((own,), table.seconds))
        for value in dict.fromkeys(node.operands):
            slots = [table.operands[i] for i, v in enumerate(node.operands) if v == value]
            self._use(value, node, own, slots)
        for i, value in enumerate(node.results):
            if self.relayed(value):
                relay = self.variable(value, len(self.solver.space(value)))
                users = [user for user, _ in self.uses[value]]
                self.factors.append(Factor((own, relay), self.reshard(value, users)[table.results[i]]))

    def _use(self, value: Value, user: Node, own: int, slots: list[Ints]) -> None:
        """The term of one operator's use of a value, from where the value is to where the operator needs it."""
        reshard = self.reshard(value, [user])
        if self.relayed(value):
            term = reshard[:, slots[0]].copy()
            for i, slot in enumerate(slots[1:], start=1):
                fresh = np.all([slot != earlier for earlier in slots[:i]], axis=0)
                term += np.where(fresh, reshard[:, slot], 0.0)
            self.factors.append(Factor((self.variable(value, len(reshard)), own), term))
        elif value.node.is_leaf:
            term = self.solver.rest(value.node, self.with_gradient)[:, None] + reshard[:, slots[0]]
            self.single_leaves.append((value, user, term))
            self.factors.append(Factor((own,), term.min(axis=0)))
        else:
            made = self.solver.table(value.node, self.with_gradient).results[value.index]
            self.factors.append(Factor((self.numbers[value.node], own), reshard[np.ix_(made, slots[0])]))
