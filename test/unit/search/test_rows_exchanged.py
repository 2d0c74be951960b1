"""
The exact search prices plans that exchange rows of experts: what it says of its choice is what `cost` says of the plan,
and no plan that exchanges rows takes less than its bound.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import pytest
from graphs import boxes

from unity_ir.cost.kernels import kernel_seconds, seconds_of_update
from unity_ir.cost.plan import cost
from unity_ir.cost.routes import ProductRows, product_rows
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import nodes_with_gradient, training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.instructions import Compute, ReshardMove, UpdateWeight, communicates
from unity_ir.plan.lower import lower
from unity_ir.plan.routes import with_routes
from unity_ir.search.baselines.recipe import Degrees, expert_degrees, recipe
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.shared_moves import least_cost_bound, with_shared_moves, without_free_moves
from unity_ir.search.exact.solver import Solver
from unity_ir.search.layouts.exchanged import exchanging
from unity_ir.search.layouts.space import Spaces

ADAM = Optimizer("adam")
SIZES = {"layers": 1, "batch": 8, "sequence": 64, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96}
MODELS: dict[str, dict[str, int | str]] = {
    "moe": {**SIZES, "dispatch": "sparse", "vocabulary": 64},
    "qwen3_moe": {**SIZES, "head": 16, "experts": 16, "chosen": 4, "vocabulary": 64},
}
LARGE: dict[str, int | str] = {
    **MODELS["moe"],
    **{"batch": 8, "sequence": 512, "hidden": 512, "intermediate": 512, "experts": 32},
}
MACHINES = {
    f"{'x'.join(map(str, sizes))}, {bandwidth:g}": boxes(*sizes, overhead=overhead, bandwidth=bandwidth)
    for sizes in ((2,), (2, 2))
    for overhead, bandwidth in ((1e-9, 1e12), (1e-7, 1e9))
}
"""Machines of each size with fast links, and with links that are slow to start and to send."""


@cache
def graph(model: str) -> Graph:
    return build(model, **MODELS[model])


@cache
def solver_of(machine: str, rows: float) -> Solver:
    with exchanging(rows):
        return Solver(Spaces(MACHINES[machine]), ADAM)


def one_by_one(plan: Graph, machine: Machine) -> float:
    """Return the seconds of a plan's lines as emitted but for groups: every kernel alone, every move waited for."""
    program = with_routes(lower(training_step(plan, ADAM, machine.mesh), machine))
    seconds = 0.0
    for line in program.body:
        if isinstance(line, Compute):
            seconds += kernel_seconds(program, line, machine.device)
        elif isinstance(line, ReshardMove) and communicates(line):
            seconds += machine.move_time(move_of(program, line), program.tensors[line.operand].dtype)
        elif isinstance(line, UpdateWeight):
            seconds += seconds_of_update(program, line, ADAM, machine.device)
    return seconds


def test_gated_experts_send_tokens_there_once_and_bring_results_home():
    found = product_rows(nodes_with_gradient(graph("moe")))
    gate = ProductRows(sharers=2, is_expanded=True, between=0, is_returned=False, products=3)
    down = ProductRows(sharers=0, is_expanded=False, between=2, is_returned=True, products=3)
    assert sorted(found.values(), key=str) == sorted([gate, gate, down], key=str)


@pytest.mark.parametrize("rows", [inf, 1.5])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("machine", MACHINES)
def test_no_plan_that_exchanges_rows_takes_less_than_the_bound(machine: str, model: str, rows: float):
    on, serial = MACHINES[machine], graph(model)
    bound = without_free_moves(least_cost_bound(solver_of(machine, rows), serial), serial, on)
    exchanged = 0
    for ep in expert_degrees(serial, on, ("routed_matmul",)):
        for zero in (0, 2, 3):
            try:
                plan = replace(recipe(serial, on, Degrees(zero=zero, ep=ep)), exchange_rows=rows)
            except UnityError:
                continue
            priced = cost(plan, on, ADAM)
            exchanged += any(reshard.rows for reshard in priced.reshards)
            assert bound <= priced.time
            assert bound <= one_by_one(plan, on)
    assert exchanged


@pytest.mark.slow
@pytest.mark.parametrize("rows", [inf, 1.1])
def test_what_the_search_says_of_its_choice_is_what_the_plan_costs(rows: float):
    """Experts have so many weights here, and links are so slow, that exchanging rows takes least."""
    machine, serial = boxes(2, 2, bandwidth=5e9), build("moe", **LARGE)
    seconds: list[float] = []
    for most in (0.0, rows):
        with exchanging(most):
            solver = Solver(Spaces(machine), ADAM)
        found = with_shared_moves(solver, serial, solver.solve(serial))
        plan = realise(serial, found, solver)
        assert plan.exchange_rows == most
        assert cost(plan, machine, ADAM).time == pytest.approx(found.seconds, rel=1e-6)
        assert found.bound == pytest.approx(found.seconds, rel=1e-3)
        assert without_free_moves(found.bound, serial, machine) <= one_by_one(plan, machine) < 1.1 * found.bound
        seconds.append(found.seconds)
    assert seconds[1] < seconds[0]
