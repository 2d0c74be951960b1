"""
Bound the makespan of one stage per part from below, under all orders, where memory limits the micro-batches live.

Of a rank with at most L of m micro-batches live, L < m, with F and B the seconds of its stage, and R those from the
start of a forward until that micro-batch comes back and its backward is done,

    last end - first start >= m (F + B) + (R - L F - B) + (R - L B - F)
                            = 2 R + (m - L - 1) (F + B).

Until the first backward ends it does L forwards at most, so it waits R - L F - B; from the start of the last forward
on it has L backwards left at most, so it waits again; and the second time begins no sooner than the first ends, as else
all m would be live at once. 1F1B of equal stages attains it. R is what this stage and those behind it take, and sends
there and back.

A stage with more micro-batches live has less room for each, so it takes longer: for each stage that number counts which
makes the bound the least.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import product
from math import inf

import numpy as np

from unity_ir.search.pipeline.table import Floats

EACH = 16
"""Micro-batches live up to which each number is looked at by itself; of more, about every fifth."""


@dataclass
class LiveTables:
    """
    Lower bounds on the seconds of a micro-batch in ranges of units as stages, [first unit, unit behind the last], by
    the number of micro-batches live. That of fewer holds for more. Bounds at two prices of a byte give one between: the
    least cost of a range is concave in the prices of a byte held and of one of a live micro-batch.
    """

    free: Floats
    """Those with any number live."""
    others: LiveTables | None = None
    """Bounds of another kind, which hold as well."""
    _at: dict[int, list[tuple[float, Floats]]] = field(default_factory=dict[int, list[tuple[float, Floats]]])
    """By micro-batches live: prices of a byte, and bounds at these."""

    def add(self, live: int, byte: float, least: Floats) -> None:
        """Add bounds that hold with `live` micro-batches or more, found at a price of a byte held; none at price 0."""
        if byte:
            self._at.setdefault(live, []).append((byte, least))

    def of(self, live: int) -> Floats:
        """Return bounds on ranges with `live` micro-batches or more live; no range takes less than one inside of it."""
        found = np.maximum(self.free, 0.0)
        known = sorted(self._at)
        at = bisect_right(known, live)
        for fewer in known[:at]:
            for _, least in self._at[fewer]:
                np.maximum(found, least, out=found)
        if 0 < at < len(known) and known[at - 1] < live:
            for low, high in product(self._at[known[at - 1]], self._at[known[at]]):
                np.maximum(found, _between(low, high, live - known[at - 1], known[at] - live), out=found)
        if self.others is not None:
            np.maximum(found, self.others.of(live), out=found)
        is_range = np.triu(np.ones_like(found), 1) > 0
        return np.where(is_range, np.maximum.accumulate(np.where(is_range, found, 0.0), axis=1), inf)


def _between(low: tuple[float, Floats], high: tuple[float, Floats], above: int, below: int) -> Floats:
    """
    Return bounds at the prices between two at which a micro-batch live costs as one does `above` micro-batches more
    than the first are, and `below` fewer than the second.
    """
    (byte, least), (other, most) = low, high
    share = byte * above / (byte * above + other * below)
    return (1 - share) * least + share * most


def least_makespan(tables: LiveTables, sends: Floats, stages: int, micro_batches: int, is_split: bool) -> float:
    """
    Return the least makespan in seconds of `stages` contiguous stages, one per rank, of all units, under all
    synchronous orders with whole backwards; if `is_split`, under those with backwards whole or in halves that hold at
    least as many micro-batches as 1F1B. `sends` [cut] has the seconds of one send there, or of its gradient back.
    """
    m, count = micro_batches, len(tables.free) - 1
    behind, rest = np.full((2, count + 1), inf)
    behind[-1] = rest[-1] = 0.0
    known: dict[int, Floats] = {}

    def at(live: int) -> Floats:
        if live not in known:
            known[live] = tables.of(live)
        return known[live]

    for k in range(stages):
        both_ways = 2 * sends if k else 0.0
        after, around = behind + both_ways, rest + both_ways
        if is_split:
            least = at(min(k + 1, m))
            behind = np.maximum(m * least, after).min(axis=1)
            continue
        best = np.full_like(at(1), inf)
        for low, high in _numbers_live(k, m):
            each = at(low)
            # In all of them the stage waits no less than with the most of these.
            own = m * each if high >= m else np.maximum(m * each, (m - high + 1) * each + 2 * around)
            np.minimum(best, np.maximum(own, each + after), out=best)
        behind, rest = best.min(axis=1), (at(1) + around).min(axis=1)
    return float(behind[0])


def _numbers_live(behind: int, micro_batches: int) -> list[tuple[int, int]]:
    """
    Return groups (least, most) of the numbers of micro-batches that a stage may hold which has `behind` stages behind
    it; together they are 1 to `micro_batches`. A stage that holds twice as many as there are stages from it on hardly
    waits, so those above are one group.
    """
    found: list[tuple[int, int]] = []
    low = 1
    while low < micro_batches and low <= 2 * behind + 1:
        high = low if low <= EACH else min(low * 6 // 5, micro_batches - 1)
        found.append((low, high))
        low = high + 1
    return [*found, (low, micro_batches)]
