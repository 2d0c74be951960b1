"""
Find the best choice among a few rows of each variable of a factor graph, by variable elimination.

`elimination.py` merges values that no table tells apart, and looks for the order anew for each sum: worth it for
thousands of rows. Among a few, tables of all rows are small, and the order depends on the edges alone: it is found once
for a graph, and each elimination is three calls of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from unity_ir.budget import spend
from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits

Ends = tuple[tuple[int, int], ...]
"""The variables at the ends of tables or edges, the lower number first."""


@dataclass(frozen=True, eq=False)
class _Step:
    """Eliminate one variable."""

    variable: int
    others: tuple[int, ...]
    """Its neighbours then, ascending."""
    tables: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]], ...]
    """
    Per table of the variable with others: its variables, the permutation that brings this variable to the front, and
    the index that gives it an axis for each of `others`.
    """


@lru_cache(maxsize=64)
def _order(variables: int, ends: Ends, rows: int, most: int) -> tuple[_Step, ...] | None:
    """
    Return the eliminations of all variables, those of fewest neighbours first, for tables between pairs of variables
    (`ends`); None if, with `rows` rows of each variable, the tables have more than `most` entries.
    """
    tables: dict[int, dict[tuple[int, ...], None]] = {v: {} for v in range(variables)}
    around: list[set[int]] = [set() for _ in range(variables)]

    def enter(table: tuple[int, ...]) -> None:
        for v in table:
            tables[v][table] = None
            around[v].update(table)
            around[v].discard(v)

    for pair in ends:
        enter(pair)
    queue = [(len(others), v) for v, others in enumerate(around)]
    heapify(queue)
    steps: list[_Step] = []
    entries = 0
    while queue:
        degree, variable = heappop(queue)
        if variable not in tables or degree != len(around[variable]):
            continue
        entries += rows ** (degree + 1)
        if entries > most:
            return None
        others = tuple(sorted(around[variable]))
        steps.append(_Step(variable, others, tuple(_aligned(t, variable, others) for t in tables.pop(variable))))
        for other in others:
            tables[other] = {t: None for t in tables[other] if variable not in t}
            around[other].discard(variable)
        if len(others) > 1:
            enter(others)
        for other in others:
            heappush(queue, (len(around[other]), other))
    return tuple(steps)


def _aligned(
    table: tuple[int, ...], variable: int, others: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """Return an entry of `_Step.tables`: how `table` lies among (`variable`, *`others`)."""
    at = table.index(variable)
    front = (at, *(i for i in range(len(table)) if i != at))
    return table, front, (slice(None), *(slice(None) if other in table else None for other in others))


def best_among(problem: FactorGraph, rows: Sequence[Ints]) -> tuple[float, list[int]] | None:
    """
    Return (cost, row of each variable): the best choice with one of the rows `rows[v]` (positions in the array
    `problem.rows[v]`) of each variable v; rows are returned as `problem.rows` numbers them. None where the tables would
    be large (`limits().few_entries`).
    """
    ends = problem.ends
    steps = _order(len(rows), tuple(dict.fromkeys(ends)), max(map(len, rows)), limits().few_entries)
    if steps is None:
        return None
    spend(limits().work_few_rows * (len(ends) + len(steps)))
    alone = [seconds[some] for seconds, some in zip(problem.seconds, rows, strict=True)]
    tables: dict[tuple[int, ...], Floats] = {}
    for pair, edge in zip(ends, problem.edges, strict=True):
        table = edge.seconds_among(rows[edge.source], rows[edge.target])
        tables[pair] = tables[pair] + table if pair in tables else table
    constant = 0.0
    best: list[Ints] = []
    for step in steps:
        total = alone[step.variable].reshape(-1, *(1,) * len(step.others))
        for key, front, axes in step.tables:
            total = total + tables.pop(key).transpose(front)[axes]
        best.append(total.argmin(axis=0))
        least = np.minimum.reduce(total, axis=0)
        if not step.others:
            constant += float(least)
        elif len(step.others) == 1:
            alone[step.others[0]] = alone[step.others[0]] + least
        else:
            tables[step.others] = tables[step.others] + least if step.others in tables else least
    chosen = [0] * len(rows)
    for step, at in zip(reversed(steps), reversed(best), strict=True):
        chosen[step.variable] = int(at[tuple(chosen[v] for v in step.others)])
    return constant, [int(of[some[at]]) for of, some, at in zip(problem.rows, rows, chosen, strict=True)]
