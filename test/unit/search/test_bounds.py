"""What the layout search may leave out: pruning and memo never change the least sum."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from extent import examples
from factor_graphs import bound_after_passes, choices, random_problem, total
from graphs import boxes, random_cnn, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.machine import Machine, load
from unity_ir.pcg.graph import erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.axis_groups import first_cuts, groups_for, solve
from unity_ir.search.exact.elimination import Factor, Memo, Projection, every, minimise, minimise_within, plain
from unity_ir.search.exact.factor_graph import DenseCost, Edge, FactorGraph, port, undominated
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.solver import FactorGraphBuilder, Solver
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.layouts.limits import limited, limits
from unity_ir.search.layouts.space import Spaces

SGD = Optimizer()
MACHINES = [boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6), boxes(2, 3, overhead=1e-6), boxes(2, 2, 2)]


@given(st.integers(0, 10**6))
@settings(max_examples=examples(150))
def test_messages_are_a_bound_and_slack_never_drops_a_better_choice(seed: int):
    problem = random_problem(seed)
    costs = {c: total(problem, c) for c in choices(problem)}
    least = min(costs.values())
    messages = Messages(problem)
    before = bound_after_passes(messages, costs)
    messages.prune(least * (1 + 1e-9) + 1e-9 - before)
    assert min(total(problem, c) for c in choices(problem)) == pytest.approx(least)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(150))
def test_rows_dropped_on_the_way_are_in_no_better_choice(seed: int):
    problem = random_problem(seed)
    least = min(total(problem, c) for c in choices(problem))
    messages = Messages(problem)
    for turn in range(6):
        bound = (messages.backward if turn % 2 else messages.forward)(least * (1 + 1e-9) + 1e-9)
        assert bound <= least * (1 + 1e-9) + 1e-9
        assert min(total(problem, c) for c in choices(problem)) == pytest.approx(least)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(50))
def test_two_passes_are_exact_on_a_chain(seed: int):
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 5)) for _ in range(5)]
    rows = [np.arange(n) for n in sizes]
    edges = [
        Edge(
            v, v + 1, DenseCost(port(rows[v]), port(rows[v + 1]), random.integers(0, 9, sizes[v : v + 2]).astype(float))
        )
        for v in range(4)
    ]
    problem = FactorGraph(rows, [random.integers(0, 9, n).astype(float) for n in sizes], list(map(every, sizes)), edges)
    messages = Messages(problem)
    messages.forward()
    messages.backward()
    assert messages.bound == pytest.approx(min(total(problem, c) for c in choices(problem)))


@given(st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_elimination_through_axes_with_a_memo(seed: int):
    """Twice the same problem beside itself, with one memo: the second half costs nothing new."""
    problem, memo = random_problem(seed), Memo()
    count, sizes = len(problem.rows), {v: len(r) for v, r in enumerate(problem.rows)}
    factors = [Factor((v,), (problem.own[v],), s) for v, s in enumerate(problem.seconds)]
    factors += [Factor((k.source, k.target), (k.made.axis, k.needs.axis), k.seconds) for k in problem.edges]
    least = min(total(problem, c) for c in choices(problem))
    found = minimise_within(1e9, sizes, factors, memo)
    assert found is not None
    assert (found[0], total(problem, tuple(found[1][v] for v in range(count)))) == (least, least)
    made = len(memo.tables)
    twin = [Factor(tuple(v + count for v in f.variables), f.axes, f.table) for f in factors]
    both = minimise_within(0, {**sizes, **{v + count: n for v, n in sizes.items()}}, [*factors, *twin], memo)
    assert both is not None
    assert both[0] == 2 * least
    assert len(memo.tables) == made


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_a_memo_tells_arrangements_of_the_same_tables_apart(seed: int):
    random, memo = np.random.default_rng(seed), Memo()
    tables = [random.integers(0, 9, (3, 3)).astype(float) for _ in range(2)]
    axes = [Projection(random.permutation(3), 3) for _ in range(2)]
    for _ in range(4):
        factors: list[Factor] = []
        for _ in range(3):
            a, b = (int(v) for v in random.choice(3, 2, replace=False))
            of, seen = tables[random.integers(2)], (axes[random.integers(2)], axes[random.integers(2)])
            factors.append(Factor((a, b), seen, of))
        least = min(
            sum(f.table[f.axes[0].at[c[f.variables[0]]], f.axes[1].at[c[f.variables[1]]]] for f in factors)
            for c in product(range(3), repeat=3)
        )
        found = minimise_within(1e9, dict.fromkeys(range(3), 3), factors, memo)
        assert found is not None
        assert found[0] == least


def test_elimination_gives_up_beyond_its_limit():
    rows = Projection(np.arange(5), 5)
    table = Factor((0, 1), (rows, rows), np.ones((5, 5)))
    assert minimise_within(24, {0: 5, 1: 5}, [table]) is None
    assert minimise_within(30, {0: 5, 1: 5}, [table]) is not None


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_rows_that_others_stand_in_for_are_in_no_better_choice(seed: int):
    """Points on a line, dearer upwards than downwards: one row per wish of the neighbours is kept that is the best."""
    random = np.random.default_rng(seed)
    where = random.integers(0, 10, 6).astype(float)
    apart = np.where(where > where[:, None], 3, 1) * np.abs(where[:, None] - where)
    seconds = random.integers(0, 12, 8).astype(float)
    needs, makes = random.integers(0, 6, 8), random.integers(0, 6, 8)
    alive = undominated(seconds, [(needs, apart.T), (makes, apart)])
    cost_of: Floats = seconds[:, None, None] + apart[:, needs].T[:, :, None] + apart[makes][:, None, :]
    np.testing.assert_array_equal(cost_of[alive].min(axis=0), cost_of.min(axis=0))


def plain_minimum(problem: FactorGraph) -> float:
    """Elimination of everything without axes, memo, bounds."""
    return minimise(
        {v: len(r) for v, r in enumerate(problem.rows)},
        [plain((v,), s) for v, s in enumerate(problem.seconds)]
        + [plain((k.source, k.target), k.seconds[np.ix_(k.made.at, k.needs.at)]) for k in problem.edges],
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=["2", "2x2", "2x3", "2x2x2"])
@given(st.integers(0, 10**6))
@settings(max_examples=examples(25))
def test_messages_find_what_elimination_finds(machine: Machine, seed: int):
    """The way for graphs too entangled to eliminate, with nothing left out at first as the oracle."""
    random = Random(seed)
    graph = random_cnn(random, 2) if seed % 4 == 0 else random_graph(random, random.randint(1, 6), dims=(2, 4, 6, 12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "unity_ir.search.exact.solver.undominated", lambda seconds, ends: np.ones(len(seconds), dtype=bool)
        )
        solver = Solver(Spaces(machine), SGD)
        expected = plain_minimum(FactorGraphBuilder(solver, graph).problem())
    found = Solver(Spaces(machine), SGD).solve(graph)
    assert found.seconds == found.bound == pytest.approx(expected, abs=1e-12)
    with limited(whole_entries=0, pruned_entries=2000):
        near = Solver(Spaces(machine), SGD).solve(graph)
    assert near.bound <= expected + 1e-12
    assert expected - 1e-12 <= near.seconds <= near.bound * (1 + limits().close) or near.seconds >= expected - 1e-12
    plan = realise(graph, near, solver)
    assert cost(plan, machine, SGD).time == pytest.approx(near.seconds, abs=1e-9)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(4))
def test_groups_of_axes_make_real_plans(seed: int):
    machine = boxes(2, 2, 2, 3, 2, overhead=1e-6)
    graph = random_graph(Random(seed), 4, dims=(4, 12, 48))
    with limited(group_rows=1000):
        solver, found = solve(graph, machine, SGD)
    assert not solver.spaces.axis_by_axis
    first = Solver(Spaces(machine, first_cuts(machine, 3)), SGD).solve(graph)
    assert found.seconds <= first.seconds + 1e-12
    plan = realise(graph, found, solver)
    assert erase(plan) == graph
    assert cost(plan, machine, SGD).time <= found.seconds + 1e-9


def test_first_cuts_follow_levels():
    summit = load("summit:32")
    assert first_cuts(summit, 3) == (5, 6)
    assert first_cuts(summit, 4) == (3, 5, 6)
    assert first_cuts(summit, 2) == (5,)
    assert first_cuts(load("dgx-h100:512"), 3) == (5, 9)
    assert first_cuts(load("box:1"), 0) == ()
    assert groups_for(random_graph(Random(0), 2), 3) == 3
