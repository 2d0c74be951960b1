"""Plans that fit: what they hold, that none is missed, and how far from the best they may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from extent import examples
from graphs import boxes, random_graph, with_memory
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pinned import pinned
from small import given as given_value
from small import op, small, whole

from unity_ir.cost.plan import PlanCost, cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import Node, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept, with_recompute
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.plan import plan_graph
from unity_ir.rules.derivation import replay
from unity_ir.search import run
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.bounds.axis_counts import Bounds, KnownPlan, bound_within
from unity_ir.search.choose.candidates import Candidate
from unity_ir.search.choose.winner import Unbounded, choosing
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.recompute import may_recompute
from unity_ir.search.exact.shared_moves import has_shared_moves, least_cost_bound
from unity_ir.search.exact.solver import Solver
from unity_ir.search.joint.best_first import joint
from unity_ir.search.layouts.objective import SPACE, Price
from unity_ir.search.layouts.space import FREE_MOVE, Spaces
from unity_ir.search.memory.lagrangian import (
    FittingPlan,
    LagrangianCurve,
    NothingFits,
    Refused,
    Solvers,
    fitting,
    needed,
    peak_upper_bound,
)
from unity_ir.search.memory.seconds_and_bytes import Choice, CostModel
from unity_ir.search.recompute.priced import LayoutsWithRecompute
from unity_ir.search.result import SearchResult
from unity_ir.simulate.report import as_emitted

OPTIMIZERS = (Optimizer(), Optimizer("adam"))
TWO, FOUR = boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6)


def chosen_at_random(model: CostModel, random: Random) -> Choice:
    return tuple(random.choice(np.flatnonzero(np.isfinite(s)).tolist()) for s in model.seconds)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(OPTIMIZERS))
@settings(max_examples=60)
def test_any_choice_takes_the_time_and_bytes_the_ledger_says(seed: int, optimizer: Optimizer):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 7), dims=(2, 4, 6, 12))
    solver = Solver(Spaces(FOUR), optimizer)
    model = CostModel(solver, graph)
    choice = chosen_at_random(model, random)
    plan = model.plan(choice, 0.0)
    assert model.choice(plan) == choice
    priced = cost(realise(graph, plan, solver), FOUR, optimizer)
    seconds, bytes = model.costs(choice)
    assert priced.memory_bytes == bytes
    assert priced.time == pytest.approx(seconds, abs=1e-9)


def worth(price: Price, costs: tuple[float, float]) -> float:
    return price.second * costs[0] + price.byte * costs[1]


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0, 1), st.sampled_from(OPTIMIZERS))
@settings(max_examples=60)
@example(5287, 1.0, Optimizer())
def test_prices_are_minimised(seed: int, part: float, optimizer: Optimizer):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 6), dims=(2, 4, 6, 12))
    solver = Solver(Spaces(FOUR), optimizer)
    model = CostModel(solver, graph)
    for price in (SPACE, Price(1.0, part * 1e-8)):
        found, least = solver.with_price(price).solve(graph), least_cost_bound(solver.with_price(price), graph)
        choice, other = model.choice(found), chosen_at_random(model, random)
        # Each user pays for its moves; what is charged once for several that share one is bounded apart.
        assert worth(price, model.charged(choice)) == pytest.approx(found.seconds)
        assert worth(price, model.charged(other)) >= found.seconds * (1 - 1e-9)
        for each in (choice, other):
            assert worth(price, model.costs(each)) >= least * (1 - 1e-9)
        if not has_shared_moves(graph):
            assert least == pytest.approx(found.seconds)
            assert worth(price, model.costs(choice)) == pytest.approx(found.seconds)
            assert worth(price, model.costs(other)) >= found.seconds * (1 - 1e-9)


def choices(model: CostModel) -> list[list[int]]:
    """The rows of every variable that may be chosen."""
    return [np.flatnonzero(np.isfinite(s)).tolist() for s in model.seconds]


def tried(model: CostModel) -> list[tuple[float, float]]:
    """Seconds and bytes of every choice."""
    rows = choices(model)
    assume(np.prod([float(len(r)) for r in rows]) < 5000)
    return [model.costs(choice) for choice in product(*rows)]


@given(st.integers(0, 10**6), st.floats(-2, 1))
@settings(max_examples=examples(25))
def test_no_choice_is_below_the_bound_at_a_price(seed: int, power: float):
    """Least is known: everything is tried. Of a value that several operators read, an output keeps bytes, too."""
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 2), dims=(2, 4))
    several = [v for v, uses in graph.users().items() if len(uses) > 1]
    if several and random.random() < 0.7:
        outputs = dict.fromkeys((*graph.outputs, random.choice(several)))
        graph = replace(graph, outputs=tuple(outputs))
    solver = Solver(Spaces(TWO), OPTIMIZERS[seed % 2])
    every = tried(CostModel(solver, graph))
    (fast, _), (slow, _) = min(every), max(every)
    low, high = min(b for _, b in every), max(b for _, b in every)
    price = Price(1.0, (slow - fast) / max(1.0, high - low) * 10**power)
    least = min(worth(price, costs) for costs in every)
    assert least_cost_bound(solver.with_price(price), graph) <= least * (1 + 1e-9)
    if not has_shared_moves(graph):
        assert solver.with_price(price).solve(graph).seconds == pytest.approx(least)


@pytest.mark.parametrize("byte", [1e-13, 1e-12, 1e-11, 1e-10])
def test_two_users_of_an_output_may_share_a_move_at_a_price_of_bytes(byte: float):
    """An output that is brought to both is kept there, too; a copy for the two, which no backward reads, is not."""
    machine, optimizer, price = boxes(2, overhead=1e-9, bandwidth=1e12), Optimizer(), Price(1.0, byte)
    x = op("cumsum", given_value("x", 12, 24), dim=1)
    graph = whole(op("cumsum", x, dim=0), op("reduce_max", x, dim=0), x)
    solver = Solver(Spaces(machine), optimizer)
    model = CostModel(solver, graph)
    best = min(product(*choices(model)), key=lambda c: worth(price, model.costs(c)))
    priced = cost(realise(graph, model.plan(best, 0.0), solver), machine, optimizer)
    least = worth(price, (priced.time, priced.memory_bytes))
    assert has_shared_moves(graph)
    assert solver.with_price(price).solve(graph).seconds > least * 1.001
    assert least_cost_bound(solver.with_price(price), graph) <= least * (1 + 1e-9) + FREE_MOVE * 12 * len(graph.nodes())


@given(st.integers(0, 10**6), st.floats(-0.1, 1.05))
@settings(max_examples=examples(25))
def test_something_is_found_if_anything_fits_and_the_bound_holds(seed: int, part: float):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 2), dims=(2, 4))
    solver = Solver(Spaces(TWO), OPTIMIZERS[seed % 2])
    every = tried(CostModel(solver, graph))
    smallest, fastest = min(b for _, b in every), min(every)
    limit = smallest + part * (fastest[1] - smallest)
    fit = [s for s, b in every if b <= limit]
    if not fit:
        with pytest.raises(NothingFits) as refused:
            fitting(solver, graph, limit)
        assert refused.value.bytes == smallest
        return
    found = fitting(solver, graph, limit)
    assert found.bytes <= limit
    best, bound = min(fit), found.bound(limit)
    assert bound <= best * (1 + 1e-9)
    assert best <= found.plan.seconds * (1 + 1e-9)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(0, 1.2))
@settings(max_examples=examples(15))
def test_what_is_returned_fits(seed: int, part: float):
    random = Random(seed)
    graph = random_graph(random, random.randint(2, 7), dims=(2, 4, 6, 12))
    optimizer = OPTIMIZERS[seed % 2]
    free = run(graph, FOUR, optimizer=optimizer)
    machine = with_memory(FOUR, part * free.cost.memory_bytes)
    try:
        found = run(graph, machine, optimizer=optimizer)
    except UnityError:
        # Even what needs least of what was tried is too much; so then is the fastest.
        assert needed(free.graph, cost(free.graph, machine, optimizer), optimizer) > machine.device.usable
        return
    assert found.cost.memory_bytes <= machine.device.usable
    assert needed(found.graph, cost(found.graph, machine, optimizer), optimizer) <= machine.device.usable
    assert found.bound is not None
    # The sums of plans with everything on all devices.
    assert (free.proved or free.cost).time <= (found.proved or found.cost).time + 1e-9
    assert found.bound <= found.cost.time + 1e-9
    assert erase(found.graph).outputs == replay(graph, found.derivation).outputs
    assert differentiate(found.graph, optimizer, machine.mesh).updates


@given(st.integers(0, 10**6), st.floats(0, 0.9), st.sampled_from([boxes(4, 2, overhead=1e-6), FOUR]))
@settings(max_examples=examples(12))
def test_no_plan_that_fits_is_below_the_bound_over_counted_axes(seed: int, part: float, machine: Machine):
    size = 1 + seed % 3
    graph = small(seed, size) if seed % 2 else random_graph(Random(seed), size, dims=(2, 4, 6, 12))
    solver = Solver(Spaces(machine), OPTIMIZERS[seed // 2 % 2])
    curve = LagrangianCurve(Solvers(solver), graph)
    smallest, fastest = curve.bytes(curve.smallest), curve.bytes(curve.fastest)
    limit = smallest + part * (fastest - smallest)
    found = fitting(solver, graph, limit)
    assume(found.price > 0)
    priced = cost(realise(graph, found.plan, solver), machine, solver.optimizer)
    known = KnownPlan(graph, priced.time, priced.memory_bytes, found.price)
    bound = bound_within(known, Bounds(machine, solver.optimizer), limit)
    assert bound <= found.bound(limit) * (1 + 1e-9)
    assert bound <= priced.time


def need_of(graph: Graph, machine: Machine, optimizer: Optimizer) -> int:
    """Bytes a plan needs, simulated whatever it holds."""
    priced = cost(graph, machine, optimizer)
    return max(priced.memory_bytes, as_emitted(graph, priced.machine, optimizer)[1])


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(OPTIMIZERS), st.booleans())
@example(seed=77511, optimizer=Optimizer(), on_parts=True)  # Between its moves a tensor is held that no operator reads.
@example(
    seed=78975, optimizer=Optimizer("adam"), on_parts=False
)  # One value is read twice, so that it has three gradients.
@settings(max_examples=60)
def test_no_peak_is_above_all_at_once(seed: int, optimizer: Optimizer, on_parts: bool):
    size = 1 + seed % 5
    graph = small(seed, size) if seed % 2 else random_graph(Random(seed), size, dims=(2, 4, 6, 12))
    plan, machine = pinned(graph, seed) if on_parts else (sample(graph, FOUR, seed), FOUR)
    priced = cost(plan, machine, optimizer)
    assert need_of(plan, machine, optimizer) <= peak_upper_bound(plan, priced, optimizer)


def test_replicas_of_either_role_are_sent_once():
    """The forward reads a value as copies on one axis and repeated on another, the backward the other way round."""
    plan, machine = pinned(small(77511, 2), 77511)
    assert plan_graph(plan, machine, Optimizer()).collectives == 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", [9, 15, 57, 69])
def test_the_peak_fits_where_it_is_above_what_is_held_twice(seed: int):
    """What the backward does not read counts at the peak, too."""
    graph = small(seed, 3)
    free = run(graph, FOUR)
    need = need_of(free.graph, FOUR, Optimizer())
    try:
        found = run(graph, with_memory(FOUR, need - 1))
    except UnityError:
        return
    assert need_of(found.graph, FOUR, Optimizer()) < need


def smallest_at_random(graph: Graph, machine: Machine, optimizer: Optimizer, random: Random, tries: int) -> int:
    """The least need of plans drawn at random, then of what random changes of one row make of the smallest."""
    solver = Solver(Spaces(machine), optimizer)
    model = CostModel(solver, graph)
    best = chosen_at_random(model, random)
    least = need_of(realise(graph, model.plan(best, 0.0), solver), machine, optimizer)
    for i in range(tries):
        choice = list(chosen_at_random(model, random))
        if i > tries // 6:
            v = random.randrange(len(best))
            choice = [*best[:v], choice[v], *best[v + 1 :]]
        if model.costs(tuple(choice))[1] > least:
            continue
        found = need_of(realise(graph, model.plan(tuple(choice), 0.0), solver), machine, optimizer)
        if found <= least:
            best, least = tuple(choice), found
    return least


@pytest.mark.zoo
@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from([TWO, FOUR]), st.sampled_from(OPTIMIZERS), st.booleans())
@settings(max_examples=examples(3))
@example(14, FOUR, Optimizer("adam"), True)
@example(26, FOUR, Optimizer(), True)
def test_no_plan_is_missed_near_the_least_that_plans_need(
    seed: int, machine: Machine, optimizer: Optimizer, grown: bool
):
    size = 1 + seed % 5
    graph = random_graph(Random(seed), size, dims=(2, 4, 6, 12)) if grown else small(seed, min(size, 4))
    least = smallest_at_random(graph, machine, optimizer, Random(seed), 120)
    found = run(graph, with_memory(machine, least), optimizer=optimizer)
    assert need_of(found.graph, machine, optimizer) <= least


@pytest.mark.slow
def test_plans_by_hand_are_tried_before_it_is_said_that_none_fits(monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise Refused("search: no plan fits: it is said")

    free = run(wide(), FOUR, "fsdp")
    monkeypatch.setattr("unity_ir.search.strategies.joint.joint_within", refuses)
    found = run(wide(), with_memory(FOUR, need_of(free.graph, FOUR, Optimizer())))
    assert found.cost.time <= free.cost.time
    assert found.bound is not None
    assert 0 < found.bound <= found.cost.time
    with pytest.raises(UnityError, match=r"^search: no plan fits: it is said$"):
        run(wide(), with_memory(FOUR, 1000))


@pytest.mark.slow
def test_weights_are_gathered_again_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise Refused("search: no plan fits: it is said")

    graph = build("mlp", batch=8, hidden=2048, layers=12, classes=2048)
    plans = {name: run(graph, FOUR, name).graph for name in ("fsdp", "zero3")}
    needs = {name: need_of(plan, FOUR, Optimizer()) for name, plan in plans.items()}
    assert needs["zero3"] < needs["fsdp"]
    monkeypatch.setattr("unity_ir.search.strategies.joint.joint_within", refuses)
    monkeypatch.setattr("unity_ir.search.choose.candidates.USUAL", ("data-parallel", "fsdp"))
    monkeypatch.setattr("unity_ir.search.choose.candidates.with_recompute_and_pieces", lambda plan, *_, **__: plan)
    monkeypatch.setattr("unity_ir.search.choose.winner.Chooser._recomputed", lambda *_: [])
    found = run(graph, with_memory(FOUR, needs["zero3"]))
    assert found.graph == plans["zero3"]
    assert found.bound is not None
    assert found.bound <= found.cost.time
    slower = run(graph, with_memory(FOUR, needs["zero3"]), known=1e-9)
    assert (slower.graph, slower.bound) == (found.graph, None), "no bound of a plan that is not given"
    with pytest.raises(UnityError, match=r"^search: no plan fits"):
        run(graph, with_memory(FOUR, needs["zero3"] - 1))


@pytest.mark.parametrize(("more", "faster"), [(1.01, True), (1.5, False)])
def test_layouts_of_about_equal_sums_are_compared_as_emitted(
    more: float, faster: bool, monkeypatch: pytest.MonkeyPatch
):
    """The graph whose plan sums fewer seconds may have the slower step as emitted."""
    graph, optimizer = build("mlp", batch=512, hidden=512, layers=4, classes=512), Optimizer()
    plans = [run(graph, FOUR, name).graph for name in ("fsdp", "data-parallel", "expert")]
    fast, *_, slow = sorted(plans, key=lambda plan: as_emitted(plan, FOUR, optimizer)[0])
    assert as_emitted(fast, FOUR, optimizer)[0] < as_emitted(slow, FOUR, optimizer)[0]
    found = joint(graph, FOUR, (), optimizer)
    tried = [
        LayoutsWithRecompute(replace(found, graph=plan), 0.0, least, (plan,))
        for plan, least in ((slow, 1.0), (fast, more))
    ]
    monkeypatch.setattr("unity_ir.search.choose.winner.layouts_with_recompute", lambda *_: iter(tried))
    now = SearchResult("joint", slow, cost(slow, FOUR, optimizer))
    with choosing("joint", graph, FOUR, optimizer) as chooser:
        chosen = chooser.with_recompute(Unbounded.as_is(now), found).result
    assert chosen.graph == (fast if faster else slow)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(-11, -7), st.sampled_from([TWO, FOUR, boxes(4, 2, overhead=1e-6)]))
@settings(max_examples=examples(40))
def test_no_plan_with_recompute_is_below_the_bound(seed: int, power: float, machine: Machine):
    """Whatever is computed and gathered again, in the layouts that are best if all may be."""
    random = Random(seed)
    graph = random_graph(random, random.randint(2, 6), dims=(2, 4, 8))
    optimizer, price = OPTIMIZERS[seed % 2], Price(1.0, 10**power, again=True)
    solver = Solver(Spaces(machine), optimizer)
    least = least_cost_bound(solver.with_price(price), graph)
    placed = realise(graph, solver.with_price(price).solve(graph), solver)
    compute = [n for n in placed.nodes() if n.is_compute]
    weights = {n for n in placed.nodes() if n.op == "weight"}
    found: list[tuple[float, PlanCost]] = []
    for part in (0.0, 1.0, *(random.random() for _ in range(8))):
        again = {n for n in compute if random.random() < part}
        for moved in (set[Node](), weights):
            priced = cost(with_recompute(placed, again, moved), machine, optimizer)
            found.append((priced.time + price.byte * priced.memory_bytes, priced))
    best, priced = min(found, key=lambda each: each[0])
    free = FREE_MOVE * 12 * len(graph.nodes())
    assert least <= best * (1 + 1e-9) + free
    known = KnownPlan(graph, priced.time, priced.memory_bytes, price.byte, again=True)
    assert bound_within(known, Bounds(machine, optimizer), priced.memory_bytes) <= priced.time * (1 + 1e-9) + free


def test_a_baseline_of_the_graph_before_rewrites_may_be_outside_of_bounds():
    """ZeRO-3 may be the only one that fits: then there is no plan of a lesser sum to set beside the bound."""
    graph, optimizer = build("mlp", batch=8, hidden=256, layers=3, classes=16), Optimizer()
    free = run(graph, FOUR)
    plan = run(graph, FOUR, "zero3")
    emitted = as_emitted(free.graph, FOUR, optimizer)[0]
    candidate = Candidate(plan.graph, "zero3", plan.cost.time, emitted / 2, True, plan.cost.memory_bytes)
    with choosing("joint", graph, FOUR, optimizer) as chooser:
        found = chooser.with_unrewritten(Unbounded.as_is(free), [candidate]).bounded()
    assert found.graph == plan.graph
    assert found.bound is not None
    assert found.bound <= plan.cost.time


def wide() -> Graph:
    """A weight that is fastest copied to every device, and a long batch."""
    x = leaf("input", tensor_type((4096, 64), "f32"), name="x")
    w, v = (leaf("weight", tensor_type(s, "f32"), name=n).result for n, s in [("w", (64, 64)), ("v", (64, 64))])
    h = apply("gelu", [apply("matmul", [x.result, w]).result]).result
    y = apply("gelu", [apply("matmul", [h, v]).result]).result
    return Graph("wide", (x,), (apply("reduce_sum", [y], {"dim": 0, "count": 2}).result,))


def test_activations_are_computed_again_only_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    # Of the plans by hand one fits without.
    monkeypatch.setattr("unity_ir.search.choose.candidates.USUAL", ())
    monkeypatch.setattr("unity_ir.search.choose.candidates.QUICK", ())
    free = run(wide(), FOUR)
    assert not not_kept(free.graph)
    short = run(wide(), with_memory(FOUR, 0.55 * free.cost.memory_bytes))
    assert not_kept(short.graph)
    assert free.cost.time < short.cost.time
    assert short.gap is not None
    assert short.gap < 0.5


def test_the_optimizer_decides_what_fits():
    w = leaf("weight", tensor_type((256, 256), "f32"), name="w").result
    x = leaf("input", tensor_type((4, 256), "f32"), name="x")
    graph = Graph(
        "g", (x,), (apply("reduce_sum", [apply("matmul", [x.result, w]).result], {"dim": 0, "count": 2}).result,)
    )
    machine = with_memory(FOUR, 200_000)
    assert run(graph, machine).cost.memory["weights"] <= 256 * 256 * 4 / 2
    said = (
        r"^search: no plan fits: the smallest known, that of \w+, needs 267\.27 kB per device, .* takes 0\.\d+ ms; "
        r"weights, .* "
        r"state alone, in equal parts, take 262\.14 kB; use more devices or a smaller model$"
    )
    with pytest.raises(UnityError, match=said):
        run(graph, machine, optimizer=Optimizer("adam"))
    said = r"^search: no plan fits: the smallest known, that of expert, needs 267\.27 kB .* smaller batch$"
    with pytest.raises(UnityError, match=said):
        run(graph, with_memory(FOUR, 262_500), optimizer=Optimizer("adam"))
    found = run(graph, with_memory(FOUR, 400_000), optimizer=Optimizer("adam"))
    # In quarters: the weight, its gradient and two tensors of Adam's.
    assert found.cost.memory["optimizer state"] == 2 * 256 * 256 * 4 / 4
    assert found.graph.optimizer == Optimizer("adam")


def test_chains_that_are_computed_again_are_short():
    x = leaf("input", tensor_type((64, 64), "f32"), name="x")
    value = apply("matmul", [x.result, leaf("weight", tensor_type((64, 64), "f32"), name="w").result]).result
    for _ in range(40):
        value = apply("gelu", [value]).result
    graph = Graph("chain", (x,), (apply("reduce_sum", [value], {"dim": 0, "count": 2}).result,))
    may = may_recompute(graph)
    longest = run_length = 0
    for node in graph.nodes():
        run_length = run_length + 1 if node in may else 0
        longest = max(longest, run_length)
    assert 1 < longest <= 6
    assert not may_recompute(Graph("part", (x,), (value,)))
    assert isinstance(fitting(Solver(Spaces(TWO), Optimizer()), graph, 1e9), FittingPlan)
