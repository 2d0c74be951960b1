"""
Find the choice of rows of a factor graph that costs the least.

Branch-and-bound without branching: bound by TRW-S messages, which also give each row's slack
(`search/exact/trw_s.py`); find an incumbent by elimination among the few rows of least slack
(`search/exact/elimination.py`); drop rows whose slack exceeds the gap. Once few rows are left, elimination finds their
optimum, which is that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity_ir.budget import OutOfBudget, spend
from unity_ir.search.exact.elimination import Factor, Memo, minimise_within
from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.exact.few_rows import best_among
from unity_ir.search.exact.known_messages import PLAIN, KnownMessages, Start
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.layouts.limits import limits

TOLERANCE = 1e-9
"""Relative slack above the incumbent from which on rows are dropped: it covers the rounding of sums."""


def minimum(problem: FactorGraph, memo: Memo, start: Start, most: float = np.inf) -> tuple[float, list[int], float]:
    """
    Return an incumbent's cost, its rows, and a lower bound on all choices; equal to the cost if it is optimal. Once the
    bound is `most` or more, no better incumbent is looked for.

    Messages start from those that `start` knows. Theirs of when no row was dropped yet are kept there, as others say
    nothing of the rows dropped; and only if the incumbent comes close to the bound: where it does not, it depends on
    the way to the bound, and would be no better on the way from here.

    Where the budget ends after an incumbent is found, that is returned. Raises `OutOfBudget` where it ends before.
    """
    if start.key not in start.known.large:
        exact = _eliminate(problem, limits().whole_entries, memo)
        if exact is not None:
            return (*exact, exact[0])
        start.known.large.add(start.key)
    messages = start.messages(problem)
    early = start.now(messages)
    best, chosen, few = np.inf, list[int](), limits().best_rows
    whole = left = tried = sum(map(len, problem.rows))
    try:
        for _ in range(limits().exact_passes):
            messages.forward()
            before = messages.bound
            messages.backward()
            found, few = among_best(problem, messages.slack, few)
            if found[0] < best:
                best, chosen = found
            if left == whole:
                early = start.now(messages)
            among, left = left, messages.prune(best * (1 + TOLERANCE) - before)
            close = best <= messages.bound * (1 + limits().close)
            if close or 2 * left < tried:
                tried = left
                exact = _eliminate(problem, limits().pruned_entries)
                if close or exact is not None:
                    start.keep(early)
                if exact is not None:
                    return (*exact, exact[0])
            if messages.bound >= most:
                break
            if close and not (messages.restarted and 2 * left < among):
                # Messages that start close have not yet dropped the rows that as many passes from zero would have.
                break
    except OutOfBudget:
        if not chosen:
            raise
    return best, chosen, min(best, messages.bound)


def least_sum(problem: FactorGraph) -> float:
    """
    Return a lower bound on the sum of costs of every choice of rows; equal to the least if that is found. Rows of
    `problem` that are in no best choice may be dropped, in place.
    """
    start = Start(KnownMessages(), (), [PLAIN] * len(problem.rows))
    return minimum(problem, Memo(), start)[2]


def among_best(problem: FactorGraph, slack: Sequence[Floats], few: int) -> tuple[tuple[float, list[int]], int]:
    """
    Return ((cost, row of each variable), few): the best choice among the `few` rows of least slack of each variable,
    and the value of `few` that was used. A row is a way to shard an operator, or a layout.

    `slack` [row], per variable, is how far above the lower bound any choice with that row must be. Rows are returned as
    `problem.rows` numbers them. `few` is halved until variable elimination looks at no more than
    `limits().pruned_entries` table entries.
    """
    while True:
        spend(2 * limits().work_port * len(problem.edges))
        among = [np.sort(np.argsort(s, kind="stable")[:few]) for s in slack]
        found = best_among(problem, among) or _eliminate(problem.among(among), limits().pruned_entries)
        if found is not None:
            return found, few
        few //= 2


def _eliminate(problem: FactorGraph, limit: int, memo: Memo | None = None) -> tuple[float, list[int]] | None:
    """Return the best choice; None if elimination would look at more than `limit` entries."""
    factors = [
        Factor((v,), (axis,), seconds)
        for v, (axis, seconds) in enumerate(zip(problem.own, problem.seconds, strict=True))
    ]
    for edge in problem.edges:
        factors.append(Factor((edge.source, edge.target), (edge.made.axis, edge.needs.axis), edge.seconds))
    found = minimise_within(limit, {v: len(rows) for v, rows in enumerate(problem.rows)}, factors, memo)
    if found is None:
        return None
    seconds, rows = found
    return seconds, [int(of[rows[v]]) for v, of in enumerate(problem.rows)]
