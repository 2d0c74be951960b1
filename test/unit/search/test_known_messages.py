"""Messages that start from those of the search before end at the same plans, after fewer passes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from extent import examples
from factor_graphs import bound_after_passes, choices, random_problem, total
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.models import from_text
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.exact.elimination import Memo
from unity_ir.search.exact.known_messages import PLAIN, KnownMessages, Moved, Start
from unity_ir.search.exact.minimum import minimum
from unity_ir.search.exact.shared_moves import SharedFactorGraphBuilder, with_shared_moves
from unity_ir.search.exact.shorter import shorter
from unity_ir.search.exact.solver import FactorGraphBuilder, Solver
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.layouts.limits import limited
from unity_ir.search.layouts.objective import Price
from unity_ir.search.layouts.space import Spaces

MACHINE = boxes(2, 2, 2, overhead=1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(100))
def test_any_messages_are_a_valid_start(seed: int):
    problem, random = random_problem(seed), np.random.default_rng(seed)
    costs = {choice: total(problem, choice) for choice in choices(problem)}
    start = (
        [random.integers(-9, 9, len(edge.needs.layouts)).astype(float) for edge in problem.edges],
        [random.integers(-9, 9, len(edge.made.layouts)).astype(float) for edge in problem.edges],
    )
    bound_after_passes(Messages(problem, start), costs)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(50))
def test_a_restart_begins_at_the_bound_where_the_messages_ended(seed: int):
    problem = random_problem(seed)
    start = Start(KnownMessages(), (), [PLAIN] * len(problem.rows))
    first = start.messages(problem)
    for _ in range(8):
        first.forward()
        first.backward()
    start.keep(start.now(first))
    assert not first.restarted
    again = start.messages(problem)
    again.forward()
    assert again.restarted
    assert again.backward() >= first.last - 1e-9


@given(st.integers(0, 10**6), st.integers(-2, 2))
@settings(max_examples=examples(100))
def test_a_search_ends_once_nothing_can_be_as_cheap_as_asked(seed: int, more: int):
    """Given what to be cheaper than, a search finds what it would without, or says that nothing is."""
    problem = random_problem(seed)
    least = min(total(problem, choice) for choice in choices(problem))
    most = least + more
    start = Start(KnownMessages(), (), [PLAIN] * len(problem.rows))
    with limited(whole_entries=0, pruned_entries=2):
        seconds, rows, bound = minimum(random_problem(seed), Memo(), start, most)
    assert bound <= least + 1e-9
    assert seconds == pytest.approx(total(problem, tuple(rows)))
    assert bound >= most - 1e-9 or seconds <= least * 1.001 + 1e-9


def test_a_search_that_asks_for_less_makes_fewer_passes(monkeypatch: pytest.MonkeyPatch):
    passes: list[float] = []
    backward = Messages.backward

    def counted(self: Messages, known: float = np.inf) -> float:
        passes.append(backward(self, known))
        return passes[-1]

    monkeypatch.setattr(Messages, "backward", counted)

    def made(most: float) -> int:
        passes.clear()
        for seed in range(30):
            problem = random_problem(seed)
            with limited(whole_entries=0, pruned_entries=2, close=0.0):
                minimum(problem, Memo(), Start(KnownMessages(), (), [PLAIN] * len(problem.rows)), most)
        return len(passes)

    assert made(-np.inf) <= 30 < made(np.inf)
    assert made(1e9) == made(np.inf)


def test_messages_of_other_edges_are_no_start():
    known = KnownMessages()
    problem, other = (random_problem(seed) for seed in (3, 5))
    assert [edge.source for edge in problem.edges] != [edge.source for edge in other.edges]
    first = Start(known, (), [PLAIN] * len(problem.rows))
    first.keep(first.now(first.messages(problem)))
    assert not Start(known, (), [PLAIN] * len(other.rows)).messages(other).restarted


def test_the_oldest_messages_are_dropped():
    known = KnownMessages()
    starts = [Start(known, (key,), [PLAIN] * 5) for key in range(3)]
    with limited(known_messages=1):
        for start in starts:
            start.keep(start.now(start.messages(random_problem(3))))
            assert start.messages(random_problem(3)).restarted
    assert [start.messages(random_problem(3)).restarted for start in starts] == [False, False, True]


def test_rows_of_a_relay_with_other_layouts_tracked():
    def moved(*tracked: int) -> Moved:
        return Moved(tracked, np.array([*product(range(3), repeat=len(tracked))]).reshape(-1, len(tracked)))

    rows = np.arange(2 * 9)
    assert PLAIN.rows_before(np.arange(2), moved(4)).tolist() == [0, 3], "not brought there"
    assert moved(4).rows_before(np.arange(6), PLAIN).tolist() == [0, 0, 0, 1, 1, 1]
    assert moved(4, 7).rows_before(rows, moved(7)).tolist() == [*[0, 1, 2] * 3, *[3, 4, 5] * 3]
    assert moved(4, 7).rows_before(rows, moved(7, 4)).tolist()[:9] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Messages]]:
    """The messages of each pass forward, in order."""
    made: list[Messages] = []
    forward = Messages.forward

    def counted(self: Messages, known: float = np.inf) -> float:
        made.append(self)
        return forward(self, known)

    monkeypatch.setattr(Messages, "forward", counted)
    with limited(whole_entries=0, pruned_entries=20_000):
        yield made


@pytest.mark.parametrize("model", ["nmt,steps=3,batch=8", "lstm_stack,layers=2,steps=3,batch=8"])
def test_searches_of_one_graph_take_fewer_passes_and_find_the_same(model: str, passes: list[Messages]):
    graph, spaces = from_text(model), Spaces(MACHINE)

    def search(solver: Solver, prices: list[Price]) -> list[float]:
        found = [solver.with_price(price).solve(graph) for price in prices]
        assert all(plan.bound == plan.seconds for plan in found)
        return [plan.seconds for plan in found]

    prices = [Price(hidden=part) for part in (0.0, 0.15, 0.3, 0.5)]
    kept = search(Solver(spaces, Optimizer()), prices)
    restarted = len(passes)
    fresh = [search(Solver(spaces, Optimizer()), [price])[0] for price in prices]
    assert restarted < len(passes) - restarted
    assert kept == pytest.approx(fresh, rel=1e-12)


def test_shared_moves_start_from_the_plan_without(passes: list[Messages]):
    graph = from_text("lstm_stack,layers=2,steps=3,batch=8")
    solver = Solver(Spaces(MACHINE), Optimizer())
    plan = solver.solve(graph)
    first = set(passes)
    found = with_shared_moves(solver, graph, plan)
    assert len(set(passes)) > len(first)
    assert all(messages.restarted for messages in passes if messages not in first)
    tracked = SharedFactorGraphBuilder(Solver(Spaces(MACHINE), Optimizer()), graph).solve()
    assert found.bound >= tracked.bound * (1 - 1e-9)


@pytest.mark.parametrize("tracked", [((), (1, 6)), ((1, 6), ()), ((1, 6), (9, 1))])
def test_a_restart_with_other_layouts_tracked_begins_near_the_bound(tracked: tuple[tuple[int, ...], tuple[int, ...]]):
    graph = from_text("rnntc,steps=3,batch=8")
    solver = Solver(Spaces(MACHINE), Optimizer())
    plain = SharedFactorGraphBuilder(solver, graph)
    values = [value for value in plain.uses if plain.may_share(value)]
    builders = [SharedFactorGraphBuilder(solver, graph, dict.fromkeys(values, of) if of else {}) for of in tracked]
    first = builders[0].start().messages(builders[0].problem())
    for _ in range(6):
        first.forward()
        first.backward()
    builders[0].start().keep(builders[0].start().now(first))
    again = builders[1].start().messages(builders[1].problem())
    assert again.restarted
    assert again.forward() >= first.last * (1 - 1e-9)


TRANSFORMER = "llama3_8b,batch=2,layers=8,hidden=32,heads=4,kv_heads=2,intermediate=64,vocabulary=64,sequence=16"


def test_each_node_of_a_long_graph_has_one_of_the_shorter_that_does_the_same():
    graph = from_text(TRANSFORMER)
    with limited(rewritten_operators=10, rewritten_layers=3):
        short = shorter(graph)
    assert short is not None
    assert set(short.of) == set(graph.nodes())
    assert set(short.of.values()) == set(short.graph.nodes())
    for node, stands in short.of.items():
        assert (stands.op, stands.types) == (node.op, node.types)
        assert stands.is_leaf or stands.attributes == node.attributes
        assert [value.type for value in node.operands] == [value.type for value in stands.operands]
    assert shorter(graph) is None, "few operators"


def test_a_long_graph_starts_where_a_shorter_one_ends(passes: list[Messages]):
    """One pass over the whole graph then proves the optimum, which takes two from zero."""
    graph, solver = from_text(TRANSFORMER), Solver(Spaces(MACHINE), Optimizer()).with_price(Price(1.0, 1e-9))
    alone = solver.solve(graph)
    assert alone.bound == alone.seconds
    builder = FactorGraphBuilder(solver, graph)
    zero = Start(KnownMessages(), (), builder.start().moved).messages(builder.problem())
    assert zero.forward() < 0.95 * alone.seconds
    passes.clear()
    with limited(rewritten_operators=10, rewritten_layers=3):
        start = builder.start().messages(builder.problem())
    assert start.forward() == pytest.approx(alone.seconds, rel=1e-9)
    assert {len(messages.problem.edges) < len(builder.edges) for messages in passes[:-1]} == {True}
