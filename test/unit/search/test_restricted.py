"""Tables of reshards, restricted to the layouts that rows left over still have."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from extent import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.search.exact.elimination import every
from unity_ir.search.exact.factor_graph import DenseCost, Edge, FactorGraph, port
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.layouts.limits import limited


@given(st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_a_shared_table_costs_what_a_copied_one_does(seed: int):
    random = np.random.default_rng(seed)
    table = random.random((6, 7))
    shared = copied = DenseCost(port(np.arange(6)), port(np.arange(7) * 2), table)
    for _ in range(3):
        made = port(np.sort(random.choice(shared.made.layouts, min(3, len(shared.made.layouts)), replace=False)))
        needs = port(np.sort(random.choice(shared.needs.layouts, len(shared.needs.layouts) - 1, replace=False)))
        with limited(copied_share=0.0):
            shared = shared.of(made, needs)
        with limited(copied_share=1.0):
            copied = copied.of(made, needs)
        of_made, of_needs = random.random(len(made.layouts)), random.random(len(needs.layouts))
        assert shared.table is table
        assert np.array_equal(shared.there(of_made), copied.there(of_made))
        assert np.array_equal(shared.back(of_needs), copied.back(of_needs))
    assert np.array_equal(shared.seconds, table[np.ix_(shared.made.layouts, shared.needs.layouts // 2)])
    assert shared.seconds is shared.seconds, "elimination tells tables apart as objects"


def chain(layers: int, rows: int) -> FactorGraph:
    """Equal layers in a chain, which share one table; row 0 is the best in each, the last the worst."""
    every_row, one = np.arange(rows), port(np.arange(rows))
    cost = DenseCost(one, one, 0.1 * (every_row[:, None] != every_row))
    return FactorGraph(
        [every_row] * layers,
        [every_row.astype(float)] * layers,
        [every(rows)] * layers,
        [Edge(v, v + 1, cost) for v in range(layers - 1)],
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_restricted_tables_are_shared_by_equal_layers_and_then_freed(share: float):
    problem = chain(4, 8)
    messages = Messages(problem)
    messages.forward()
    messages.backward()
    freed: list[weakref.ref[DenseCost]] = []
    with limited(copied_share=share):
        for limit in (5.5, 3.5, 1.5):
            messages.prune(limit)
            costs = {edge.between for edge in problem.edges}
            assert len(costs) == 1
            assert all(ref() is None for ref in freed)
            freed += [weakref.ref(cost) for cost in costs if isinstance(cost, DenseCost)]
            del costs
    assert [len(rows) for rows in problem.rows] == [2, 2, 2, 2]


def test_passes_that_drop_rows_free_their_tables():
    problem = chain(4, 8)
    messages = Messages(problem)
    messages.forward()
    messages.backward()
    messages.forward(5.5)
    freed = [weakref.ref(edge.between) for edge in problem.edges if isinstance(edge.between, DenseCost)]
    messages.backward(1.5)
    assert [len(rows) for rows in problem.rows] == [2, 2, 2, 2]
    assert all(ref() is None for ref in freed)
