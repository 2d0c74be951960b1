"""
Bound from below what ranges of units cost as stages, over all layouts.

No layout costs less in a range than the factor graph of its operators alone, without the edges that lead there: what
they read of others may come in any layout. Such minima are found for all ranges at once. Where a single value passes
between two units, its variable's rows are all that one knows of the other, so a vector of costs, [row], goes from unit
to unit, and each unit adds what it takes (min-plus products). Equal layers have equal tables: a range anywhere among
them costs what one as long costs that begins with the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.layers import layers, shortened_with_map
from unity_ir.pcg.node import Node, Value
from unity_ir.search.exact.elimination import Factor, Memo, without
from unity_ir.search.exact.factor_graph import Edge, FactorGraph
from unity_ir.search.exact.minimum import least_sum
from unity_ir.search.exact.shared_moves import SharedFactorGraphBuilder, without_free_moves
from unity_ir.search.exact.solver import Solver
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.table import Floats

KEPT_LAYERS = 6
"""Equal layers of the graph of which tables are made."""

ENTRIES = 100_000_000
"""Entries that an elimination within a unit may look at."""

PAIRS = 300_000
"""Entries up to which tables of a unit are made; of larger ones, blocks of layers are bounded each by itself."""


def range_bounds(graph: Graph, solver: Solver, longest: int, stages: int) -> Floats:
    """
    Return lower bounds on the cost of ranges of units in any layouts, in the objective of `solver`: an array [first
    unit, unit behind the last]. They hold for stages of a pipeline: bytes of what a range sends on do not count.

    Only ranges that may be one of `stages` stages are bounded, and of those that neither begin nor end with the graph
    only those of up to `longest` units; others have the bound 0.
    """
    chain = _Chain.of_graph(graph, solver)
    if all(unit.is_tabulated() for unit in chain.units):
        found = _carried(chain, longest, stages)
    else:
        found = _in_blocks(chain)
    return np.maximum(chain.without_free_moves(found) - chain.sent, 0.0)


def _carried(chain: _Chain, longest: int, stages: int) -> Floats:
    """Return the least costs of ranges as `range_bounds` does, costs by rows carried from unit to unit."""
    count = len(chain.of)
    found = np.zeros((count + 1, count + 1))
    begun: dict[tuple[int, ...], Floats] = {}

    def sweep(first: int, last: int) -> None:
        """Bound the ranges from `first` to each unit up to `last`."""
        key: tuple[int, ...] = ()
        costs: Floats | None = None
        for i in range(first, last):
            key = (*key, chain.classes[i])
            if key not in begun:
                begun[key] = chain.unit(i).there(costs)
            costs = begun[key]
            found[first, i + 1] = costs.min()

    sweep(0, count)
    if stages > 2:
        for first in range(1, chain.end_of_layers):
            sweep(first, min(chain.end_of_layers, first + longest))
    behind: Floats | None = None
    for first in reversed(range(count)):
        found[first, count] = chain.unit(first).least(behind)
        behind = chain.unit(first).back(behind)
    return found


def _in_blocks(chain: _Chain) -> Floats:
    """
    Return lower bounds on the least costs of ranges where tables of units would be too large: the sum of what blocks of
    equal layers cost at least, and single units before and behind, each as if nothing came from others.
    """
    alone: dict[int, float] = {}
    for i, number in zip(chain.of, chain.classes, strict=True):
        if number not in alone:
            alone[number] = chain.least(i, i + 1)
    each = [alone[number] for number in chain.classes]
    count, (begin, end) = len(each), chain.block
    block, like = chain.least(begin, end), chain.classes_of(begin, end)
    single = np.concatenate([[0.0], np.cumsum(each)])
    found = np.maximum(single[None, :] - single[:, None], 0.0)
    for first in reversed(range(count)):
        if like and chain.classes[first : first + len(like)] == like:
            behind = first + len(like)
            found[first, behind:] = np.maximum(found[first, behind:], block + found[behind, behind:])
        else:
            found[first, first + 1 :] = each[first] + found[first + 1, first + 1 :]
    return found


@dataclass(frozen=True)
class _Chain:
    """The units of a graph, each as one of the units of a graph with few of its equal layers."""

    short: Graph
    builder: SharedFactorGraphBuilder
    units: Sequence[_Unit]
    """Those of the shorter graph."""
    of: Sequence[int]
    """The unit of the shorter graph for each of the whole."""
    classes: list[int]
    """A number for each unit of the whole graph, the same for those of equal costs."""
    end_of_layers: int
    """The unit behind the last of the equal layers."""

    @staticmethod
    def of_graph(graph: Graph, solver: Solver) -> _Chain:
        short, of = shortened_with_map(graph, KEPT_LAYERS)
        builder = SharedFactorGraphBuilder(solver, short)
        problem, memo, found = _without_shared_weights(builder), Memo(), units(short)
        members: list[list[int]] = [[] for _ in found.parts]
        for key, variable in builder.numbers.items():
            members[found.unit_of[key if isinstance(key, Node) else key.node]].append(variable)
        ends: list[int | None] = [None]
        for cut, values in enumerate(found.passing):
            value = values[0] if len(values) == 1 and found.unit_of[values[0].node] == cut else None
            ends.append(None if value is None else builder.numbers[value if builder.relayed(value) else value.node])
        own = [_Unit(problem, memo, *each) for each in zip(members, ends, (*ends[1:], None), strict=True)]
        numbers: dict[object, int] = {}
        classes = [numbers.setdefault(unit.costs, len(numbers)) for unit in own]
        tail = len(layers(graph).tail)
        return _Chain(short, builder, own, of, [classes[i] for i in of], len(of) - tail * (tail < len(of)))

    @property
    def block(self) -> tuple[int, int]:
        """The units of the shorter graph's layers but the first and the last: the first unit, and the one behind."""
        found = layers(self.short)
        begin, end = len(found.before), len(self.units) - len(found.tail)
        width = (end - begin) // max(len(found.layers), 1)
        return begin + width, max(end - width, begin + width)

    def classes_of(self, begin: int, end: int) -> list[int]:
        """Return the numbers of `classes` of units of the shorter graph."""
        number = {i: self.classes[at] for at, i in enumerate(self.of)}
        return [number[i] for i in range(begin, end)]

    def least(self, begin: int, end: int) -> float:
        """Return a lower bound on the cost of units of the shorter graph, whatever others are like."""
        variables = sorted(v for unit in self.units[begin:end] for v in unit.variables)
        return least_sum(self.units[0].problem.part(variables)) if variables else 0.0

    def unit(self, number: int) -> _Unit:
        """Return a unit of the whole graph by its number."""
        return self.units[self.of[number]]

    @property
    def sent(self) -> Floats:
        """
        The most that bytes of what passes a cut cost, [cut]: the unit that makes a value is charged for it, but of
        a stage that ends there it is the next one that holds it.
        """
        builder, found = self.builder, np.zeros(len(self.of) + 1)
        price = builder.solver.price
        if price.byte:
            each = [sum(map(self._held, values)) for values in units(self.short).passing]
            found[1:-1] = [each[min(i, len(each) - 1)] for i in self.of[:-1]]
        return found

    def _held(self, value: Value) -> float:
        """Return the most that an operator's cost is for a result's bytes, or for making it once more."""
        kept = self.builder.keeps.results(value.node)
        other = tuple(is_kept and i != value.index for i, is_kept in enumerate(kept))
        with_it, without_it = (self.builder.row_costs(value.node, some) for some in (kept, other))
        return float((with_it - without_it).max())

    def without_free_moves(self, found: Floats) -> Floats:
        """Return costs lowered so that no plan costs less, for rounding and moves that only the search charges for."""
        most = float(found.max())
        return found - (most - without_free_moves(most, self.short, self.builder.solver.spaces.machine))


