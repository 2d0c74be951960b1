"""Pipelines are looked for first where plans without stages recompute much; these are left out if all are slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
from graphs import boxes, with_memory

from unity_ir.budget import Budget, OutOfBudget, spend, work_done
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.graph import erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run, with_stages
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.recompute.least import least_unstaged
from unity_ir.search.with_stages import run_with_stages

GPT2 = from_text("gpt2,batch=8,sequence=64,layers=3,hidden=64,heads=4,vocabulary=64")
DEEP = from_text("gpt2,batch=8,sequence=64,layers=6,hidden=64,heads=4,vocabulary=16")
OPTIMIZER = Optimizer("adamw")


@pytest.mark.slow
def test_no_plan_that_fits_takes_less():
    """On one device, where nothing moves, the bound is near: what does not fit is recomputed, and that counts."""
    machine, graph = load("box:1"), erase(DEEP)
    wide = run(DEEP, machine, "joint", OPTIMIZER)
    least = least_unstaged(graph, machine, OPTIMIZER)
    assert least.seconds == least.kernels <= wide.cost.time
    for share in (0.7, 0.5):
        short = with_memory(machine, int(share * wide.cost.memory_bytes))
        more = run(DEEP, short, "joint", OPTIMIZER).cost.time - wide.cost.time
        least = least_unstaged(graph, short, OPTIMIZER)
        assert 0.5 * more < least.seconds - least.kernels <= more


@pytest.mark.zoo
def test_plans_without_stages_are_left_out_where_all_are_slower(monkeypatch: pytest.MonkeyPatch):
    machine = boxes(2, 2, overhead=1e-9, bandwidth=1e10)
    machine = with_memory(machine, int(0.55 * run(GPT2, machine, "fsdp", OPTIMIZER).cost.memory_bytes))
    monkeypatch.setattr(with_stages, "RECOMPUTES", 1.05)

    def none(*_: object, **__: object) -> NoReturn:
        raise AssertionError("looked for a plan without stages")

    def out_of_budget(*_: object) -> NoReturn:
        raise OutOfBudget

    both = run_with_stages(GPT2, machine, optimizer=OPTIMIZER, stages="auto")
    assert both.graph.pipeline is not None
    monkeypatch.setattr(with_stages, "run", none)
    never, always = float("inf"), 0.0
    for near, far in ((never, never), (always, never), (never, always)):
        monkeypatch.setattr(with_stages, "NEAR", near)
        monkeypatch.setattr(with_stages, "FAR", far)
        if near == far:
            for spent in (False, True):
                with monkeypatch.context() as within:
                    if spent:
                        within.setattr(with_stages, "solve", out_of_budget)
                    with pytest.raises(AssertionError, match="without stages"):
                        run_with_stages(GPT2, machine, optimizer=OPTIMIZER, stages="auto")
        else:
            alone = run_with_stages(GPT2, machine, optimizer=OPTIMIZER, stages="auto")
            assert alone.graph == both.graph


@pytest.mark.parametrize("moves", [0.0, float("inf")])
def test_pipelines_are_looked_for_first_where_plans_without_stages_move_much(
    moves: float, monkeypatch: pytest.MonkeyPatch
):
    """The searches are faked: which comes first is all that counts here."""

    class First(Exception):
        """Names the search that came first."""

    def search(name: str) -> Callable[..., NoReturn]:
        def first(*_: object, **__: object) -> NoReturn:
            raise First(name)

        return first

    monkeypatch.setattr(with_stages, "MOVES", moves)
    monkeypatch.setattr(with_stages._Pipelines, "is_large", True)
    monkeypatch.setattr(with_stages._Pipelines, "faster_than", search("pipelines"))
    monkeypatch.setattr(with_stages, "run", search("without stages"))
    with pytest.raises(First, match="without stages" if moves else "pipelines"):
        run_with_stages(GPT2, boxes(2, 2), optimizer=OPTIMIZER, stages="auto")


@pytest.mark.slow
def test_half_of_the_budget_is_left_to_plans_without_stages(monkeypatch: pytest.MonkeyPatch):
    """If the search for pipelines spends its half of the budget, the plan without stages is still found."""
    machine = boxes(2, 2, overhead=1e-9, bandwidth=1e10)
    graph = from_text("mlp,batch=8,hidden=16,layers=3,classes=4")
    monkeypatch.setattr(with_stages, "RECOMPUTES", 0.0)
    budgets: list[float] = []

    def endless(*_: object) -> NoReturn:
        while True:
            budgets.append(work_done())
            spend(1e9)

    monkeypatch.setattr(with_stages._Pipelines, "_fastest", endless)
    budget = Budget()
    found = run_with_stages(graph, machine, optimizer=OPTIMIZER, stages="auto", budget=budget)
    assert found.graph.pipeline is None
    assert max(budgets) <= budget.work / 2 <= budget.done < budget.work


def test_a_kind_of_recompute_is_not_left_out_of_stages():
    with pytest.raises(UnityError, match="joint finds what to recompute by itself"):
        run_with_stages(GPT2, load("dgx-h100:2"), optimizer=OPTIMIZER, stages=Stages(2), recompute="block")


@pytest.mark.zoo
@pytest.mark.slow
def test_losses_in_pieces_are_not_made_whole_unasked():
    """Pipelines that joint chooses make their loss whole: a number of pieces is kept to, or refused."""
    machine = boxes(2, 2)
    with pytest.raises(
        UnityError, match="joint makes the loss of a pipeline whole, not in 4 pieces; leave loss_pieces"
    ):
        run_with_stages(GPT2, machine, optimizer=OPTIMIZER, loss_pieces="4", stages=Stages(2))
    found = run_with_stages(GPT2, machine, optimizer=OPTIMIZER, loss_pieces="4", stages="auto")
    assert (found.graph.pipeline, found.graph.loss_pieces) == (None, 4)
