"""
Write the layout search of one graph as a factor graph: variables with unary costs, edges with pairwise costs.

A variable is an operator (its rows are configurations) or a relay (its rows are the layouts in which a value with
several users, or a leaf, may be found). An edge is the reshard of a value, from the layout that one variable's row
makes to the layout that another's row needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from unity_ir.search.exact.elimination import Projection, every
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import TIME, Price
from unity_ir.search.layouts.space import LayoutSpace

NOWHERE = -1
"""
Stands for a needed layout where none is needed: an earlier operand of the same operator is the same value, in the same
layout.
"""


@dataclass(frozen=True, eq=False)
class Port:
    """
    One end of an edge, which reshards a value between two variables: the distinct layouts that the rows of the variable
    there make (or need), and each row's layout. A variable's rows are its choices: ways to shard an operator, or
    layouts in which the readers of a value find it.
    """

    layouts: Ints
    """Distinct, sorted."""
    axis: Projection
    """For each row, the index of its layout."""

    @property
    def at(self) -> Ints:
        """For each row of the variable, the index of its layout in `layouts`: [row]."""
        return self.axis.at

    def least(self, of_rows: Floats) -> Floats:
        """
        Return the least cost among the rows that have each layout, [layout], given a cost per row, `of_rows` [row].
        """
        return self.axis.least(of_rows)

    def of(self, rows: Ints | npt.NDArray[np.bool_]) -> Port:
        """
        Return the port restricted to some of the variable's rows, given as indices or as a mask, and to their layouts.
        """
        at = self.at[rows]
        left = np.zeros(len(self.layouts), dtype=bool)
        left[at] = True
        count = int(np.count_nonzero(left))
        if count == len(left):
            return Port(self.layouts, Projection(at, count))
        return Port(self.layouts[left], Projection((np.cumsum(left) - 1)[at], count))


def port(layouts: Ints) -> Port:
    """
    Return the port (one end of an edge) of a variable whose rows, its choices, make or need the layouts `layouts`
    there: [row], numbers in the value's `LayoutSpace`.
    """
    distinct, at = numbered(layouts)
    return Port(distinct, Projection(at, len(distinct)))


def numbered(layouts: Ints) -> tuple[Ints, Ints]:
    """
    Return (distinct, index): the distinct numbers in `layouts`, sorted, and for each number in `layouts` its index
    among them, as `numpy.unique(.., return_inverse=True)` does.

    Numbers that are dense in their range are not sorted, which is faster.
    """
    least, most = (int(layouts.min()), int(layouts.max())) if len(layouts) else (0, 0)
    if most - least > limits().sparse_layouts * len(layouts):
        distinct, at = np.unique(layouts, return_inverse=True)
        return distinct, at.reshape(-1)
    there = np.zeros(most + 1 - least, dtype=bool)
    there[layouts - least] = True
    distinct = np.flatnonzero(there)
    number = np.empty(len(there), dtype=np.int64)
    number[distinct] = np.arange(len(distinct))
    return distinct + least, number[layouts - least]


@dataclass(frozen=True, eq=False)
class Variable:
    """
    A variable of the factor graph: its rows (the configurations of an operator, or the layouts of a relay) and their
    costs.

    Operators of one structure share one object.
    """

    among: int
    """Number of rows before dominated ones were dropped."""
    rows: Ints
    """Indices of the rows left, in the operator's table or among the layouts."""
    seconds: Floats
    """Unary cost [row], including leaves that only this operator reads."""
    own: Projection
    """The projection that keeps all rows left apart, for the table of `seconds`."""
    made: tuple[Port, ...]
    """Per result, the layouts made; a relay has one."""
    needs: tuple[Port, ...]
    """
    Per operand other than leaves that only this operator reads, the layouts needed; a relay has one, that of a leaf
    none.
    """


