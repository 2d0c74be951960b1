"""
Bound the makespan of pipelines from below, over all layouts: of plans that place the graph of one micro-batch on a part
of the machine, and cut it into one contiguous stage per part.

A stage takes at least what its units do in any layouts (`range_bound`), or their kernels divided evenly (`kernels`).
At a price of a byte, one that holds L micro-batches and fits takes at least (the least cost at this price) - price *
memory. With fewer micro-batches live it waits longer (`live_bound`), so the best cuts of a chain whose ranges take
that, each with the best number of micro-batches, are a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from unity_ir.machine.parts import part, send_seconds
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.bounds.axis_counts import Bounds, is_tabulated
from unity_ir.search.exact.solver import Solver
from unity_ir.search.pipeline.best_cuts import SPREAD
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.equal import BYTE_PRICES, PipelineSearch
from unity_ir.search.pipeline.kernels import UnitKernels
from unity_ir.search.pipeline.live_bound import LiveTables, least_makespan
from unity_ir.search.pipeline.range_bound import range_bounds
from unity_ir.search.pipeline.table import Floats

ROUGH = 0.4
"""Price of a byte at first, in units of `BYTE_PRICES`."""

LOW = 4
"""How many of `BYTE_PRICES` kernels are bounded at, the lowest."""


class LayoutBounds:
    """
    Lower bounds, in seconds of a step, on all pipelines that `search` plans with given numbers of equal parts of the
    machine and of micro-batches. Stages are made of units, contiguous runs of the graph's operators (`cuts`).

    The methods `work_of_..` hold for any number of stages per part. The methods `of_..` hold for one stage per part,
    under all synchronous schedules with whole backwards; if `is_split`, under those with backwards whole or in halves
    that hold at least as many micro-batches as 1F1B. What does not depend on `is_split` is computed once for all
    objects made with the same `shared`.
    """

    def __init__(self, search: PipelineSearch, is_split: bool, shared: LayoutBounds | None = None):
        self.search, self.is_split = search, is_split
        self._kernels: dict[int, UnitKernels] = shared._kernels if shared else {}
        self._bounds: dict[int, Bounds] = shared._bounds if shared else {}
        self._ranges: dict[tuple[int, int, float, int, float], Floats] = shared._ranges if shared else {}

    def of_kernels(self, stages: int, micro_batches: int) -> float:
        """
        Return a lower bound in seconds on pipelines of `stages` stages, one on each part, from kernels alone: those of
        a micro-batch, divided evenly over all devices. It is the loosest and quickest of the methods `of_..`.
        """
        on_part = self.kernels(micro_batches).seconds * stages
        return _closed(on_part, stages, micro_batches, self._forward_part(micro_batches))

    def kernels(self, micro_batches: int) -> UnitKernels:
        """Return what the kernels of a micro-batch take and hold, divided evenly over all devices."""
        if micro_batches not in self._kernels:
            self._kernels[micro_batches] = UnitKernels.of(self.search, micro_batches)
        return self._kernels[micro_batches]

    def work_of_kernels(self, parts: int, micro_batches: int) -> float:
        """
        Return the seconds of a step's kernels, divided evenly over all devices: a lower bound on pipelines with any
        number of stages per part, since some part computes that long or longer. If there are more parts than
        micro-batches, it is what a micro-batch takes on all parts one after the other: forward and backward or, where
        backwards may be in halves, of which those of weights wait for nobody, its forward alone.
        """
        return max(self._forward_part(micro_batches) * parts, micro_batches) * self.kernels(micro_batches).seconds

    def work_of_layouts(self, parts: int, micro_batches: int) -> float:
        """
        Return the least seconds, over all layouts, that each of `parts` equal parts is busy in a step, on average: a
        lower bound on pipelines with any number of stages per part, since some part is busy that long or longer. Where
        its tables would be too large, it is that of kernels.
        """
        p, m, least = parts, micro_batches, self.work_of_kernels(parts, micro_batches)
        if self._solver(p, m) is None:
            return least
        return max(least, m / p * float(self.costs_of_ranges(p, m, 0.0, 1, self.search.price(m).once)[0, -1]))

    def of_kernels_that_fit(self, stages: int, micro_batches: int) -> float:
        """
        Return a lower bound in seconds on pipelines of `stages` stages, one on each part: that of the best cuts, if
        kernels, and bytes as well, were divided evenly over the devices of each part.
        """
        tables = self._tables_of_kernels(stages, micro_batches)
        return max(self.of_kernels(stages, micro_batches), self._least_makespan(tables, stages, micro_batches))

    def of_some_layouts(self, stages: int, micro_batches: int) -> float:
        """
        Return a lower bound in seconds on pipelines of `stages` stages, one on each part: as `of_layouts`, with one
        price of a byte for stages in the middle and none for others. Where tables of layouts would be too large, it is
        that of kernels.
        """
        p, m = stages, micro_batches
        return self._with_layouts(p, m, lambda tables: self._add(tables, p, m, min((p + 1) // 2, m), ROUGH))

    def of_layouts(self, stages: int, micro_batches: int) -> float:
        """
        Return the tightest lower bound of the methods `of_..`, in seconds, on pipelines of `stages` stages, one on each
        part, in any layouts. It takes longest to compute. Where its tables would be too large, the greatest of the
        other bounds is returned.
        """
        p, m = stages, micro_batches

        def add(tables: LiveTables) -> None:
            at = len(BYTE_PRICES) // 2
            for live in reversed(_doubled(min(m, 2 * p - 1))):
                best = self._add(tables, p, m, live, BYTE_PRICES[at])
                # At its best price of a byte a stage takes most; with fewer micro-batches that is no higher.
                while at > 0 and (other := self._add(tables, p, m, live, BYTE_PRICES[at - 1])) > best:
                    best, at = other, at - 1

        return max(self.work_of_layouts(p, m), self._with_layouts(p, m, add))

    def _with_layouts(self, stages: int, micro_batches: int, add: Callable[[LiveTables], object]) -> float:
        least = self.of_kernels_that_fit(stages, micro_batches)
        if self._solver(stages, micro_batches) is None:
            return least
        free = self.costs_of_ranges(stages, micro_batches, 0.0, 1, 0.0)
        tables = LiveTables(free, self._tables_of_kernels(stages, micro_batches))
        add(tables)
        if not self.is_split:
            least = max(least, _closed(float(free[0, -1]), stages, micro_batches, 1.0))
        return max(least, self._least_makespan(tables, stages, micro_batches))

    def _tables_of_kernels(self, stages: int, micro_batches: int) -> LiveTables:
        """Return what the kernels of ranges take at least in a stage that fits, by the micro-batches live there."""
        p, m, rows = stages, micro_batches, self.kernels(micro_batches)
        tables = LiveTables(rows.ranges(p, 0.0, 1))
        for live in _doubled(min(m, 2 * p - 1)):
            for times in BYTE_PRICES[:LOW]:
                byte = self.byte_price(p, m, times)
                tables.add(live, byte, rows.ranges(p, byte, live) - byte * self.search.memory)
        return tables

    def _add(self, tables: LiveTables, stages: int, micro_batches: int, live: int, times: float) -> float:
        """
        Add to `tables` what ranges take in stages that hold `live` micro-batches, at a price of `times` the unit of
        `BYTE_PRICES`; return what all units take, divided by the number of stages.
        """
        byte = self.byte_price(stages, micro_batches, times)
        found = self.costs_of_ranges(stages, micro_batches, byte, live, 0.0)
        tables.add(live, byte, found - byte * self.search.memory)
        return float(found[0, -1]) / stages - byte * self.search.memory

    def byte_price(self, stages: int, micro_batches: int, times: float) -> float:
        """Return a price in seconds per byte, given how many `times` the unit of `BYTE_PRICES` it is."""
        second = self.kernels(micro_batches).seconds
        if not second and self._solver(stages, micro_batches) is not None:  # a device with a measured profile
            second = float(self.costs_of_ranges(stages, micro_batches, 0.0, 1, 0.0)[0, -1]) / stages
        return times * second / self.search.memory

    def costs_of_ranges(self, stages: int, micro_batches: int, byte: float, live: int, once: float) -> Floats:
        """
        Return lower bounds on what ranges of units cost as stages of a micro-batch, in any layouts: [first unit, unit
        behind the last]. A cost is the seconds, plus `byte` (seconds per byte) for each byte that a device holds with
        `live` micro-batches live. What a step does once counts `once` times its seconds.
        """
        key = stages, micro_batches, byte, live, once
        if key not in self._ranges:
            solver = self._solver(stages, micro_batches)
            assert solver is not None
            price = replace(self.search.price(micro_batches), byte=byte, again=byte > 0, once=once, live=float(live))
            small = self.search.small(micro_batches)
            longest = int(len(units(small).parts) / stages * SPREAD) + 2
            self._ranges[key] = range_bounds(small, solver.with_price(price), longest, stages)
        return self._ranges[key]

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
        return (
            bounds.solver(0, stepwise=False) if is_tabulated(self.search.small(micro_batches), bounds.machine) else None
        )

    def _least_makespan(self, tables: LiveTables, stages: int, micro_batches: int) -> float:
        sends = self._least_sends(stages, micro_batches)
        return least_makespan(tables, sends, stages, micro_batches, self.is_split)

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

    def _forward_part(self, micro_batches: int) -> float:
        """Return the least part of a stage's seconds in which it holds up those behind it."""
        return self.kernels(micro_batches).forward_part if self.is_split else 1.0


def _closed(total: float, stages: int, micro_batches: int, forward: float) -> float:
    """
    Return the least makespan of stages that take `total` together, of which that part at least is forward: of stages
    that take t_i in all, m t_i + (seconds of the stages before, F or F + B) <= makespan (`bound`).
    """
    return forward * total / (1 - (1 - forward / micro_batches) ** stages)


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4, .. up to `most`, and that."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]
