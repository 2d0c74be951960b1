"""
Exact minimisation of a sum of tables over discrete variables, by eliminating one variable at a time.

    min over x1..xn of sum_k table_k(x_i, x_j, ...)

On a chain this is dynamic programming; on a series-parallel graph it does the sequence and parallel splits of Unity
(section 5.2) without having to find them; on any graph it is exact, at a cost that grows with how entangled it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod

import numpy as np

from unity_ir.search.space import Floats, Ints

Variable = int

DENSE = 4_000_000
"""Entries up to which the joint table of an elimination is built in one piece."""


@dataclass(frozen=True)
class Factor:
    """A table over variables, one axis each."""

    variables: tuple[Variable, ...]
    table: Floats


def minimise(sizes: Mapping[Variable, int], factors: Sequence[Factor]) -> tuple[float, dict[Variable, int]]:
    """The least sum and a choice for every variable that attains it. `inf` entries are forbidden combinations."""
    constant = sum(float(f.table) for f in factors if not f.variables)
    live = _Live(sizes, [f for f in factors if f.variables])
    decided: list[tuple[Variable, tuple[Variable, ...], Ints]] = []
    while (variable := live.cheapest()) is not None:
        involved = live.take(variable)
        others = tuple(dict.fromkeys(v for f in involved for v in f.variables if v != variable))
        table, choice = _eliminate(variable, others, involved, sizes)
        decided.append((variable, others, choice))
        if others:
            live.add(Factor(others, table))
        else:
            constant += float(table)
    found: dict[Variable, int] = {}
    for variable, others, choice in reversed(decided):
        found[variable] = int(choice[tuple(found[v] for v in others)])
    return constant, found


class _Live:
    """The tables not yet summed up, by variable, and the variables by the size of the table their elimination makes."""

    def __init__(self, sizes: Mapping[Variable, int], factors: Sequence[Factor]):
        self.sizes = sizes
        self.of: dict[Variable, dict[int, Factor]] = {v: {} for v in sizes}
        self.entries: dict[Variable, int] = {}
        self.queue: list[tuple[int, Variable]] = []
        self.count = 0
        for factor in factors:
            self._enter(factor)
        for variable in sizes:
            self._weigh(variable)

    def _enter(self, factor: Factor) -> None:
        for variable in factor.variables:
            self.of[variable][self.count] = factor
        self.count += 1

    def _weigh(self, variable: Variable) -> None:
        joint = {v for f in self.of[variable].values() for v in f.variables} | {variable}
        self.entries[variable] = prod(self.sizes[v] for v in joint)
        heappush(self.queue, (self.entries[variable], variable))

    def cheapest(self) -> Variable | None:
        """The variable whose elimination makes the smallest joint table; None when all are gone."""
        while self.queue:
            entries, variable = heappop(self.queue)
            if self.entries.get(variable) == entries:
                return variable
        return None

    def take(self, variable: Variable) -> list[Factor]:
        """The tables of a variable, which is gone with them."""
        taken = self.of.pop(variable)
        del self.entries[variable]
        for number, factor in taken.items():
            for other in factor.variables:
                if other != variable:
                    del self.of[other][number]
        return list(taken.values())

    def add(self, factor: Factor) -> None:
        """A new table over variables that are still there."""
        self._enter(factor)
        for variable in factor.variables:
            self._weigh(variable)


def _eliminate(
    variable: Variable, others: tuple[Variable, ...], involved: Sequence[Factor], sizes: Mapping[Variable, int]
) -> tuple[Floats, Ints]:
    """Minimum over `variable` of the sum of tables, and where it is attained, over the other variables."""
    order = (variable, *others)
    aligned = [_aligned(f, order) for f in involved]
    shape = tuple(sizes[v] for v in others)
    rows = max(1, DENSE // max(1, prod(shape)))
    best = np.full(shape, np.inf)
    choice = np.zeros(shape, dtype=np.int64)
    for start in range(0, sizes[variable], rows):
        stop = min(start + rows, sizes[variable])
        joint = np.zeros((stop - start, *shape))
        for table in aligned:
            joint += table if table.shape[0] == 1 else table[start:stop]
        at = joint.argmin(axis=0)
        least = np.take_along_axis(joint, at[None], axis=0)[0]
        better = least < best
        choice[better] = at[better] + start
        np.minimum(best, least, out=best)
    return best, choice


def _aligned(factor: Factor, order: tuple[Variable, ...]) -> Floats:
    """The table with axes in the given order, size 1 where it has no axis."""
    axes = [factor.variables.index(v) for v in order if v in factor.variables]
    table = factor.table.transpose(axes)
    shape = [factor.table.shape[factor.variables.index(v)] if v in factor.variables else 1 for v in order]
    return table.reshape(shape)
