"""Small random factor graphs, and what each choice of rows costs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from unity_ir.search.exact.elimination import every
from unity_ir.search.exact.factor_graph import DenseCost, Edge, FactorGraph, port
from unity_ir.search.exact.trw_s import Messages


def random_problem(seed: int) -> FactorGraph:
    """A few variables, edges between some, several between a pair; rows that look alike through an edge."""
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 5)) for _ in range(int(random.integers(1, 6)))]
    edges: list[Edge] = []
    for _ in range(int(random.integers(0, 8)) if len(sizes) > 1 else 0):
        source, target = sorted(int(v) for v in random.choice(len(sizes), 2, replace=False))
        made, needs = (port(random.integers(0, 3, sizes[v])) for v in (source, target))
        table = random.integers(0, 9, (len(made.layouts), len(needs.layouts))).astype(float)
        edges.append(Edge(source, target, DenseCost(made, needs, table)))
    seconds = [random.integers(0, 9, n).astype(float) for n in sizes]
    return FactorGraph([np.arange(n) for n in sizes], seconds, [every(n) for n in sizes], edges)


def total(problem: FactorGraph, choice: tuple[int, ...]) -> float:
    """Return the cost of a choice of row positions."""
    alone = sum(float(s[x]) for s, x in zip(problem.seconds, choice, strict=True))
    return alone + sum(
        float(edge.seconds[edge.made.at[choice[edge.source]], edge.needs.at[choice[edge.target]]])
        for edge in problem.edges
    )


def choices(problem: FactorGraph) -> list[tuple[int, ...]]:
    return list(product(*(range(len(r)) for r in problem.rows)))


def bound_after_passes(messages: Messages, costs: Mapping[tuple[int, ...], float]) -> float:
    """
    Make six passes of messages; return the bound before the last. After each, no bound may be above the least of
    `costs`, the cost of every choice, and no slack above what a choice costs more than the bound before.
    """
    before, least = -np.inf, min(costs.values())
    for turn in range(6):
        before = messages.bound
        assert (messages.backward() if turn % 2 else messages.forward()) <= least + 1e-9
        if turn:
            for choice, seconds in costs.items():
                assert all(before + messages.slack[v][x] <= seconds + 1e-9 for v, x in enumerate(choice))
    return before
