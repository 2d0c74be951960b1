"""Small random factor graphs, and what each choice of rows costs."""

from __future__ import annotations

from itertools import product

import numpy as np

from unity_ir.search.exact.elimination import every
from unity_ir.search.exact.factor_graph import DenseCost, Edge, FactorGraph, port


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
    """What a choice of row positions costs."""
    alone = sum(float(s[x]) for s, x in zip(problem.seconds, choice, strict=True))
    return alone + sum(
        float(edge.seconds[edge.made.at[choice[edge.source]], edge.needs.at[choice[edge.target]]])
        for edge in problem.edges
    )


def choices(problem: FactorGraph) -> list[tuple[int, ...]]:
    return list(product(*(range(len(r)) for r in problem.rows)))
