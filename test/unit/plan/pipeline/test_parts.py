"""Instructions of a step in stages are put into the part that runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from staged import cut, staged

from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.micro_batches import in_micro_batches, micro_batch
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute, Leaf, ReshardMove, TimeStep
from unity_ir.plan.pipeline.parts import StepPart
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.plan.scheduled import Wait
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.run import run
from unity_ir.simulate.stages import simulate_stages

TEXT = "gpt2,layers=2,hidden=8,heads=2,vocabulary=512,sequence=16,batch=8"


@cache
def on() -> Machine:
    return load("box:2")


def step(pieces: int, stage_of: dict[Node, int] | None = None) -> Graph:
    """Two stages of GPT-2, in 4 micro-batches, with its loss in pieces."""
    serial = from_text(TEXT)
    dims = sample_dims(serial)
    plan = replace(of_micro_batch(), loss_pieces=pieces)
    placed = staged(plan, Pipeline("zb-h1", 2), on(), stage_of)
    return in_micro_batches(placed, dims, 4)


@cache
def of_micro_batch() -> Graph:
    serial = from_text(TEXT)
    return run(micro_batch(serial, sample_dims(serial), 4), load("box:1"), "data-parallel", Optimizer("adam")).graph


def planned(pieces: int, stage_of: dict[Node, int] | None = None) -> Plan:
    return plan_graph(step(pieces, stage_of), on(), Optimizer("adam"))


def operators(part: StepPart) -> list[str]:
    return [i.operator for i in part.program.body if isinstance(i, Compute)]


def parts(plan: Plan) -> dict[str, StepPart]:
    assert plan.pipeline is not None
    return {part.name: part for part in plan.pipeline.parts}


def test_all_of_a_loss_in_pieces_is_in_one_forward():
    """The forward hands on the gradient of the head's input, and adds up that of the head's weight itself."""
    whole, pieces = parts(planned(1)), parts(planned(4))
    assert "cross_entropy_saved_grad" in operators(whole["1I"])
    assert "cross_entropy_saved_grad" in operators(pieces["1F"])
    assert not any("cross_entropy" in each for name in ("0F", "1I", "1W") for each in operators(pieces[name]))
    made = {r for r in pieces["1F"].program.outputs if pieces["1F"].program.tensors[r].shape == (512, 8)}
    steps = {i.result for i in pieces["1F"].program.body if isinstance(i, TimeStep) and not i.is_of_pieces}
    assert made
    assert made <= steps
    given = {i.result for name in ("1I", "1W") for i in pieces[name].program.body if isinstance(i, Leaf)}
    assert given.isdisjoint(made)


@pytest.mark.slow
def test_a_rank_never_holds_the_logits_of_more_than_a_piece():
    whole, pieces = (simulate_stages(planned(count), on()) for count in (1, 16))
    logits = 2 * 16 * 512 * 4
    assert whole.inside["1F"] > logits > pieces.inside["1F"]
    # The gradient of the hidden state instead of the state, and of the logits nothing.
    assert whole.kept["1F"] - pieces.kept["1F"] >= logits


def cut_at_the_loss() -> dict[Node, int]:
    return {node: int(node.op == "cross_entropy") for node in cut(of_micro_batch(), 2)}


def test_a_head_is_in_the_stage_of_the_loss_if_that_is_in_pieces():
    at = {pieces: parts(planned(pieces, cut_at_the_loss()))["1F"] for pieces in (1, 2)}
    assert [any("matmul_nt" in each for each in operators(part)) for part in at.values()] == [False, True]


def test_a_piece_that_goes_from_stage_to_stage_is_refused():
    placed = replace(staged(of_micro_batch(), Pipeline("1f1b", 2), on(), cut_at_the_loss()), loss_pieces=2)
    with pytest.raises(UnityError, match="in pieces of which each goes from stage to stage; put the last product"):
        plan_graph(in_micro_batches(placed, sample_dims(from_text(TEXT)), 4), on(), Optimizer("adam"))


@pytest.mark.slow
def test_a_stage_makes_weights_gradients_while_it_would_wait_for_others():
    """In a backward whose kernels are divided, as in a step without stages."""
    on, options = load("box:4"), {"tp": 2}
    placed = run(from_text(TEXT), on, "degrees", Optimizer("adam"), options, micro_batches=4, stages=Stages(2)).graph
    (backward,) = (own for part, own in plan_graph(placed, on, Optimizer("adam")).parts if part.name == "0B")
    actions = [line.action for line in backward.schedule.lines]
    begins = {a.result: i for i, a in enumerate(actions) if isinstance(a, ReshardMove)}
    waits = [(i, a.registers[0]) for i, a in enumerate(actions) if isinstance(a, Wait)]
    beside = [[a.operator for a in actions[begins[r] : i] if isinstance(a, Compute)] for i, r in waits]
    assert len(beside) == 2
    assert all("matmul_tn" in each for each in beside)