@dataclass(eq=False)
class DenseCost:
    """
    The cost of an edge, which reshards a value from its source to its target, as a dense table [layout made, layout
    needed]: by index among the layouts that the source variable makes, and that the target variable needs.
    """

    made: Port
    needs: Port
    table: Floats
    """The table, which may also have layouts that are in the ports no longer."""
    at: tuple[Ints, Ints] | None = None
    """Where the table has such layouts: the index in it of each layout made, and of each needed."""

    @property
    def seconds(self) -> Floats:
        """The table [layout made, layout needed] of the ports' layouts alone; it takes the place of a larger one."""
        if self.at is not None:
            self.table, self.at = self.table[np.ix_(*self.at)], None
        return self.table

    def among(self, made: Ints, needs: Ints) -> Floats:
        """Return the costs [made, needed] of some layouts, indices among those of the ports."""
        if self.at is not None:
            made, needs = self.at[0][made], self.at[1][needs]
        return self.table[made[:, None], needs]

    def there(self, of_made: Floats) -> Floats:
        """
        Return the min-sum message to the edge's target, [layout needed]: min over layouts made of `of_made` + cost.

        `of_made` [layout made] is the message that arrives at the source, in the unit of the costs.
        """
        if self.at is None:
            return (of_made[:, None] + self.table).min(axis=0)
        made, needs = self.at
        return (_spread(of_made, made, len(self.table))[:, None] + self.table).min(axis=0)[needs]

    def back(self, of_needs: Floats) -> Floats:
        """
        Return the min-sum message to the edge's source, [layout made]: min over layouts needed of cost + `of_needs`.

        `of_needs` [layout needed] is the message that arrives at the target, in the unit of the costs.
        """
        if self.at is None:
            return (self.table + of_needs).min(axis=1)
        made, needs = self.at
        return (self.table + _spread(of_needs, needs, self.table.shape[1])).min(axis=1)[made]

    def of(self, made: Port, needs: Port) -> DenseCost:
        """
        Return the cost table restricted to fewer layouts at either end of the edge: those of the ports `made` and
        `needs`, which must be among those of this cost's own ports.

        The table is shared with this cost, rather than copied, while most of its entries are left: rows are dropped a
        few at a time.
        """
        if len(made.layouts) == len(self.made.layouts) and len(needs.layouts) == len(self.needs.layouts):
            return DenseCost(made, needs, self.table, self.at)
        at = np.searchsorted(self.made.layouts, made.layouts), np.searchsorted(self.needs.layouts, needs.layouts)
        if self.at is not None:
            at = self.at[0][at[0]], self.at[1][at[1]]
        entries = len(at[0]) * len(at[1])
        if entries > limits().copied_share * self.table.size:
            return DenseCost(made, needs, self.table, at)
        return DenseCost(made, needs, self.table[np.ix_(*at)])


def _spread(of_layouts: Floats, at: Ints, size: int) -> Floats:
    """Return `of_layouts` at the indices `at` of an array of `size` numbers, infinite elsewhere."""
    out = np.full(size, np.inf)
    out[at] = of_layouts
    return out


class PairwiseCost(Protocol):
    """
    Interface of the cost of an edge, which reshards a value from its source to its target, as far as message passing
    needs it. The cost depends on [layout made, layout needed]: one of those that the source variable makes, and one of
    those that the target variable needs.
    """

    @property
    def made(self) -> Port:
        """The layouts that the source variable makes, and which of them each of its rows (choices) makes."""
        ...

    @property
    def needs(self) -> Port:
        """The layouts that the target variable needs, and which of them each of its rows (choices) needs."""
        ...

    def there(self, of_made: Floats) -> Floats:
        """
        Return the min-sum message to the edge's target, [layout needed]: min over layouts made of `of_made` + cost.

        `of_made` [layout made] is the message that arrives at the source, in the unit of the costs.
        """
        ...

    def back(self, of_needs: Floats) -> Floats:
        """
        Return the min-sum message to the edge's source, [layout made]: min over layouts needed of cost + `of_needs`.

        `of_needs` [layout needed] is the message that arrives at the target, in the unit of the costs.
        """
        ...

    def of(self, made: Port, needs: Port) -> PairwiseCost:
        """
        Return the cost restricted to fewer layouts at either end of the edge: those of the ports `made` and `needs`,
        which must be among those of this cost's own ports.
        """
        ...


