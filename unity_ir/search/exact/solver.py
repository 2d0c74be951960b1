"""
Find the fastest parallelization of one serial graph, exactly.

    min over configurations c_op, resting layouts r_leaf, relay layouts l_value of
        sum over operators  of  seconds(c_op)
      + sum over leaves     of  update(r_leaf) + reshard(r_leaf -> l_leaf)
      + sum over values     of  reshard(made(c_producer) -> l_value)
      + sum over their uses of  reshard(l_value -> needed(c_user))

`reshard` counts the forward and, in training, the backward. A value with one user needs no relay. Users share the way
to the relay; that those needing one layout share the rest, too, is `search/exact/shared_moves.py`.

That is a choice of one row of each variable of a factor graph. Rows that are dominated are dropped
(`search/exact/factor_graph.py`); `search/exact/minimum.py` finds the least of what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from unity_ir.cost.memory import leaf_bytes
from unity_ir.cost.plan import update_time
from unity_ir.cost.routes import product_rows
from unity_ir.cost.work import adds_gradients, repeats
from unity_ir.pcg.differentiate import has_gradient, nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import piece_as_weight
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.search.exact.elimination import Memo, every
from unity_ir.search.exact.factor_graph import (
    NOWHERE,
    Edge,
    FactorGraph,
    LazyRows,
    PairwiseCost,
    Port,
    Variable,
    between,
    port,
    undominated,
)
from unity_ir.search.exact.known_messages import PLAIN, Known, KnownMessages, Moved, Start
from unity_ir.search.exact.minimum import minimum
from unity_ir.search.exact.recompute import ALL_SAVED, SavedForBackward
from unity_ir.search.exact.shorter import shorter
from unity_ir.search.exact.two_way import TwoWayCost
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import TIME, Price
from unity_ir.search.layouts.operator_table import OperatorTable, addition_seconds_of, operator_table
from unity_ir.search.layouts.space import LayoutSpace, Spaces


@dataclass(frozen=True)
class ExactPlan:
    """
    The choice of the exact search: a configuration per operator, and a layout per leaf and per value with several
    users.

    Configurations are rows of the operators' tables, layouts are numbers in the `LayoutSpace` of the value.
    """

    seconds: float
    """Cost in the objective of the solver that found it: seconds, or with a price of bytes these added."""
    rows: Mapping[Node, int]
    """The row of each operator's table (`Solver.table`)."""
    layouts: Mapping[Value, int]
    """Layout numbers of relayed values, and of leaves that one operator reads."""
    rests: Mapping[Value, int] = field(default_factory=dict[Value, int])
    """Layout numbers in which leaves with several uses rest, before they are brought to their relay."""
    again: frozenset[Node] = frozenset()
    """
    Operators whose results are recomputed for the backward rather than saved; none at a price with `again`, as there is
    more to them than the price of each.
    """
    bound: float = 0.0
    """Lower bound in the unit of `seconds`; equal to `seconds` if this plan is optimal."""
    rows_before: int = 0
    """Number of rows of all variables before pruning."""
    rows_left: int = 0
    """Number of rows of all variables after pruning."""


@dataclass
class _ReshardRows:
    """The cost of resharding from a layout to all others (`there`), or from all others to it, row by row on demand."""

    space: LayoutSpace
    price: Price
    training: bool
    kept: bool
    there: bool
    _rows: dict[int, Floats] = field(default_factory=dict[int, Floats])

    def __getitem__(self, at: int, /) -> Floats:
        if at not in self._rows:
            self._rows[at] = self._row(at)
        return self._rows[at]

    def whole(self) -> Floats:
        """Return the whole table [from, to]."""
        if self.price.byte == 0:
            return self._priced(self.space.training if self.training else self.space.forward)
        every = np.arange(len(self.space))
        return self.price.reshard(self.space, every, every, self.training, self.kept)

    def _row(self, at: int) -> Floats:
        if self.price.byte == 0:
            return self._priced(self.space.reshard_one(at, self.training, self.there))
        one, every = np.array([at]), np.arange(len(self.space))
        ends = (one, every) if self.there else (every, one)
        return self.price.reshard(self.space, *ends, self.training, self.kept).reshape(-1)

    def _priced(self, seconds: Floats) -> Floats:
        return seconds if self.price.second == 1 else self.price.second * seconds


