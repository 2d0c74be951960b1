"""
Bound the makespan of pipelines from below, over all layouts: of plans that place the graph of one micro-batch on a part
of the machine, and cut it into one contiguous stage per part.

The exact solver gives S, the least seconds of a micro-batch that all stages take together, with what a step does once
counted 1/m. Stages that take t_i in all satisfy m t_i + (seconds of the stages before, F or F + B) <= makespan
(`bound`), so with sum of t = S

    makespan >= m S / p,       makespan >= q S0 / (1 - (1 - q/m)^p),

S0 without what is done once, q = 1 where backwards are whole; where they may be in halves, only forwards come before,
and q is the least part of the kernels of a unit that is forward, of kernels alone.

Stages end between units. If a best choice for the graph costs a(i, j) in units i .. j - 1, no choice costs less there
than a(i, j) - R(i) - R(j), where R are reshards of what passes the ends: else the best choice with these units
exchanged would be better. The best cuts of a chain whose ranges take that are a bound, too. It holds at any price of a
byte: a stage that holds k micro-batches and fits takes at least (its least cost at the price) - price * memory. Of
1F1B, and of orders that hold no less, k is the number of stages from it on, or m.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil

import numpy as np

from unity_ir.cost.plan import cost
from unity_ir.machine.parts import part, send_seconds
from unity_ir.pcg.differentiate import has_gradient
from unity_ir.pcg.graph import Graph, Node, Value
from unity_ir.pcg.layers import layers, shortened_with_map
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.bounds.axis_counts import Bounds, bound_at, is_tabulated
from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.exact.shared_moves import SharedFactorGraphBuilder, least_cost_bound, without_free_moves
from unity_ir.search.exact.solver import ExactPlan, Solver
from unity_ir.search.pipeline.best_cuts import SPREAD
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.equal import PipelineSearch
from unity_ir.search.pipeline.table import Floats

PRICE = 0.12
"""Price of a byte at which stages that fit are bounded: times the seconds of a micro-batch over the memory of all."""

EACH = 8
"""Live micro-batches up to which each number of them is bounded by itself; beyond, powers of two."""


class LayoutBounds:
    """
    Lower bounds, in seconds of a step, on all pipelines that `search` plans with given numbers of equal parts of the
    machine and of micro-batches. Stages are made of units, contiguous runs of the graph's operators (`cuts`).

    The methods `work_of_..` hold for any number of stages per part. The methods `of_..` hold for one stage per part,
    under all synchronous schedules with whole backwards or, if `is_split`, also with backwards in halves; if `is_1f1b`,
    only under those that hold at least as many micro-batches as 1F1B. What does not depend on these is computed once
    for all objects made with the same `shared`.
    """

    def __init__(
        self, search: PipelineSearch, is_split: bool, is_1f1b: bool = False, shared: LayoutBounds | None = None
    ):
        self.search, self.is_split, self.is_1f1b = search, is_split, is_1f1b
        self._kernels: dict[int, float] = shared._kernels if shared else {}
        self._bounds: dict[int, Bounds] = shared._bounds if shared else {}
        self._ranges: dict[tuple[int, int], Floats] = shared._ranges if shared else {}

    def of_kernels(self, stages: int, micro_batches: int) -> float:
        """
        Return a lower bound in seconds on pipelines of `stages` stages, one on each part, from kernels alone: those of
        a micro-batch, divided evenly over all devices. It is the loosest and quickest of the methods `of_..`.
        """
        on_part = self._kernels_of(micro_batches) * stages
        return _closed(on_part, stages, micro_batches, self._forward_part)

    def _kernels_of(self, micro_batches: int) -> float:
        """Return the seconds of all kernels of a micro-batch, divided evenly over all devices."""
        if micro_batches not in self._kernels:
            self._kernels[micro_batches] = _kernel_seconds(self.search.small(micro_batches), self.search)[0]
        return self._kernels[micro_batches]

    def work_of_kernels(self, parts: int, micro_batches: int) -> float:
        """
        Return the seconds of a step's kernels, divided evenly over all devices: a lower bound on pipelines with any
        number of stages per part, since some part computes that long or longer. The result does not depend on `parts`,
        which is there so that callers can exchange this method for `work_of_layouts`.
        """
        return micro_batches * self._kernels_of(micro_batches)

    def work_of_layouts(self, parts: int, micro_batches: int) -> float:
        """
        Return the least seconds, over all layouts, that each of `parts` equal parts is busy in a step, on average: a
        lower bound on pipelines with any number of stages per part, since some part is busy that long or longer. Where
        the least takes too long to compute (large graphs on parts of many mesh axes), a lower bound on it is returned.
        """
        p, m, small = parts, micro_batches, self.search.small(micro_batches)
        solver = self._solver(p, m)
        if solver is None:
            known = self.search.solved(small, self.search.solver(p, m)).seconds
            least = bound_at(small, self._bounds_of(p), self.search.price(m), known)
        else:
            least = _least_sum(small, solver.with_price(self.search.price(m)))
        return max(self.work_of_kernels(p, m), m / p * least)

    def of_ranges(self, stages: int, micro_batches: int) -> float:
        """
        Return a lower bound in seconds on pipelines of `stages` stages, one on each part: that of the best cuts, if
        each stage took the least seconds that its units can take in any layouts, with memory unlimited. Where its
        tables would be too large, returns the weaker `of_kernels`.
        """
        solver = self._solver(stages, micro_batches)
        least = self.of_kernels(stages, micro_batches)
        if solver is None:
            return least
        return max(least, self._least_makespan([self._free(stages, micro_batches)] * stages, stages, micro_batches))

    def of_layouts(self, stages: int, micro_batches: int) -> float:
        """
        Return the tightest lower bound of the methods `of_..`, in seconds, on pipelines of `stages` stages, one on each
        part, in any layouts. It takes longest to compute. If the object was made with `is_1f1b`, memory is limited: a
        stage must fit with the micro-batches that 1F1B holds there, so that the bound does not hold for schedules that
        hold fewer. Where its tables would be too large, the greatest of the other bounds is returned.
        """
        p, m, small = stages, micro_batches, self.search.small(micro_batches)
        solver, work = self._solver(p, m), self.work_of_layouts(p, m)
        best = max(self.of_ranges(p, m), work)
        if solver is None:
            return best
        whole = work * p / m
        if not self.is_split:
            best = max(
                best, _closed(_least_sum(small, solver.with_price(replace(self.search.price(m), once=0.0))), p, m, 1.0)
            )
        if not self.is_1f1b:
            return best
        byte = PRICE * whole / (p * self.search.memory)
        by_live: dict[int, Floats] = {}
        tables: list[Floats] = []
        for k in range(p):
            live = _counted(min(k + 1, m))
            if live not in by_live:
                priced = solver.with_price(replace(self.search.price(m), byte=byte, again=True, once=0.0, live=live))
                by_live[live] = range_bounds(small, priced, self._most(p, m)) - byte * self.search.memory
            tables.append(np.maximum(self._free(p, m), by_live[live]))
        return max(best, self._least_makespan(tables, p, m))

    def _most(self, stages: int, micro_batches: int) -> int:
        """Return the equal layers of the longest range that is looked at."""
        return ceil(len(layers(self.search.small(micro_batches)).layers) / stages * SPREAD) + 2

    def _free(self, stages: int, micro_batches: int) -> Floats:
        """Return the least seconds of a micro-batch in ranges, as if memory were not short."""
        if (stages, micro_batches) not in self._ranges:
            solver = self._solver(stages, micro_batches)
            assert solver is not None
            small, most = self.search.small(micro_batches), self._most(stages, micro_batches)
            price = replace(self.search.price(micro_batches), once=0.0)
            self._ranges[stages, micro_batches] = range_bounds(small, solver.with_price(price), most)
        return self._ranges[stages, micro_batches]

    def _bounds_of(self, stages: int) -> Bounds:
        if stages not in self._bounds:
            self._bounds[stages] = Bounds(part(self.search.machine, stages), self.search.optimizer)
        return self._bounds[stages]

    def _solver(self, stages: int, micro_batches: int) -> Solver | None:
        """
        Return a solver whose least is one of all layouts: of large parts that which counts axes; None if their tables
        would be too large.
        """
        solver = self.search.solver(stages, micro_batches)
        if solver.spaces.axis_by_axis:
            return solver
        bounds = self._bounds_of(stages)
        return bounds.solver(0, stepwise=False) if is_tabulated(self.search.small(micro_batches), bounds) else None

    def _least_makespan(self, tables: Sequence[Floats], stages: int, micro_batches: int) -> float:
        """Return the least makespan of as many stages; `tables[k]` are ranges of the stage that k others follow."""
        count = len(tables[0]) - 1
        is_range = np.triu(np.ones_like(tables[0]), 1) > 0
        sends = self._least_sends(stages, micro_batches)
        behind = np.full(count + 1, np.inf)
        behind[-1] = 0.0
        for k, table in enumerate(tables):
            # No range takes less than one inside of it.
            each = np.maximum.accumulate(np.where(is_range, np.maximum(table, 0.0), 0.0), axis=1)
            after = behind + (2 * sends if k else 0.0)
            fill = np.broadcast_to(after, each.shape) if self.is_split else each + after
            behind = np.where(is_range, np.maximum(micro_batches * each, fill), np.inf).min(axis=1)
        return float(behind[0])

    def _least_sends(self, stages: int, micro_batches: int) -> Floats:
        """Return the least seconds [cut] of sending what passes it, in equal pieces, to the nearest part."""
        machine, of = self.search.machine, units(self.search.small(micro_batches))
        found = np.zeros(len(of.parts) + 1)
        devices = machine.devices // stages
        for cut, values in enumerate(of.passing if stages > 1 else ()):
            found[cut + 1] = sum(
                min(
                    send_seconds(machine, stages, b, b + 1, v.type.elements / devices, ELEMENT_BYTES[v.type.dtype])
                    for b in range(stages - 1)
                )
                for v in values
            )
        return found

    @cached_property
    def _forward_part(self) -> float:
        if not self.is_split:
            return 1.0
        return _kernel_seconds(self.search.small(1), self.search)[1]


def _closed(total: float, stages: int, micro_batches: int, forward: float) -> float:
    """Return the least makespan of stages that take `total` together, of which that part at least is forward."""
    return forward * total / (1 - (1 - forward / micro_batches) ** stages)


def _least_sum(graph: Graph, solver: Solver) -> float:
    """Return a lower bound, in the solver's objective, of all choices for a serial graph."""
    return without_free_moves(least_cost_bound(solver, graph), graph, solver.spaces.machine)