@dataclass(frozen=True, eq=False)
class Edge:
    """The reshard of a value between two variables: the numbers of its source and its target, and the pairwise cost."""

    source: int
    target: int
    between: PairwiseCost

    @property
    def made(self) -> Port:
        """The layouts that the source variable makes, and which of them each of its rows (choices) makes."""
        return self.between.made

    @property
    def needs(self) -> Port:
        """The layouts that the target variable needs, and which of them each of its rows (choices) needs."""
        return self.between.needs

    @property
    def seconds(self) -> Floats:
        """
        The dense cost table [layout made, layout needed] of the edge, in the solver's objective. Raises `TypeError`
        where the cost is not a `DenseCost`.
        """
        return self._dense().seconds

    def seconds_among(self, sources: Ints, targets: Ints) -> Floats:
        """
        Return the cost table [source's row, target's row] of some rows of the two variables. Raises `TypeError` where
        the cost is not a `DenseCost`.
        """
        return self._dense().among(self.made.at[sources], self.needs.at[targets])

    def _dense(self) -> DenseCost:
        if not isinstance(self.between, DenseCost):
            raise TypeError("search: this edge has no table of seconds")
        return self.between


@dataclass
class FactorGraph:
    """
    The problem of choosing one row per variable (a way to shard an operator, or the layout in which the readers of a
    value find it), so that the sum of all costs is least.

    Costs are unary (`seconds` of a row) and pairwise (`edges`). Every edge leads from a lower to a higher variable
    number; `into` and `out` have, per variable, the numbers of the edges that end and begin there.
    """

    rows: list[Ints]
    """Per variable, the indices of the rows that are left."""
    seconds: list[Floats]
    """Per variable, the unary cost of each row that is left, in the solver's objective."""
    own: list[Projection]
    """Per variable, the projection that keeps all rows left apart, for the table of `seconds`."""
    edges: list[Edge]

    def __post_init__(self) -> None:
        # Memoise restricted ports and costs, so that equal layers still share them.
        self._ports: dict[tuple[int, bytes], tuple[Port, Port]] = {}
        self._ways: dict[tuple[int, int, int], tuple[PairwiseCost, PairwiseCost]] = {}
        self.into: list[list[int]] = [[] for _ in self.rows]
        self.out: list[list[int]] = [[] for _ in self.rows]
        for number, edge in enumerate(self.edges):
            self.out[edge.source].append(number)
            self.into[edge.target].append(number)
        self.ends = tuple((edge.source, edge.target) for edge in self.edges)
        """The variables at the ends of each edge, which stay the same where rows are dropped."""

    def among(self, rows: Sequence[Ints]) -> FactorGraph:
        """
        Return the factor graph with only some rows of each variable; this one is unchanged. `rows` has the rows to
        keep: for variable v, `rows[v]` are positions in the array `self.rows[v]`.
        """
        edges: list[Edge] = []
        for edge in self.edges:
            made, needs = self._port(edge.made, rows[edge.source]), self._port(edge.needs, rows[edge.target])
            edges.append(Edge(edge.source, edge.target, self._way(edge.between, made, needs)))
        return FactorGraph(
            [of[some] for of, some in zip(self.rows, rows, strict=True)],
            [of[some] for of, some in zip(self.seconds, rows, strict=True)],
            [every(len(some)) for some in rows],
            edges,
        )

    def part(self, variables: Sequence[int]) -> FactorGraph:
        """Return the factor graph of some variables, numbered in the order given, and of the edges between them."""
        number = {v: i for i, v in enumerate(variables)}
        edges = (self.edges[at] for v in variables for at in self.into[v])
        inside = [Edge(number[e.source], number[e.target], e.between) for e in edges if e.source in number]
        return FactorGraph(
            [self.rows[v] for v in variables],
            [self.seconds[v] for v in variables],
            [self.own[v] for v in variables],
            inside,
        )

    def steps(self) -> int:
        """Return an estimate of the work of one pass of messages over all edges, as a number of additions."""
        return sum((len(k.made.layouts) + len(k.needs.layouts)) * len(k.made.layouts) for k in self.edges)

    def keep(self, rows: Mapping[int, npt.NDArray[np.bool_]]) -> dict[int, Edge]:
        """
        Drop, in place, the rows of some variables where the mask of the variable, `rows[variable]` [row], is False, and
        the layouts at their edges that only those rows have. Return these variables' edges as they were, by number.

        Restrictions are memoised until `forget` is called, so that equal layers share theirs.
        """
        for variable, some in rows.items():
            self.rows[variable] = self.rows[variable][some]
            self.seconds[variable] = self.seconds[variable][some]
            self.own[variable] = every(len(self.rows[variable]))
        before = {number: self.edges[number] for v in rows for number in (*self.into[v], *self.out[v])}
        for number, edge in before.items():
            made = self._port(edge.made, rows[edge.source]) if edge.source in rows else edge.made
            needs = self._port(edge.needs, rows[edge.target]) if edge.target in rows else edge.needs
            self.edges[number] = Edge(edge.source, edge.target, self._way(edge.between, made, needs))
        return before

    def forget(self) -> None:
        """
        Free the restricted ports and costs that no edge has any more, after rows of several variables were dropped.

        Those that edges have are kept, so that equal layers that lose the same rows later share theirs.
        """
        ports = {id(port) for edge in self.edges for port in (edge.made, edge.needs)}
        costs = {id(edge.between) for edge in self.edges}
        self._ports = {key: both for key, both in self._ports.items() if id(both[0]) in ports and id(both[1]) in ports}
        self._ways = {key: both for key, both in self._ways.items() if id(both[0]) in costs and id(both[1]) in costs}

    def _port(self, of: Port, rows: Ints | npt.NDArray[np.bool_]) -> Port:
        key = id(of), rows.tobytes()
        if key not in self._ports:
            self._ports[key] = of, of.of(rows)
        return self._ports[key][1]

    def _way(self, of: PairwiseCost, made: Port, needs: Port) -> PairwiseCost:
        key = id(of), id(made), id(needs)
        if key not in self._ways:
            self._ways[key] = of, of.of(made, needs)
        return self._ways[key][1]