@dataclass(frozen=True, eq=False)
class _Unit:
    """A unit as a part of a factor graph: what it adds to costs [row] of the variable of what passes its ends."""

    problem: FactorGraph
    memo: Memo
    variables: Sequence[int]
    begin: int | None
    """The variable of the value that comes from the unit before; None where that is not known."""
    end: int | None
    """The variable, one of the unit's, of the value that goes to the next one; None where there is none."""

    @cached_property
    def costs(self) -> tuple[object, ...]:
        """A key of its tables and of how they are linked: units with equal keys cost the same."""
        number = {v: i for i, v in enumerate(self._all)}
        rows = tuple(id(self.problem.own[v]) for v in number)
        own = tuple(id(self.problem.seconds[v]) for v in self.variables)
        edges = tuple((number[e.source], number[e.target], id(e.between)) for e in self._edges)
        return rows, own, edges, tuple(None if v is None else number[v] for v in (self.begin, self.end))

    def there(self, before: Floats | None) -> Floats:
        """Return the least costs by rows at the end, given those by rows at the beginning; None for any at no cost."""
        if self._table is None or before is None:
            return self._begun + (0.0 if before is None else before.min())
        return (self._at(before, self.begin)[:, None] + self._table).min(axis=0)

    def back(self, behind: Floats | None) -> Floats:
        """Return the least costs by rows at the beginning, given those behind by rows at the end, if there are any."""
        if self._table is None or behind is None:
            return self._sum(self._edges, self.begin) + (0.0 if behind is None else behind.min())
        return (self._table + self._at(behind, self.end)).min(axis=1)

    def least(self, behind: Floats | None) -> float:
        """Return the least cost from any row at the beginning on, given those behind by rows at the end."""
        return float((self._begun + (0.0 if behind is None else self._at(behind, self.end))).min())

    @cached_property
    def _all(self) -> tuple[int, ...]:
        return (*(() if self.begin is None else (self.begin,)), *self.variables)

    @cached_property
    def _edges(self) -> list[Edge]:
        """The edges among its variables, and from that of the value that comes from the unit before."""
        sources = set(self._all)
        into = (self.problem.edges[number] for v in self.variables for number in self.problem.into[v])
        return [edge for edge in into if edge.source in sources]

    @cached_property
    def _begun(self) -> Floats:
        """The least costs by rows at the end, whatever comes from the unit before."""
        return self._sum([edge for edge in self._edges if edge.source != self.begin], self.end)

    @cached_property
    def _table(self) -> Floats | None:
        """The least costs [row at the beginning, row at the end]; None where nothing comes or goes."""
        return None if self.begin is None or self.end is None else self._sum(self._edges, self.begin, self.end)

    def is_tabulated(self) -> bool:
        """Return whether the costs by rows at its ends take few enough entries; they are kept."""
        rows = self.problem.rows
        if self.begin is not None and self.end is not None and len(rows[self.begin]) * len(rows[self.end]) > PAIRS:
            return False
        try:
            return len(self._begun) > 0 and (self._table is None or self._table.size > 0)
        except _TooLarge:
            return False

    def _sum(self, edges: Iterable[Edge], *kept: int | None) -> Floats:
        """Return the least sums of the costs of its variables and of some edges, by rows of the variables `kept`."""
        problem = self.problem
        factors = [Factor((v,), (problem.own[v],), problem.seconds[v]) for v in self.variables]
        factors += [Factor((e.source, e.target), (e.made.axis, e.needs.axis), e.seconds) for e in edges]
        there = [v for v in kept if v is not None]
        sizes = {v: len(problem.rows[v]) for v in sorted({*there, *(v for f in factors for v in f.variables)})}
        constant, left = without(ENTRIES, sizes, factors, there, self.memo)
        found = np.full([sizes[v] for v in there] or [1], constant)
        for factor in left:
            if not {*factor.variables} <= {*there}:
                raise _TooLarge
            at = dict(zip(factor.variables, factor.axes, strict=True))
            # One axis for each of the variables kept, of which a table may lack some.
            index = np.ix_(*(at[v].at for v in there if v in at))
            order = [factor.variables.index(v) for v in there if v in at]
            table = factor.table.transpose(order)[index]
            found += table.reshape([len(at[v].at) if v in at else 1 for v in there])
        return found

    def _at(self, costs: Floats, end: int | None) -> Floats:
        """Return costs by rows of the variable at an end; where they are by rows of another, the least for each."""
        size = 1 if end is None else len(self.problem.rows[end])
        return costs if len(costs) == size else np.full(size, costs.min())


def _without_shared_weights(builder: SharedFactorGraphBuilder) -> FactorGraph:
    """
    Return the factor graph of a builder, in which a weight with several readers costs what it takes where it rests. It
    is moved once per step, each reader's gradients are added up where that one finds it, maybe on another stage, and
    only the first reader's stage holds it: what a relay or an edge is charged for that is more than a range may pay.
    """
    problem, solver = builder.problem(), builder.solver
    relays: dict[int, Node] = {}
    for key, variable in builder.numbers.items():
        if not isinstance(key, Node) and key.node.op == "weight":
            relays[variable] = key.node
    least: dict[int, Floats] = {}
    for variable, node in relays.items():
        # Equal layers keep sharing the array.
        like, rest = id(problem.seconds[variable]), solver.rest(node, builder.with_gradient)
        problem.seconds[variable] = least.setdefault(like, np.full(len(problem.rows[variable]), rest.min()))
    edges = [edge for edge in problem.edges if edge.source not in relays]
    return FactorGraph(problem.rows, problem.seconds, problem.own, edges)


class _TooLarge(Exception):
    """A table of a unit would have too many entries."""