def _counted(live: int) -> int:
    """
    Return the number of live micro-batches whose bound is computed in place of that of `live` ones: one that is not
    larger, as a bound of fewer holds for more.
    """
    return live if live <= EACH else 1 << (live.bit_length() - 1)


def _kernel_seconds(graph: Graph, search: PipelineSearch) -> tuple[float, float]:
    """
    Return (seconds of all kernels of a serial graph, divided evenly over all devices; the least part of those of a unit
    that is forward); 0 on a device with a measured profile, whose smaller kernels may have any time.
    """
    if search.machine.device.profile is not None:
        return 0.0, 1.0
    of = units(graph).unit_of
    forward, both = np.zeros((2, len(units(graph).parts)))
    for each in cost(graph, search.machine, search.optimizer).operators:
        forward[of[each.node]] += each.forward
        both[of[each.node]] += each.forward + each.backward
    parts = forward[both > 0] / both[both > 0]
    least = without_free_moves(float(both.sum()) / search.machine.devices, graph, search.machine)
    return least, float(parts.min(initial=1.0))


def range_bounds(graph: Graph, solver: Solver, most: int) -> Floats:
    """
    Return lower bounds on the cost of every range of units in any layouts, in the objective of `solver`: an array
    [first unit, unit behind the last]. Ranges that span more than `most` equal layers have the bound 0; entries whose
    second index is not above the first mean nothing.

    Where `graph` has more than `most` + 2 equal layers, the solver solves a shorter graph with that number of them. In
    its best choice, all of these layers but the first and the last cost about the same; the bounds are lowered by as
    much as they differ. So the bound of a range of the shorter graph holds for the same layers anywhere in `graph`.
    """
    keep = most + 2
    short, of = shortened_with_map(graph, keep)
    builder = SharedFactorGraphBuilder(solver, short)
    problem = builder.problem()
    plan = builder.plan(problem)
    costs = _unit_costs(short, builder, problem, plan)
    slack = max(0.0, plan.seconds - without_free_moves(plan.bound, short, solver.spaces.machine))
    longest = len(of)
    if short is not graph:
        # The units of a layer that stands for those left out occur most often.
        counts = Counter(of)
        middle = sorted(unit for unit, times in counts.items() if times == max(counts.values()))
        begin = middle[0] - (keep // 2 - 1) * len(middle)
        inner = costs[begin : begin + most * len(middle)].reshape(most, len(middle))
        slack += most * float((inner.max(axis=0) - inner.min(axis=0)).sum())
        longest = most * len(middle)
    ends = [sum(_reshard(value, plan, builder) for value in values) for values in units(short).passing]
    cut = np.array([0.0, *(ends[min(i, len(ends) - 1)] for i in of[:-1]), 0.0])
    before = np.concatenate([[0.0], np.cumsum(costs[list(of)])])
    found = before[None, :] - before[:, None] - cut[None, :] - cut[:, None] - slack - _shared_leaves(graph, builder)
    number = np.arange(len(before))
    return np.where(number[None, :] - number[:, None] <= longest, found, 0.0)


def _unit_costs(graph: Graph, builder: SharedFactorGraphBuilder, problem: FactorGraph, plan: ExactPlan) -> Floats:
    """Return what a choice costs in each unit; what brings a value to its relay costs the unit that makes it."""
    of = units(graph)
    found = np.zeros(len(of.parts))
    unit: dict[int, int] = {}
    at: dict[int, int] = {}
    for key, number in builder.numbers.items():
        node = key if isinstance(key, Node) else key.node
        row = plan.rows[key] if isinstance(key, Node) else plan.layouts[key]
        unit[number] = of.unit_of[node]
        at[number] = int(np.flatnonzero(problem.rows[number] == row)[0])
        found[unit[number]] += problem.seconds[number][at[number]]
    for edge in problem.edges:
        owner = unit[edge.target]
        found[owner] += edge.seconds[edge.made.at[at[edge.source]], edge.needs.at[at[edge.target]]]
    return found


def _reshard(value: Value, plan: ExactPlan, builder: SharedFactorGraphBuilder) -> float:
    """Return the most that it costs to bring a value, and its gradient, from the choice's layout to any, or back."""
    at = plan.layouts.get(value)
    if at is None:
        made = builder.solver.table(value.node, builder.with_gradient).results[value.index]
        at = int(made[plan.rows[value.node]])
    table = _resharded(value, builder)
    return float(max(table[at].max(), table[:, at].max()))


def _resharded(value: Value, builder: SharedFactorGraphBuilder) -> Floats:
    """Return what it costs to bring a value from layout to layout, if what arrives is kept."""
    space, price = builder.solver.space(value), builder.solver.price
    every = np.arange(len(space))
    return replace(price, again=False).reshard(space, every, every, has_gradient(value, builder.with_gradient), True)


def _shared_leaves(graph: Graph, builder: SharedFactorGraphBuilder) -> Floats:
    """Return the most [first, last] that readers in a range save on leaves that readers outside of it share."""
    of = units(graph)
    readers: dict[Node, list[int]] = {}
    for node in graph.nodes():
        for value in node.operands:
            if value.node.is_leaf:
                readers.setdefault(value.node, []).append(of.unit_of[node])
    count = len(of.parts)
    found = np.zeros((count + 1, count + 1))
    first, last = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
    for leaf, read in readers.items():
        if len(set(read)) > 1:
            is_divided = (first <= max(read)) & (last > min(read)) & ~((first <= min(read)) & (last > max(read)))
            found += len(read) * float(_resharded(leaf.result, builder).max()) * is_divided
    return found
