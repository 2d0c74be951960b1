"""The search takes the fastest pipeline over numbers of stages and micro-batches, or none if none is fast enough."""

from __future__ import annotations

import pytest
from graphs import boxes, with_memory

from unity_ir.errors import UnityError
from unity_ir.machine import load, part_counts
from unity_ir.models import from_text
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.layouts.limits import limited
from unity_ir.search.pipeline.choice import PipelineChoice, best_pipeline, bound
from unity_ir.search.pipeline.equal import PipelineSearch, pipeline_plan

GPT2 = from_text("gpt2,batch=8,sequence=64,layers=3,hidden=64,heads=4,vocabulary=512")
MACHINE = boxes(2, 2, overhead=1e-6)
OPTIMIZER = Optimizer("adamw")
MEMORY = 3e6
"""Bytes of a device for which the fastest layouts have to recompute."""


@pytest.fixture(scope="module")
def choice() -> PipelineChoice:
    """The pipeline that is chosen of all."""
    found = best_pipeline(PipelineSearch(GPT2, MACHINE, OPTIMIZER))
    assert found is not None
    return found


def test_layouts_that_hold_less_are_solved_for_only_if_the_fastest_are_fast():
    """Slow pairs are estimated by their fastest layouts, fit or not, which take less than what fits."""
    slow, fast = (PipelineSearch(GPT2, with_memory(MACHINE, MEMORY), OPTIMIZER) for _ in range(2))
    least, found = slow.estimate(2, 4, 0.0), fast.estimate(2, 4)
    assert least < found
    assert {price for *_, price, _ in slow._found} == {0.0} < {price for *_, price, _ in fast._found}
    assert slow.estimate(2, 4, 2 * found) == fast.estimate(2, 4, 2 * found) == found


def test_other_groupings_are_tried_only_where_the_first_is_fast():
    """Axes are grouped as if more than one were too many."""
    slow, fast, plain = (PipelineSearch(GPT2, boxes(2, 2, 2, overhead=1e-6), OPTIMIZER) for _ in range(3))
    with limited(exact_axes=1):
        first = slow.estimate(2, 4, astray=0.0)
        assert not slow._solvers
        found = fast.estimate(2, 4, astray=2 * first)
        assert fast._solvers
        assert found == plain.estimate(2, 4) <= first


def test_a_pair_is_expected_once_before_plans_are_made():
    expected: list[tuple[int, int]] = []
    choice = best_pipeline(PipelineSearch(GPT2, MACHINE, OPTIMIZER), micro_batches=2, expecting=expected.append)
    assert choice is not None
    assert len(expected) == 1
    assert expected[0] in choice.tried


@pytest.mark.slow
def test_no_other_pair_is_faster(choice: PipelineChoice):
    every = [(p, m) for p in part_counts(MACHINE)[1:] for m in (2, 4, 8)]
    makespans = {pair: pipeline_plan(GPT2, MACHINE, *pair, None, OPTIMIZER).makespan for pair in every}
    assert choice.plan.makespan <= min(makespans.values()) * 1.02
    assert makespans[choice.plan.stages, choice.plan.micro_batches] == pytest.approx(choice.plan.makespan)
    least, family = bound(choice)
    assert 0 < least <= min(makespans.values())
    assert "one contiguous stage per equal part" in family


@pytest.mark.slow
def test_the_bound_is_of_all_pairs_whichever_were_tried():
    choice = best_pipeline(PipelineSearch(GPT2, MACHINE, OPTIMIZER), parts=2, micro_batches=4)
    assert choice is not None
    each = {(p, m): bound(choice, p, m)[0] for p in part_counts(MACHINE)[1:] for m in (2, 4, 8)}
    assert bound(choice)[0] == min(each.values()) < each[2, 4]


def test_what_is_forced_is_taken():
    choice = best_pipeline(PipelineSearch(GPT2, MACHINE, OPTIMIZER), parts=4, micro_batches=2, schedule=("gpipe", 1))
    assert choice is not None
    plan = choice.plan
    assert (plan.stages, plan.micro_batches, plan.schedule) == (4, 2, "gpipe")
    assert choice.tried == ((4, 2),)


@pytest.mark.slow
def test_a_faster_plan_without_stages_is_kept(choice: PipelineChoice):
    now = choice.plan.makespan
    assert best_pipeline(PipelineSearch(GPT2, MACHINE, OPTIMIZER), faster_than=0.99 * now) is None
    again = best_pipeline(PipelineSearch(GPT2, MACHINE, OPTIMIZER), faster_than=1.01 * now)
    assert again is not None
    assert again.plan.makespan == now


@pytest.mark.parametrize(
    ("machine", "stages", "micro_batches", "said"),
    [
        ("box:4", 3, None, "cannot be divided into 3 parts"),
        ("box:4", 2, 3, "3 do not divide the 8 samples"),
        ("box:1", None, None, "has no equal parts"),
    ],
)
def test_what_cannot_be(machine: str, stages: int | None, micro_batches: int | None, said: str):
    with pytest.raises(UnityError, match=said):
        best_pipeline(PipelineSearch(GPT2, load(machine), OPTIMIZER), stages, micro_batches)
