"""The bound on large machines is below every plan, and on machines whose axes are all different it is the optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from extent import examples
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import csgraph_from_dense, dijkstra

from unity_ir.budget import Budget, within
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import build, from_text
from unity_ir.models.mlp import build as mlp
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.bounds import axis_counts
from unity_ir.search.bounds.assign_axes import assign_axes
from unity_ir.search.bounds.ordered_axes import with_axis_order
from unity_ir.search.bounds.refine import refine_rows
from unity_ir.search.exact import axis_groups
from unity_ir.search.exact.axis_groups import solve
from unity_ir.search.exact.elimination import Factor, every, minimise_within
from unity_ir.search.exact.factor_graph import between, port
from unity_ir.search.exact.shared_moves import SharedFactorGraphBuilder, with_shared_moves
from unity_ir.search.exact.solver import FactorGraphBuilder, Solver
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.exact.two_way import TwoWayCost
from unity_ir.search.layouts.axes import count_equal_axes, role_counts
from unity_ir.search.layouts.limits import limited, limits
from unity_ir.search.layouts.space import LayoutSpace, Spaces
from unity_ir.search.run import run

SGD = Optimizer()
DIMS = (4, 8, 12, 24)
SAME = {"4": boxes(4), "2x4": boxes(2, 4), "8": boxes(8)}
"""With equal axes in a level."""
LARGE = {"16": boxes(16), "2x8": boxes(2, 8), "2x2x2x2": boxes(2, 2, 2, 2), "2x6x2": boxes(2, 6, 2)}
"""Too large to search axis by axis."""
MIXTURE = {
    **{"batch": 4, "sequence": 4, "vocabulary": 16, "hidden": 8, "layers": 1, "heads": 4, "kv_heads": 4},
    **{"intermediate": 8, "experts": 4, "chosen": 2, "dispatch": "sparse", "capacity": 100},
}
"""The keys of a small mixture whose experts have a capacity."""


def bounds(graph, machine: Machine, known: float):
    """The bounds of every kind: by tables, by messages with more and more dims merged, and less and less."""
    yield axis_counts.bound(graph, machine, SGD, known)[0]
    for merges in (((0,),), ((1,),), ((2,),), ((3,),), ((3,), (2,), (0,)), ((3,), (2,), (1,))):
        with limited(count_pairs=-1, near=0.0, merges=merges):
            yield axis_counts.bound(graph, machine, SGD, known)[0]
    with limited(count_pairs=-1):
        yield axis_counts.bound(graph, machine, SGD, known, -1)[0]
    with limited(near=0.0):
        yield axis_counts.bound(graph, machine, SGD, known)[0]


@pytest.mark.slow
@pytest.mark.parametrize("machine", SAME.values(), ids=SAME)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(12))
def test_no_bound_is_above_the_optimum(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 5), dims=DIMS)
    least = Solver(Spaces(machine), SGD).solve(graph).seconds
    for bound in bounds(graph, machine, least * 1.2):
        assert 0 <= bound <= least * (1 + 1e-9)


def test_experts_and_slots_are_told_apart_where_all_dims_are_too_many():
    """The slots of experts are values of four dims. No bound is above the optimum, however many dims are merged."""
    graph = build("moe", **MIXTURE)
    machine = boxes(4)
    least = Solver(Spaces(machine), SGD).solve(graph).seconds

    def bound(*kinds: tuple[int, ...], steps: int = limits().pass_sums) -> float:
        with limited(count_pairs=-1, near=0.0, slow_pass=-1.0, merges=kinds):
            return axis_counts.bound(graph, machine, SGD, least * 2, steps)[0]

    found = [bound((merge,)) for merge in (3, 2, 1, 0)]
    assert max(found) <= least * (1 + 1e-9)

    def sums(merge: int) -> int:
        solver = Solver(Spaces(machine, by_count=True, merge=merge), SGD, stepwise=True)
        problem = SharedFactorGraphBuilder(solver, graph).problem()
        return problem.steps() + axis_counts._relaxing(problem)

    fewer = sums(0) - 1
    assert sums(1) <= fewer
    assert bound((0,), steps=fewer) < found[2] == bound((0, 1), steps=fewer)


@pytest.mark.slow
@pytest.mark.parametrize("machine", LARGE.values(), ids=LARGE)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(6))
def test_no_plan_is_below_the_bound(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 4), dims=DIMS)
    plans = [sample(graph, machine, seed + i) for i in range(3)]
    for make in (data_parallel,):
        try:
            plans.append(make(graph, machine))
        except UnityError:
            pass
    found = solve(graph, machine, SGD)[1].seconds
    known = min(found, *(cost(p, machine, SGD).time for p in plans))
    for bound in bounds(graph, machine, known * 1.1):
        assert 0 <= bound <= known * (1 + 1e-9)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(15))
def test_where_no_axes_are_equal_counting_them_is_exact(seed: int):
    machine = boxes(2, 2)
    graph = random_graph(Random(seed), Random(seed).randint(1, 6), dims=DIMS)
    exact = Solver(Spaces(machine), SGD).solve(graph)
    solver = Solver(Spaces(machine, by_count=True), SGD)
    found = solver.solve(graph)
    assert found.seconds == pytest.approx(exact.seconds, rel=1e-9)
    plan = assign_axes(graph, found, solver)
    assert plan is not None
    assert erase(plan) == graph
    assert cost(plan, machine, SGD).time == pytest.approx(found.seconds, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("machine", SAME.values(), ids=SAME)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(8))
def test_a_counted_plan_spelled_out_computes_the_same_and_is_not_below_its_sum(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 6), dims=DIMS)
    solver = Solver(Spaces(machine, by_count=True), SGD)
    found = with_shared_moves(solver, graph, solver.solve(graph))
    plan = assign_axes(graph, found, solver)
    assert plan is not None
    assert erase(plan) == graph
    assert cost(plan, machine, SGD).time >= found.bound - 1e-10


@pytest.mark.slow
@given(
    st.sampled_from([boxes(4), boxes(2, 2), boxes(4, 3), boxes(8)]),
    st.lists(st.sampled_from([2, 8, 12, 5]), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([{}, {"dense_pairs": 0}, {"dense_pairs": 0, "cached_messages": 40}]),
    st.integers(0, 10**6),
)
@settings(max_examples=90)
def test_stepwise_as_from_the_table_of_all_pairs(
    machine: Machine, shape: list[int], training: bool, limit: dict[str, int], seed: int
):
    random = np.random.default_rng(seed)
    space = LayoutSpace(machine, count_equal_axes(machine), tuple(shape), "f32")
    made, needs = (port(random.integers(low, len(space), size=random.integers(1, 40))) for low in (0, -1))
    table, steps = between(space, made, needs, training), TwoWayCost(made, needs, space, training)
    of_made, of_needs = (random.random(len(p.layouts)) * 1e-3 for p in (made, needs))
    with limited(**limit):
        assert steps.there(of_made) == pytest.approx(table.there(of_made), rel=1e-5, abs=3e-12)
        assert steps.back(of_needs) == pytest.approx(table.back(of_needs), rel=1e-5, abs=3e-12)
        assert np.all(steps.there(of_made) <= table.there(of_made) + 1e-15)
        assert np.all(steps.back(of_needs) <= table.back(of_needs) + 1e-15)


@pytest.mark.parametrize("merged", [None, (0, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("levels", [(2, 8), (4, 3), (32,)])
def test_cheapest_moves_from_some_layouts_are_those_of_all_and_never_too_dear_in_single_precision(
    levels: tuple[int, ...], merged: tuple[int, ...] | None
):
    machine = boxes(*levels, overhead=1e-6)
    groups = count_equal_axes(machine)
    space = LayoutSpace(machine, groups, (48, 12, 8), "f32", merged)
    count = len(space.from_layouts(np.arange(1))[0])
    sources, targets, seconds = space.moves
    single_moves = np.full((count, count), np.inf)
    np.minimum.at(single_moves, (sources, targets), seconds)
    expected = dijkstra(csgraph_from_dense(single_moves, null_value=np.inf))
    some = np.arange(0, count, 3)
    for scattered in (0, 20, 10**9):
        with limited(scattered=scattered):
            found = space.from_layouts(some)
        np.testing.assert_allclose(found, expected[some], rtol=1e-12)
        single = np.array(space.lower_bounds(some, some), dtype=np.float64)
        exact = found if single.shape == (count, count) else found[:, some]
        single = single[some] if single.shape == (count, count) else single
        assert np.all(single <= exact)
        np.testing.assert_allclose(single, exact, rtol=1e-3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(48, 12, 8), (16, 6), (64,)])
def test_what_it_costs_from_one_layout_or_a_few_is_as_between_all(shape: tuple[int, ...], training: bool):
    machine = boxes(2, 2, 3, overhead=1e-6)
    few, whole = (LayoutSpace(machine, Spaces(machine).groups, shape, "f32") for _ in range(2))
    every = np.arange(len(whole))
    expected = whole.reshard(every, every, training)
    some = every[:: max(1, len(every) // 5)][::-1]
    with limited(dense_paths=0):
        np.testing.assert_allclose(few.reshard_from_few(some, training), expected[some], rtol=1e-12)
    assert "_cheapest" not in few.__dict__
    for layout in some.tolist():
        assert np.array_equal(whole.reshard_one(layout, training, there=True), expected[layout])
        assert np.array_equal(whole.reshard_one(layout, training, there=False), expected[:, layout])


@pytest.mark.slow
@pytest.mark.parametrize("machine", SAME.values(), ids=SAME)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(6))
def test_a_plan_of_messages_is_one_of_the_graph_and_no_faster_than_the_best(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 5), dims=DIMS)
    least = Solver(Spaces(machine), SGD).solve(graph).seconds
    with limited(count_pairs=-1):
        bound, plan = axis_counts.bound(graph, machine, SGD, 2 * least)
    assert plan is not None
    assert erase(plan).outputs == graph.outputs
    # A free move counts as little, but so do these kernels.
    assert bound <= 1.01 * least
    assert least <= 1.01 * cost(plan, machine, SGD).time


def test_a_plan_of_messages_is_faster_than_one_of_grouped_axes():
    """And a quick bound, of the coarsest problem alone, is no bound of messages where there are many operators."""
    graph, machine = build("candle_uno"), load("summit:32")
    _, grouped = solve(graph, machine, SGD)
    bound, plan = axis_counts.bound(graph, machine, SGD, grouped.seconds)
    assert plan is not None
    assert bound <= cost(plan, machine, SGD).time < 0.98 * grouped.seconds
    with limited(planned_runs=0):
        assert axis_counts.bound(graph, machine, SGD, grouped.seconds) == (bound, None)
    made = axis_counts.Bounds(machine, SGD)
    assert 0 < axis_counts.quick_bound(made, graph, grouped.seconds) <= bound * (1 + 1e-6)
    with limited(quick_operators=10):
        assert axis_counts.quick_bound(made, graph, grouped.seconds) == 0


@pytest.mark.parametrize("near", [True, False])
def test_no_other_grouping_is_tried_near_a_bound(near: bool, monkeypatch: pytest.MonkeyPatch):
    sizes = {"batch": 2, "layers": 1, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64}
    bounded, solved, solves = list[float](), list[tuple[int, ...]](), axis_groups._solved

    def counted(graph: Graph, machine: Machine, optimizer: Optimizer, cuts: tuple[int, ...], most: float = np.inf):
        solved.append(cuts)
        return solves(graph, machine, optimizer, cuts, most)

    def least(of: Graph, seconds: float) -> float:
        bounded.append(seconds)
        return seconds if near else 0.0

    monkeypatch.setattr(axis_groups, "_solved", counted)
    solve(build("bert_large", **sizes), load("summit:8"), SGD, least=least)
    assert len(bounded) == 1
    assert (len(solved) == 1) == near


@pytest.mark.slow
@pytest.mark.parametrize("machine", [*SAME.values(), boxes(2, 2, 2)])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(6))
def test_rows_left_of_a_finer_problem_have_its_best_choice(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 4), dims=DIMS)
    plain = Spaces(machine, by_count=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "unity_ir.search.exact.solver.undominated", lambda seconds, ends: np.ones(len(seconds), dtype=bool)
        )
        least = FactorGraphBuilder(Solver(plain, SGD), graph).solve().seconds
        coarse, rows = None, None
        for merge in (3, 2, 1, 0):
            builder = FactorGraphBuilder(Solver(replace(plain, merge=merge), SGD, stepwise=merge > 0), graph)
            problem = builder.problem()
            if coarse is not None:
                problem = problem.among(refine_rows(coarse, rows, builder))
            if merge:
                messages = Messages(problem)
                for _ in range(2):
                    messages.forward(least * (1 + 1e-9))
                    messages.backward(least * (1 + 1e-9))
                assert messages.bound <= least * (1 + 1e-9)
            coarse, rows = builder, problem.rows
        assert builder.plan(problem).seconds == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("levels", [(), (2,), (3, 2), (4,), (12,), (2, 4)])
@pytest.mark.parametrize("roles", [1, 3, 5])
def test_layouts_are_found_by_their_counts(levels: tuple[int, ...], roles: int):
    groups = count_equal_axes(boxes(*levels))
    counts = role_counts(groups, roles)
    assert len(np.unique(counts.reshape(len(counts), -1), axis=0)) == len(counts)
    assert np.all(counts.sum(axis=2) == [g.count for g in groups])
    space = LayoutSpace(boxes(*levels), groups, (48,) * max(roles - 3, 0), "f32")
    assert np.array_equal(space.find(space.counts), np.arange(len(space)))


def orders(graph, machine: Machine) -> float:
    """The least sum where orders of counted axes are told apart."""
    builder = FactorGraphBuilder(Solver(Spaces(machine, by_count=True), SGD, stepwise=True), graph)
    found = with_axis_order(builder, builder.problem())
    assert found is not None
    sizes = {v: len(rows) for v, rows in enumerate(found[0].rows)}
    factors = [Factor((v,), (every(n),), found[0].seconds[v]) for v, n in sizes.items()]
    for edge in found[0].edges:
        factors.append(Factor((edge.source, edge.target), (edge.made.axis, edge.needs.axis), edge.seconds))
    least = minimise_within(10**12, sizes, factors)
    assert least is not None
    return least[0]


@pytest.mark.slow
@pytest.mark.parametrize("machine", [*SAME.values(), boxes(4, 4)])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(8))
def test_with_orders_told_apart_it_costs_no_less_than_counted_and_no_more_than_on_axes(machine: Machine, seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(1, 4), dims=DIMS)
    least = orders(graph, machine)
    if len(machine.mesh.sizes) <= 3:
        assert least <= Solver(Spaces(machine), SGD).solve(graph).seconds * (1 + 1e-9)
    assert least >= Solver(Spaces(machine, by_count=True), SGD).solve(graph).seconds * (1 - 1e-9) - 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("hidden", [512, 768])
def test_where_samples_cannot_be_divided_orders_are_all_that_counting_forgets(size: int, hidden: int):
    machine = boxes(size, bandwidth=1e11)
    graph = mlp(batch=257, hidden=hidden, layers=4, classes=hidden)
    least = Solver(Spaces(machine), SGD).solve(graph).seconds
    assert Solver(Spaces(machine, by_count=True), SGD).solve(graph).seconds < 0.999 * least
    assert orders(graph, machine) == pytest.approx(least, rel=1e-6)
    bound, plan = axis_counts.bound(graph, machine, SGD, least * 1.2)
    assert least * (1 - limits().near) <= bound <= least * (1 + 1e-9)
    assert plan is not None
    assert cost(plan, machine, SGD).time == pytest.approx(least, rel=limits().near)


def test_a_bound_with_orders_told_apart_ends_where_there_are_too_many():
    machine = boxes(4, bandwidth=1e11)
    graph = mlp(batch=257, hidden=512, layers=4, classes=512)
    plain = Solver(Spaces(machine, by_count=True), SGD).solve(graph).seconds
    for limit in ("order_layouts", "order_rows", "order_pairs", "order_sums"):
        with limited(**{limit: 1}):
            assert axis_counts.bound(graph, machine, SGD, plain * 1.2)[0] == pytest.approx(plain, rel=1e-5)


TRANSFORMER = "llama3_8b,batch=8,layers=8,hidden=1024,heads=8,kv_heads=4,intermediate=2048,vocabulary=512,sequence=256"


@pytest.mark.parametrize("price", [0.0, 1e-10])
def test_fewer_passes_bound_many_equal_layers_from_a_graph_with_few(price: float, monkeypatch: pytest.MonkeyPatch):
    graph, machine = from_text(TRANSFORMER), boxes(2, 4)
    plan = cost(data_parallel(graph, machine), machine, SGD)
    known = axis_counts.KnownPlan(graph, plan.time, plan.memory_bytes, price)
    limit = machine.device.usable
    edges: list[int] = []
    forward = Messages.forward

    def counted(self: Messages, known: float = np.inf) -> float:
        edges.append(len(self.problem.edges))
        return forward(self, known)

    monkeypatch.setattr(Messages, "forward", counted)

    def bounded() -> float:
        edges.clear()
        made = axis_counts.Bounds(machine, SGD)
        if price:
            return axis_counts.bound_within(known, made, limit) + price * limit
        return axis_counts.bound(graph, machine, SGD, known.seconds, bounds=made)[0]

    with limited(count_pairs=-1, near=0.0, long_sums=0, merges=((3,), (0,)), direct_sums=0):
        with limited(long_sums=10**12, slow_pass=1e-9, count_passes=30):
            settled = bounded()
        bounded()
        from_zero = edges.count(max(edges))
        with limited(rewritten_operators=10, rewritten_layers=6):
            found = bounded()
    assert 0.995 * settled <= found <= settled * (1 + 1e-6)
    assert edges[0] < max(edges)
    assert edges.count(max(edges)) < from_zero


def test_settled_messages_pass_once_where_that_is_long(monkeypatch: pytest.MonkeyPatch):
    graph, machine = from_text(TRANSFORMER), boxes(2, 4)
    known = cost(data_parallel(graph, machine), machine, SGD).time
    passed: list[int] = []
    for way in ("forward", "backward"):

        def counted(self: Messages, known: float = np.inf, of: Callable[..., float] = getattr(Messages, way)) -> float:
            passed.append(len(self.problem.edges))
            return of(self, known)

        monkeypatch.setattr(Messages, way, counted)

    def passes(sums: int) -> tuple[float, int, int]:
        """Return the bound, and how many passes the whole graph and the shorter one take."""
        passed.clear()
        with limited(once_sums=sums):
            least = axis_counts.bound(graph, machine, SGD, known)[0]
        return least, passed.count(max(passed)), passed.count(min(passed))

    with limited(count_pairs=-1, near=0.0, merges=((0,),), rewritten_operators=10):
        many, few = passes(10**12), passes(0)
    assert few[1] == 1 < many[1]
    assert few[2] < many[2]
    assert many[0] * 0.995 <= few[0] <= many[0]


@pytest.mark.slow
def test_the_joint_search_knows_how_good_its_plan_is_on_a_large_machine():
    machine = boxes(4, 8)
    result = run(mlp(batch=64, hidden=64, layers=2, classes=64), machine)
    assert result.bound is not None
    assert result.gap is not None
    assert 0 < result.bound <= result.cost.time
    assert result.gap < 0.5


def test_an_expected_bound_is_the_same_and_passes_no_more_messages_of_few_layers(monkeypatch: pytest.MonkeyPatch):
    graph, machine = from_text(TRANSFORMER), boxes(2, 4)
    plan = cost(data_parallel(graph, machine), machine, SGD)
    known = axis_counts.KnownPlan(graph, plan.time, plan.memory_bytes, 1e-10, again=True)
    settled: list[int] = []
    settle = Messages.settle

    def counted(self: Messages, passes: int, least: float) -> None:
        settled.append(len(self.problem.edges))
        settle(self, passes, least)

    monkeypatch.setattr(Messages, "settle", counted)

    def bounded(*expected: axis_counts.ExpectedBound) -> tuple[float, float, int]:
        """Return the bound, its work, and how often messages then settle."""
        made = axis_counts.Bounds(machine, SGD)
        with within(Budget()):
            assert all(made(each) == (0.0, None) for each in expected)
        settled.clear()
        with within(budget := Budget()):
            least = axis_counts.bound_within(known, made, machine.device.usable)
        return least, budget.done, len(settled)

    with limited(count_pairs=-1, near=0.0, merges=((3,), (0,)), direct_sums=0, rewritten_operators=10):
        least, work, times = bounded()
        assert (times, bounded(axis_counts.ExpectedBound(graph, 1e-10))) == (2, (least, work, 0))
        assert bounded(axis_counts.ExpectedBound(graph, 2e-10)) == (least, work, 2), "another price"
        with limited(pass_sums=0):
            settled.clear()
            assert axis_counts.Bounds(machine, SGD)(axis_counts.ExpectedBound(graph, 1e-10)) == (0.0, None)
            assert settled == [], "problems in which the bound makes no pass"