@dataclass(frozen=True)
class _IdentityRows:
    """The cost where no move is allowed: 0 for the layout itself, infinite otherwise."""

    size: int

    def __getitem__(self, at: int, /) -> Floats:
        row = np.full(self.size, np.inf)
        row[at] = 0.0
        return row


@dataclass
class Solver:
    """
    Finds the optimal plans of graphs on one machine; memoises operator tables, ports and costs across graphs. It
    chooses a row for each variable: for an operator, a configuration (way to shard it); for a value with several users,
    the layout in which these find it, its relay. Layouts are numbers in the value's `LayoutSpace`.
    """

    spaces: Spaces
    optimizer: Optimizer
    stepwise: bool = False
    """Whether only messages are passed: rows are not dropped, and there are no dense tables of layout pairs."""
    _tables: dict[tuple[object, ...], OperatorTable] = field(default_factory=dict[tuple[object, ...], OperatorTable])
    _totals: dict[tuple[int, int], tuple[Floats, Floats]] = field(
        default_factory=dict[tuple[int, int], tuple[Floats, Floats]]
    )
    """Memo of `_additions`, by the id of the table and the number of the operand."""
    variables: dict[tuple[object, ...], Variable] = field(default_factory=dict[tuple[object, ...], Variable])
    """Memo of variables of factor graphs, by what their costs depend on."""
    pairwise: dict[tuple[object, ...], PairwiseCost] = field(default_factory=dict[tuple[object, ...], PairwiseCost])
    """Memo of the costs of edges, by what they depend on."""
    memo: Memo = field(default_factory=Memo)
    """Tables of earlier eliminations."""
    _leaves: dict[tuple[object, ...], tuple[Floats, Ints]] = field(
        default_factory=dict[tuple[object, ...], tuple[Floats, Ints]]
    )
    _rests: dict[tuple[object, ...], Floats] = field(default_factory=dict[tuple[object, ...], Floats])
    _aparts: dict[tuple[object, ...], LazyRows] = field(default_factory=dict[tuple[object, ...], LazyRows])
    known: KnownMessages = field(default_factory=KnownMessages)
    """Messages of earlier searches, from which those of the same graphs start."""
    price: Price = TIME
    """The price that is minimised; plans' `seconds` and `bound` are in its unit."""

    def with_price(self, price: Price) -> Solver:
        """
        Return a solver that minimises the objective `price`, which has the cost of a second and that of a byte held; it
        shares operator tables and known messages with this one.
        """
        return Solver(
            self.spaces,
            self.optimizer,
            _tables=self._tables,
            _totals=self._totals,
            known=self.known,
            price=price,
            stepwise=self.stepwise,
        )

    def table(self, node: Node, with_gradient: frozenset[Node]) -> OperatorTable:
        """
        Return the table of a serial compute node: a row per configuration (how its work is sharded), with the layouts
        it needs and makes, its seconds and its bytes; memoised.

        `with_gradient` are the graph's nodes whose values have a gradient (`differentiate.nodes_with_gradient`).
        """
        needs = tuple(node in with_gradient and v.node in with_gradient for v in node.operands)
        weights = tuple(v.node.op == "weight" for v in node.operands)
        rows = product_rows(with_gradient).get(node) if self.spaces.exchange_rows else None
        key = (node.op, node.attributes, tuple(v.type for v in node.operands), weights, repeats(node), needs, rows)
        if key not in self._tables:
            self._tables[key] = operator_table(node, needs, self.spaces, rows)
        return self._tables[key]

    def space(self, value: Value) -> LayoutSpace:
        """
        Return the space of all layouts that a value of this type may have on the solver's machine, which numbers them;
        memoised.
        """
        return self.spaces.of_value(value)

    def solve(self, graph: Graph, most: float = np.inf) -> ExactPlan:
        """
        Return the best plan found for a serial forward graph; it is optimal if its `bound` equals its `seconds`. If no
        plan can cost less than `most`, in the solver's objective, return any, as soon as that is known.

        Raises `OutOfBudget` if the budget ends before there is a plan.
        """
        return FactorGraphBuilder(self, graph).solve(most)

    def variable(
        self,
        node: Node,
        with_gradient: frozenset[Node],
        single: Sequence[Value],
        results: Sequence[bool | None],
        keeps: SavedForBackward | None = None,
        whole: bool = False,
        shared: frozenset[Value] = frozenset(),
        before: float = 0.0,
    ) -> Variable:
        """
        Return the factor graph's variable of an operator: a row per configuration (way to shard it), with its cost and
        the layouts it makes and needs. Dominated rows, which no optimum needs, are left out, unless `whole` is set or
        the solver only bounds by messages (`stepwise`).

        `with_gradient` are the nodes whose values have a gradient; `single` are the leaves that only this operator
        reads, whose storage and reshards the rows' costs include; `results` says for each result whether a gradient
        comes back to it, or None if nobody reads it; `keeps` says which values the backward reads, whose bytes count
        (None: all). An operand in `shared` may be found in a layout to which another reader has moved it: a row is then
        dominated only by rows that need the same layout of it. `before` is the cost of having, in the backward, the
        values that recomputing the operator reads.
        """
        table = self.table(node, with_gradient)
        user = node in with_gradient
        kept = ALL_SAVED if keeps is None else keeps
        flags = (kept.results(node), kept.operands(node), node in kept.may_recompute)
        leaves = tuple(v in single and v.node.op == "weight" for v in node.operands)
        same = tuple(v in shared for v in node.operands)
        key = (id(table), tuple(v in single for v in node.operands), leaves, tuple(results), flags, whole, same, before)
        if key not in self.variables:
            self.variables[key] = self._variable(
                table, node, with_gradient, user, single, results, flags, whole, same, before
            )
        return self.variables[key]

    def _variable(
        self,
        table: OperatorTable,
        node: Node,
        with_gradient: frozenset[Node],
        user: bool,
        single: Sequence[Value],
        results: Sequence[bool | None],
        kept: tuple[tuple[bool, ...], tuple[bool, ...], bool],
        whole: bool,
        same: tuple[bool, ...],
        before: float,
    ) -> Variable:
        made, read, may = kept
        seconds = self.price.rows(table, made, may, before)
        needs: list[Ints] = []
        ends: list[tuple[Ints, LazyRows]] = []
        for i, value in enumerate(node.operands):
            if value in single:
                is_added = value.node.op == "weight" and bool(self.price.add) and adds_gradients(node, value)
                if is_added and user and value.node in with_gradient:
                    seconds = seconds + self.price.additions(*self._additions(table, node, i))
                seconds = seconds + self.leaf(value, with_gradient, user, read[i], is_added)[0][table.operands[i]]
                continue
            need = layouts_needed(node, table, i)
            needs.append(need)
            if self.stepwise:
                continue
            apart = self._apart(value, user and value.node in with_gradient, read[i], there=False)
            ends.append((need, _IdentityRows(len(self.space(value))) if same[i] else apart))
        for i, training in enumerate(results):
            if training is not None and not self.stepwise:
                ends.append((table.results[i], self._apart(node.results[i], training, made[i], there=True)))
        rows = np.arange(len(table))
        if not whole and len(set(node.operands)) == len(node.operands) and not self.stepwise:
            rows = rows[undominated(seconds, ends)]
        return Variable(
            len(table),
            rows,
            seconds[rows],
            every(len(rows)),
            tuple(port(made[rows]) for made in table.results),
            tuple(port(need[rows]) for need in needs),
        )

    def _additions(self, table: OperatorTable, node: Node, operand: int) -> tuple[Floats, Floats]:
        """Return what `addition_seconds_of` does, memoised."""
        key = id(table), operand
        if key not in self._totals:
            self._totals[key] = addition_seconds_of(table, node, operand, self.spaces)
        return self._totals[key]

    def relay(self, value: Value, with_gradient: frozenset[Node], kept: bool) -> Variable:
        """
        Return the factor graph's variable that chooses the layout in which the users of a leaf, or of a value with
        several users, find it (its relay): a row per layout. The cost of a row is, for a leaf, that of storing it in
        the best layout and resharding it to the row's, as `leaf` returns; 0 for other values, whose reshards are costs
        of edges.

        A leaf among `with_gradient`, the nodes whose values have a gradient, pays for resharding its gradient back,
        too, and a weight for its update. `kept` says whether the backward reads a leaf in the row's layout: the
        resharded leaf's bytes count then.
        """
        key = (value.type, value.node.op if value.node.is_leaf else "", value.node in with_gradient, kept)
        if key not in self.variables:
            rows = np.arange(len(self.space(value)))
            leaf = value.node.is_leaf
            seconds = self.leaf(value, with_gradient, True, kept)[0] if leaf else np.zeros(len(rows))
            needs = () if leaf else (port(rows),)
            self.variables[key] = Variable(len(rows), rows, seconds, every(len(rows)), (port(rows),), needs)
        return self.variables[key]

    def between(self, value: Value, made: Port, needs: Port, training: bool, kept: bool) -> PairwiseCost:
        """
        Return the cost [layout made, layout needed] of resharding a value along an edge, in the solver's objective;
        memoised.

        The ports `made` and `needs` have the layouts at the producer's end and at the reader's. `training` adds the
        cost of resharding the gradient back, `kept` the bytes of the resharded value, which the backward reads.
        """
        key = (value.type, value.node.op == "weight", training, kept, id(made), id(needs))
        if key not in self.pairwise:
            space = self.space(value)
            self.pairwise[key] = (
                TwoWayCost(made, needs, space, training)
                if self.stepwise
                else between(space, made, needs, training, self.price, kept)
            )
        return self.pairwise[key]

    def leaf(
        self, value: Value, with_gradient: frozenset[Node], user: bool, kept: bool, is_added: bool = False
    ) -> tuple[Floats, Ints]:
        """
        Return (cost, rest), each [layout]: for each layout in which users find a leaf (input, weight or constant), the
        least cost in the solver's objective, and the number of the layout in which the leaf is stored at that cost.

        The cost is that of storing it (`Solver.rest`) and of the reshard to the users. `with_gradient` are the nodes
        whose values have a gradient. `user` says whether a user of the leaf is one of them, so that the leaf's gradient
        is resharded back; `kept` whether the backward reads the resharded leaf, so that its bytes count; `is_added`
        whether the leaf's only user is a matrix product whose backward adds the gradients of micro-batches up.
        """
        training = user and value.node in with_gradient
        key = (value.type, value.node.op, value.node.master, training, kept, is_added)
        if key not in self._leaves:
            rest, space = self.rest(value.node, with_gradient), self.space(value)
            rests = np.flatnonzero(np.isfinite(rest))
            is_weight = value.node.op == "weight"
            seconds = rest[rests][:, None] + self.price.leaf(space, rests, training, kept, is_weight, is_added)
            best = seconds.argmin(axis=0)
            self._leaves[key] = np.take_along_axis(seconds, best[None], axis=0)[0], rests[best]
        return self._leaves[key]

    def _apart(self, value: Value, training: bool, kept: bool, there: bool) -> LazyRows:
        """Return the reshard cost from each layout of a value to all, or to each from all."""
        key = (value.type, value.node.op == "weight", training, kept if self.price.byte else None, there)
        if key not in self._aparts:
            space = self.space(value)
            rows = _ReshardRows(space, self.price, training, kept, there)
            if len(space) <= limits().dense_space:
                table = rows.whole()
                rows = table if there else table.T
            self._aparts[key] = rows
        return self._aparts[key]

    def rest(self, node: Node, with_gradient: frozenset[Node]) -> Floats:
        """
        Return the cost [layout] of storing a leaf (input, weight or constant) in each layout, in the solver's
        objective: its memory and, of a trained weight, its update.

        `with_gradient` are the nodes whose values have a gradient. The cost is infinite for layouts with SUM or COPY,
        in which no leaf is stored: its replicas are REPEAT, so that each gets the whole gradient.
        """
        (type,) = node.types
        updated = node.op == "weight" and node in with_gradient
        key = (type, node.op, node.master, updated)
        if key not in self._rests:
            self._rests[key] = self.price.rest(*self.resting(node, updated))
        return self._rests[key]

    def resting(self, node: Node, updated: bool) -> tuple[Floats, Floats]:
        """
        Return (seconds, bytes), each [layout], of storing a leaf (input, weight or constant) in each layout: the
        seconds of the optimizer's update, and the bytes of its tensors on a device, gradient and optimizer state
        included. Both are infinite for layouts with SUM (addends) or COPY (replicas whose gradients are yet to be
        added), in which no leaf is stored: its replicas are REPEAT, so that each gets the whole gradient.

        `updated` says whether the leaf is a trained weight; otherwise the seconds are 0, and neither gradient nor state
        counts.
        """
        space = self.space(node.result)
        (type,) = node.types
        barred = space.degrees[:, space.rank] * space.degrees[:, space.rank + 1] > 1
        seconds = np.where(barred, np.inf, 0.0)
        bytes = np.where(barred, np.inf, leaf_bytes(node, updated, self.optimizer) * space.elements)
        if not updated:
            return seconds, bytes
        for i in np.flatnonzero(~barred):
            degrees = tuple(int(d) for d in space.degrees[i, : space.rank])
            piece = piece_as_weight(node, tensor_type(space.shape, type.dtype, degrees))
            seconds[i] = update_time(piece, self.optimizer, self.spaces.machine)
        return seconds, bytes