def between(
    space: LayoutSpace, made: Port, needs: Port, training: bool, price: Price = TIME, kept: bool = True
) -> DenseCost:
    """
    Return the cost [layout made, layout needed] of resharding a value from each layout of the port `made` (the
    producer's end of an edge) to each layout of the port `needs` (the reader's).

    It is 0 for the layout NOWHERE, with which a reader needs no move of its own. `space` is the value's layout space,
    whose layout numbers the ports have; `training` adds the seconds of resharding the gradient back, `kept` the bytes
    of the resharded value, which the backward reads. `price` weighs seconds and bytes.
    """
    nowhere = int(len(needs.layouts) > 0 and needs.layouts[0] == NOWHERE)
    seconds = price.reshard(space, made.layouts, needs.layouts[nowhere:], training, kept)
    return DenseCost(made, needs, np.hstack([np.zeros((len(seconds), 1)), seconds]) if nowhere else seconds)


class LazyRows(Protocol):
    """A cost table [layout, layout] whose rows are computed when they are indexed."""

    def __getitem__(self, at: int, /) -> Floats: ...


def undominated(
    seconds: Floats, ends: Sequence[tuple[Ints, LazyRows | Floats]], candidates: int = 64
) -> npt.NDArray[np.bool_]:
    """
    Return a mask [row], True for the rows (choices) of a variable that no other row dominates.

    A row is dominated if another is cheaper even with the reshards from and to its layouts added. `seconds` are the
    unary costs [row]. `ends` has, for every edge of the variable, (the layout of each row [row], a table [layout of the
    other row, layout of this row] of the cost of replacing one by the other at that end). At most `candidates` rows,
    the cheapest, are tried as dominating. This is the dead-end elimination of side-chain placement (Goldstein, 1994),
    with the triangle inequality bounding the difference of the edges.
    """
    alive = np.ones(len(seconds), dtype=bool)
    order = np.argsort(seconds, kind="stable")
    start, tried, block = 0, 0, 1
    while tried < candidates:
        # Only dearer rows can be dominated. The first few candidates drop most, later ones are tried several at a time.
        order = np.concatenate([order[:start], order[start:][alive[order[start:]]]])
        some, left = order[start : start + min(block, candidates - tried)], order[start:]
        if not len(some):
            break
        instead = np.repeat(seconds[some][:, None], len(left), axis=1)
        for at, apart in ends:
            instead += np.take(np.array([apart[int(i)] for i in at[some]]), at[left], axis=1)
        alive[left[(instead < seconds[left] - 1e-15).any(axis=0)]] = False
        tried += len(some)
        start += len(some)
        block = min(2 * block, limits().dominating_rows)
    return alive
