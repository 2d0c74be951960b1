"""The best choice among a few rows, by one elimination order for all, is that of every choice tried."""

from __future__ import annotations

import numpy as np
import pytest
from extent import examples
from factor_graphs import random_problem, total
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.search.exact.few_rows import best_among
from unity_ir.search.layouts.axes import Ints
from unity_ir.search.layouts.limits import limited


@given(st.integers(0, 10**6))
@settings(max_examples=examples(150))
def test_the_best_choice_among_some_rows_is_that_of_all_choices(seed: int):
    problem, random = random_problem(seed), np.random.default_rng(seed)
    masks = [random.random(len(rows)) < 0.7 for rows in problem.rows]
    if seed % 2:
        # Rows that were dropped before: tables are read through indices.
        problem.keep({v: mask | (np.arange(len(mask)) == 0) for v, mask in enumerate(masks)})
    rows = [np.flatnonzero(random.random(len(of)) < 0.7) for of in problem.rows]
    rows = [some if len(some) else np.array([0]) for some in rows]
    seconds, chosen = best_among(problem, rows) or pytest.fail("tables are small")
    at = [int(np.flatnonzero(of == row)[0]) for of, row in zip(problem.rows, chosen, strict=True)]
    assert all(place in some for place, some in zip(at, rows, strict=True))
    every = [total(problem, choice) for choice in _product(rows)]
    assert seconds == pytest.approx(min(every))
    assert total(problem, tuple(at)) == pytest.approx(seconds)


def _product(rows: list[Ints]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for some in rows:
        found = [(*choice, int(row)) for choice in found for row in some]
    return found


def test_large_tables_are_left_to_others():
    problem = next(p for p in map(random_problem, range(100)) if len(p.edges) > 3 and min(map(len, p.rows)) > 1)
    rows = [np.arange(len(of)) for of in problem.rows]
    assert best_among(problem, rows) is not None
    with limited(few_entries=3):
        assert best_among(problem, rows) is None