def layouts_needed(node: Node, table: OperatorTable, operand: int) -> Ints:
    """
    Return the layout in which an operator needs its operand number `operand`, for each way to shard the operator (a row
    of `table`): [row], numbers in the operand's `LayoutSpace`.

    It is NOWHERE, which costs nothing to reach, where an earlier operand is the same value in the same layout, since
    one reshard serves both.
    """
    needed, value = table.operands[operand].copy(), node.operands[operand]
    for earlier in (i for i in range(operand) if node.operands[i] == value):
        needed[table.operands[operand] == table.operands[earlier]] = NOWHERE
    return needed


class FactorGraphBuilder:
    """
    Builds the factor graph of one serial graph, and turns a choice (one row per variable) into a plan. A variable is an
    operator, whose rows are the ways to shard it, or the relay of a value with several users, whose rows are the
    layouts in which these find the value.
    """

    def __init__(self, solver: Solver, graph: Graph, whole: Node | None = None):
        """Keep every row of the operator `whole`, dominated or not."""
        self.solver = solver
        self.whole = whole
        self.graph = graph
        self.outputs = graph.outputs
        self.nodes = graph.nodes()
        self.with_gradient = nodes_with_gradient(graph)
        self.keeps = ALL_SAVED if solver.price.byte == 0 else SavedForBackward(graph)
        self.uses = graph.users()
        self.numbers: dict[Node | Value, int] = {}
        self.variables: list[Variable] = []
        self.edges: list[Edge] = []
        self.single_leaves: list[tuple[Value, Node, int]] = []
        self._had: dict[Value, float] = {}
        for node in self.nodes:
            if not node.is_leaf:
                self._operator(node)
            elif self.relayed(node.result):
                self._relay(node.result)

    def at(self, node: Node) -> Solver:
        """
        Return the solver in whose objective a node, an operator or a leaf, and the moves of its results are priced.
        Here it is the same for all nodes; a subclass may give each its own.
        """
        return self.solver

    def keeps_all_rows(self, node: Node) -> bool:
        """
        Return whether all configurations (rows) of an operator are kept, rather than dropped where another row
        dominates them. Here that is so only for the operator `whole` that the constructor was given: `search.explain`
        asks for the best plan with each of its rows, which no optimum need have. A subclass may keep all rows of more
        operators.
        """
        return node is self.whole

    def problem(self) -> FactorGraph:
        """
        Return the graph's factor graph: a variable per operator and per relay, with all their rows but dominated ones,
        which no optimum needs.
        """
        of = self.variables
        return FactorGraph([v.rows for v in of], [v.seconds for v in of], [v.own for v in of], [*self.edges])

    def solve(self, most: float = np.inf) -> ExactPlan:
        """
        Return the best plan found for the graph, with its lower bound; where that is `most` or more, any plan. Raises
        `OutOfBudget` if the budget ends before there is a plan.
        """
        return self.plan(self.problem(), most)

    def plan(self, problem: FactorGraph, most: float = np.inf) -> ExactPlan:
        """
        Return the best plan found among the rows left in `problem`, a factor graph of this graph that may have lost
        some; any plan, where their lower bound is `most` or more.
        """
        return self.chosen(problem, *minimum(problem, self.solver.memo, self.start(), most))

    def start(self) -> Start:
        """
        Return where the messages of a search of this graph start, and are kept for the next one. Those of a search with
        moves hidden are not kept: for another share, those without are the better start.
        """
        moved = [PLAIN if isinstance(key, Node) else self.moved(key) for key in self.numbers]
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, FactorGraphBuilder)]
        key, *others = ((kind, self.outputs, self.solver.price.second == 0) for kind in kinds)
        kept = not self.solver.price.hidden
        return Start(self.solver.known, key, moved, partial(self._messages_of_shorter, moved), others, kept)

    def _messages_of_shorter(self, moved: Sequence[Moved], whole: FactorGraph) -> Known | None:
        """
        Return messages for the factor graph `whole` of this graph from those of a graph with fewer of its equal layers,
        which start where the search before of that one ended; None where there is no such graph. `moved` is as in
        `Start`.
        """
        short = shorter(self.graph)
        builder = None if short is None else self.of_shorter(short.graph)
        if short is None or builder is None:
            return None
        start = builder.start()
        messages = start.messages(builder.problem())
        messages.settle(limits().short_passes, limits().settled)
        start.keep(found := start.now(messages))
        return short.lengthened(found, builder.numbers, whole, self.numbers, moved)

    def of_shorter(self, graph: Graph) -> FactorGraphBuilder | None:
        """
        Return a builder with the same costs for a graph with fewer equal layers than this one's; None where there is
        none, as costs depend on the layer.
        """
        return FactorGraphBuilder(self.solver, graph)

    def moved(self, value: Value) -> Moved:
        """Return what the rows of a value's relay are: here only the layouts in which its users find it."""
        return PLAIN

    def chosen(self, problem: FactorGraph, seconds: float, chosen: Sequence[int], bound: float) -> ExactPlan:
        """
        Return the plan for a choice: `chosen` has the row of each variable of `problem`, a factor graph of this graph,
        as `problem.rows` numbers them.

        `seconds` is the choice's cost, and `bound` a lower bound on all choices; the plan records both.
        """
        rows = {key: chosen[i] for key, i in self.numbers.items() if isinstance(key, Node)}
        layouts = {key: self.layout_of_row(key, chosen[i]) for key, i in self.numbers.items() if isinstance(key, Value)}
        rests = {
            v: int(self.at(v.node).leaf(v, self.with_gradient, True, self.keeps.is_saved(v))[1][found])
            for v, found in layouts.items()
            if v.node.is_leaf
        }
        for value, user, slot in self.single_leaves:
            need = int(self.solver.table(user, self.with_gradient).operands[slot][rows[user]])
            read = self.keeps.operands(user)[slot]
            layouts[value] = self.at(user).leaf(value, self.with_gradient, user in self.with_gradient, read)[1][need]
        among, left = sum(v.among for v in self.variables), sum(map(len, problem.rows))
        may = frozenset[Node]() if self.solver.price.again else self.keeps.may_recompute
        again = frozenset(n for n in may if self._recomputes(n, rows[n]))
        return ExactPlan(seconds, rows, layouts, rests, again, bound, among, left)

    def with_rows(self, plan: ExactPlan, changed: Mapping[Node, int]) -> ExactPlan:
        """
        Return a plan in which some operators have other configurations: `changed` has their rows. A leaf that one of
        these operators alone reads is stored as is best then; relays stay. The plan's `seconds` and `bound` are copied,
        and no longer hold.
        """
        rows = {**plan.rows, **changed}
        chosen = [rows[key] if isinstance(key, Node) else plan.layouts[key] for key in self.numbers]
        return self.chosen(self.problem(), plan.seconds, chosen, plan.bound)

    def layout_of_row(self, value: Value, row: int) -> int:
        """
        Return the number of the layout in which users find a value, given the index of the row chosen for its relay:
        here the row itself, as the rows of a relay are layouts.
        """
        return row

    def shared(self) -> frozenset[Value]:
        """
        Return the values that an operator may find in the layout it needs because another reader has moved them there.

        Here that is none: each reader pays for its moves (see `SharedFactorGraphBuilder`).
        """
        return frozenset()

    def _to_have(self, value: Value) -> float:
        """
        Return a reader's share of the least cost of a value that no backward reads, but recomputing its readers does:
        it is kept or made again, too. 0 for others, which are paid for as it is, and for those made with such.
        """
        if value.node.is_leaf or any(map(self.keeps.is_saved, value.node.results)):
            return 0.0
        if value not in self._had:
            price, table = self.at(value.node).price, self.solver.table(value.node, self.with_gradient)
            again = price.second * float(table.again.min()) + self._to_have_all(value.node)
            kept = price.byte * price.live * float(table.made[value.index].min())
            readers = {user for user, _ in self.uses[value]}
            self._had[value] = min(kept, again / len(value.node.results)) / len(readers)
        return self._had[value]

    def row_costs(self, node: Node, kept: Sequence[bool]) -> Floats:
        """
        Return the cost [configuration] of an operator without its moves and leaves if the backward read those of its
        results for which `kept` is True.
        """
        solver = self.at(node)
        before = self._to_have_all(node) if solver.price.again else 0.0
        may = node in self.keeps.may_recompute
        return solver.price.rows(solver.table(node, self.with_gradient), kept, may, before)

    def _to_have_all(self, node: Node) -> float:
        return sum(map(self._to_have, dict.fromkeys(node.operands)), 0.0)

    def _recomputes(self, node: Node, row: int) -> bool:
        table = self.solver.table(node, self.with_gradient)
        return bool(self.at(node).price.recomputes(table, self.keeps.results(node))[row])

    def relayed(self, value: Value) -> bool:
        """
        Return whether a value has a variable of its own, its relay, which chooses the layout in which its users find
        it: if it has several uses, or is a leaf that nobody reads.
        """
        return len(self.uses.get(value, ())) > 1 or (value.node.is_leaf and value not in self.uses)

    def training(self, value: Value, users: Iterable[Node]) -> bool:
        """Return whether any of the operators `users`, which read a value, returns a gradient to it."""
        return has_gradient(value, self.with_gradient, users)

    def _enter(self, key: Node | Value, variable: Variable) -> int:
        self.numbers[key] = len(self.variables)
        self.variables.append(variable)
        return self.numbers[key]

    def _operator(self, node: Node) -> None:
        single = [v for v in dict.fromkeys(node.operands) if v.node.is_leaf and not self.relayed(v)]
        results = [
            self.training(v, [user for user, _ in self.uses[v]]) if v in self.uses else None for v in node.results
        ]
        solver, whole = self.at(node), self.keeps_all_rows(node)
        before = self._to_have_all(node) if solver.price.again else 0.0
        variable = solver.variable(node, self.with_gradient, single, results, self.keeps, whole, self.shared(), before)
        own = self._enter(node, variable)
        ports = iter(variable.needs)
        for i, value in enumerate(node.operands):
            if value in single:
                self.single_leaves.append((value, node, i))
                continue
            source = self.numbers[value if self.relayed(value) else value.node]
            made = self.variables[source].made[0 if self.relayed(value) else value.index]
            kept = self.keeps.operands(node)[i]
            self._add_edge(value, source, made, own, next(ports), self.training(value, [node]), kept, node)
        for i, value in enumerate(node.results):
            if self.relayed(value):
                relay = self._relay(value)
                training = self.training(value, [user for user, _ in self.uses[value]])
                kept = self.keeps.relayed(value, self.uses[value])
                needs = self.variables[relay].needs[0]
                self._add_edge(value, own, variable.made[i], relay, needs, training, kept, node)

    def _add_edge(
        self, value: Value, source: int, made: Port, target: int, needs: Port, training: bool, kept: bool, payer: Node
    ) -> None:
        solver = self.at(payer)
        self.edges.append(Edge(source, target, self.pairwise(solver, value, source, made, needs, training, kept)))

    def pairwise(
        self, solver: Solver, value: Value, source: int, made: Port, needs: Port, training: bool, kept: bool
    ) -> PairwiseCost:
        """
        Return the cost [layout made, layout needed], in the objective of `solver`, of the reshard of a value along one
        edge.

        `source` is the number of the variable that provides the value, its producer's or its relay, which makes the
        layouts `made`. The variable at the other end needs the layouts `needs`. `training` says whether a gradient
        comes back along the edge, `kept` whether the backward reads the resharded value, so that its bytes count.
        """
        return solver.between(value, made, needs, training, kept)

    def relay(self, value: Value) -> Variable:
        """
        Return the variable of a leaf or a value with several users, its relay: a row per layout in which the users find
        it.
        """
        return self.at(value.node).relay(value, self.with_gradient, self.keeps.is_saved(value))

    def _relay(self, value: Value) -> int:
        return self._enter(value, self.relay(value))
