"""Every search ends with its budget, with a plan that holds, the same whenever and wherever it is done."""

import os

import pytest
from extent import sample
from graphs import with_memory

from unity_ir.budget import Budget, OutOfBudget, own_budget, spend, within
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import place
from unity_ir.search import all_strategies, run
from unity_ir.search.bounds.axis_counts import of_kernels
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.result import SearchResult
from unity_ir.search.run import _baselines

SHARES = (0.0, 0.1, 0.6, 0.95)
"""Parts of what a search does without a limit."""


def small(name: str) -> Graph:
    match name:
        case "mlp":
            return build("mlp", batch=16, hidden=64, layers=3, classes=64)
        case "rnntc":
            return build("rnntc", batch=8, steps=3, layers=2, hidden=16, vocabulary=32)
        case _:
            return build(
                "moe",
                batch=4,
                sequence=8,
                layers=1,
                hidden=16,
                heads=2,
                kv_heads=1,
                intermediate=32,
                experts=4,
                vocabulary=32,
            )


def searched(graph: Graph, strategy: str, machine: str, work: float) -> SearchResult:
    options = {"mcmc": {"budget": 300}, "unity": {"budget": 3}}.get(strategy)
    return run(graph, load(machine), strategy, Optimizer(), options, budget=Budget(work))


CASES = [*((s, "mlp") for s in all_strategies()), *((s, m) for s in ("joint", "sequential") for m in ("rnntc", "moe"))]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "model"), sample(CASES, 2))
def test_each_strategy_ends_wherever_its_budget_does(strategy: str, model: str):
    graph = small(model)
    machine = load("box:4")
    whole = searched(graph, strategy, "box:4", 1e12)
    assert whole.budget is not None
    assert not whole.budget.ended
    assert not whole.interrupted
    for share in SHARES:
        found = searched(graph, strategy, "box:4", share * whole.budget.done)
        assert found.budget is not None
        place(found.graph, machine.mesh)
        assert cost(found.graph, machine, Optimizer()).time == pytest.approx(found.cost.time)
        assert needed(found.graph, found.cost, Optimizer()) <= machine.device.usable
        assert found.interrupted == found.budget.ended
        if found.budget.ended and found.bound is not None:
            proved = (found.proved or found.cost).time
            assert 0 < found.bound <= proved * (1 + 1e-9)
        if not found.derivation:
            assert erase(found.graph).outputs[0].type == graph.outputs[0].type


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("work", [1e6, 1e8, 3e8])
def test_the_same_budget_ends_in_the_same_plan(work: float, monkeypatch: pytest.MonkeyPatch):
    """On one processor or several."""
    graph = small("rnntc")
    one = searched(graph, "joint", "summit:4", work)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    other = searched(graph, "joint", "summit:4", work)
    assert one.graph == other.graph
    assert one.bound == other.bound
    assert one.budget is not None
    assert other.budget is not None
    assert one.budget.done == other.budget.done


@pytest.mark.slow
def test_what_is_given_is_no_slower_than_a_baseline_as_emitted():
    graph, machine, optimizer = small("moe"), load("box:4"), Optimizer()
    from unity_ir.simulate.report import as_emitted

    found = searched(graph, "joint", "box:4", 1e7)
    assert found.interrupted
    least = min(as_emitted(plan, machine, optimizer)[0] for plan, _ in _baselines(graph, machine, optimizer))
    assert as_emitted(found.graph, machine, optimizer)[0] <= least * (1 + 1e-5)


def test_a_bound_is_given_however_little_was_done():
    graph = small("mlp")
    found = searched(graph, "joint", "box:4", 0.0)
    assert found.bound is not None
    assert of_kernels(graph, load("box:4"), Optimizer()) <= found.bound <= found.cost.time
    assert found.explored == 1


def test_time_is_a_limit_beside_work():
    found = run(small("moe"), load("box:4"), "joint", budget=Budget.of(seconds=1e-9))
    assert found.interrupted
    assert found.budget is not None
    assert found.budget.ended
    assert found.budget.is_late


def test_memory_is_short_and_nothing_fits():
    machine = load("box:4")
    tiny = with_memory(machine, 1000)
    with pytest.raises(UnityError, match="its budget ended before joint found a plan, and no baseline fits"):
        run(small("mlp"), tiny, "joint", budget=Budget(0.0))


def test_work_beside_a_search_is_not_its_own():
    budget = Budget(100)
    with within(budget):
        with own_budget():
            spend(25)
            with pytest.raises(OutOfBudget):
                spend(1)
        spend(100)
        with pytest.raises(OutOfBudget):
            spend(1)
    spend(1e30)
    assert budget.done == 101
