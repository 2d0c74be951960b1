"""
Programs that make their loss in pieces of the tokens, on ranks: over three steps losses, gradients by name and weights
equal those of the model written by hand in PyTorch, with any number of pieces; and mutants of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from by_hand import differences
from models import machine, masked
from ranks import Ranks, check, trained
from zoo import by_hand as zoo_by_hand
from zoo_plans import SIZES, of_type, planned, program

from unity_ir.dialects.convert_program import from_op, to_op
from unity_ir.errors import UnityError
from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.collectives import BETWEEN_DEVICES
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.forward import forward_of
from unity_ir.plan.instructions import Compute, Instruction, ReshardMove, TimeStep, makes
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program

SGD, ADAMW = Optimizer("sgd", 0.1), Optimizer("adamw", 1e-2, weight_decay=0.1)

CASES = [
    ("gpt2", "data-parallel*8", 1, "f64"),
    ("gpt2", "fsdp*4", 2, "f64"),
    ("gpt2", "degrees,tp=2*2", 2, "f64"),
    ("gpt2", "joint/2*2", 4, "f64"),
    ("llama3_8b", "degrees,zero=3/2*4", 1, "f64"),
    ("llama3_8b", "degrees,tp=2,sp=true/2*4", 2, "f64"),
    ("llama3_8b", "joint*2", 4, "f64"),
    ("llama3_8b", "fsdp/2i*2", 2, "mixed"),
    ("bert_large", "data-parallel/4*2", 1, "f64"),
    ("bert_large", "recompute-5*4", 2, "f64"),
    ("bert_large", "fsdp/2i*4", 4, "f64"),
    ("bert_large", "degrees,tp=2,zero=1*2", 4, "mixed"),
]
"""Models, plans with numbers of pieces (`*4`), some in micro-batches (`/2`), and ranks."""


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world", "dtype"), CASES)
def test_equals_pytorch(ranks: Ranks, model: str, plan: str, world: int, dtype: str):
    torch.set_num_threads(1)
    graph = of_type(build(model, **SIZES[model]), "f32" if dtype == "f64" else dtype)
    optimizer, steps = (SGD, 3) if dtype == "f64" else (ADAMW, 1)
    text = program(graph, plan, world, optimizer, dtype == "f64")
    assert "in loss_pieces(ctx, " in text
    found = ranks.run(text, world, trained, steps, False)[0]
    assert differences(found, partial(zoo_by_hand, model, SIZES[model]), optimizer, dtype) == []


@pytest.mark.slow
def test_equals_pytorch_in_triton(ranks: Ranks):
    text = program(build("gpt2", **SIZES["gpt2"] | {"layers": 1}), "data-parallel*2", 2, SGD, kernels="triton")
    assert ranks.run(text, 2, check, 1) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world"), [("data-parallel*3", 1), ("fsdp*2", 2), ("data-parallel/2*3", 2)])
def test_a_mean_over_some_labels_is_of_those_of_all_pieces(ranks: Ranks, plan: str, world: int):
    """How many there are is counted before the loop: once, or in a loop of its own over micro-batches."""
    graph = masked()
    made = plan_step(planned(graph, plan, world, SGD), PlanOptions(kernels="torch"))
    assert ranks.run(emit(made, graph).text, world, check, 2) == [[]] * world


MUTANTS = {
    "a piece is left out": (r"in loss_pieces\(ctx, 4\)", "in [*loss_pieces(ctx, 4)][1:]"),
    "each piece is the first": (r"return x.chunk\(count, dim\)\[ctx.piece\]", "return x.chunk(count, dim)[0]"),
    "each piece's loss is added as if it were of all": (
        r"accumulated\((\w+), cross_entropy",
        r"accumulated(\1, 4 * cross_entropy",
    ),
    "a piece's gradient is in the place of those before": (r"else total.add_\(x\)", "else x"),
    "the sum of pieces is that of the last": (
        r"else x\) if total is None else",
        "else x) if total is None or last else",
    ),
    "a product replaces those of pieces before": (r"total.addmm_\(a, b\)", "torch.mm(a, b)"),
    "a piece's gradient is elsewhere": (
        r"whole.chunk\(count, dim\)\[ctx.piece\].copy_",
        "whole.chunk(count, dim)[0].copy_",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp*4", "data-parallel/2*4"])
def test_mutants_are_found(ranks: Ranks, plan: str):
    text = program(build("gpt2", **SIZES["gpt2"]), plan, 2, SGD)
    for what, (old, new) in MUTANTS.items():
        wrong, count = re.subn(old, new, text)
        assert count, what
        assert any(ranks.run(wrong, 2, check, 1)), what


def loop(model: str, plan: str, world: int = 2) -> tuple[Program, list[Instruction]]:
    """The program of a plan, and the instructions of its loop over pieces."""
    made = planned(build(model, **SIZES[model]), plan, world, SGD)
    return made, [i for i in made.body if made.is_in_pieces(i)]


def operators(instructions: Iterable[Instruction]) -> list[str]:
    return [i.operator for i in instructions if isinstance(i, Compute)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data-parallel*4", "fsdp*4", "degrees,zero=3*4", "degrees,zero=3/2i*2"])
def test_gradients_are_summed_over_devices_after_the_loop(plan: str):
    made, inside = loop("llama3_8b", plan)
    assert operators(inside) == ["matmul", "cross_entropy", "cross_entropy_grad", "matmul_tn", "matmul_nt"]
    assert not any(isinstance(i, ReshardMove) for i in inside)
    steps = [(i.kind, made.tensors[i.result].shape) for i in inside if isinstance(i, TimeStep)]
    weights = [shape for kind, shape in steps if kind == "accumulate" and shape]
    assert weights == [(16, 16)]
    sums = [i for i in made.body if isinstance(i, ReshardMove) and i.kind in ("all_reduce", "reduce_scatter")]
    assert len(sums) == len(made.leaves("weight"))


def test_a_weight_that_is_gathered_for_the_backward_is_gathered_once_where_both_are_in_the_loop():
    """It is still gathered in every micro-batch, and not kept for the next."""
    whole, pieces = (
        planned(build("llama3_8b", **SIZES["llama3_8b"]), f"degrees,zero=3/2i{p}", 2, SGD) for p in ("", "*2")
    )
    gathers = [[i for i in p.body if isinstance(i, ReshardMove) and i.kind == "all_gather"] for p in (whole, pieces)]
    assert len(gathers[0]) == len(gathers[1]) + 1
    made = plan_step(pieces).schedule
    (read,) = {
        made.held(i.operand)
        for i in pieces.body
        if isinstance(i, TimeStep)
        and pieces.tensors[i.operand].shape == (16, 16)
        and i.kind == "reuse"
        and i.is_of_pieces
    }
    assert [pieces.when[i.result] for i in gathers[1] if i.result == read] == ["every"]
    assert from_op(to_op(pieces)).anew


def test_pieces_of_what_is_made_once_are_taken_in_every_micro_batch():
    """Here of the gradient of a mean, which depends on nothing."""
    made, inside = loop("llama3_8b", "degrees,tp=2/2*2")
    before = {i.operand for i in inside if isinstance(i, TimeStep) and made.when[i.operand] == "first"}
    assert any(
        i.operator == "reduce_mean_grad"
        for i in made.body
        if isinstance(i, Compute) and not before.isdisjoint(makes(i))
    )
    assert {made.when[r] for r in made.in_pieces} == {"every"}


@pytest.mark.parametrize("plan", ["degrees,tp=2*4", "degrees,tp=2,sp=true*2"])
def test_a_divided_vocabulary_moves_maxima_and_sums_of_rows_in_the_loop(plan: str):
    made, inside = loop("llama3_8b", plan)
    moved = [i for i in inside if isinstance(i, ReshardMove) and i.kind in BETWEEN_DEVICES]
    assert moved
    assert all(made.tensors[i.operand].shape[-1] <= 4 for i in moved)
    assert not {"max_of_parts", "sum_exp", "class_score", "matmul_nt"} - {*operators(inside)}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp*4", "degrees,tp=2/2i*2", "degrees,zero=3/2i*2"])
def test_text_says_what_is_in_the_loop(plan: str):
    made, _ = loop("gpt2", plan)
    assert made.loss_pieces > 1
    assert from_op(to_op(made)) == made


def test_evaluation_makes_the_loss_in_pieces():
    made, _ = loop("gpt2", "fsdp*4")
    forward = forward_of(made, machine("ideal:2"))
    assert operators(i for i in forward.body if forward.is_in_pieces(i)) == ["matmul_nt", "cross_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        ("gpt2", "data-parallel*3", "a rank has 4 x 4 tokens of matmul_nt; give loss_pieces a divisor of these"),
        ("nmt", "random-3*2", "its slice divides tokens in another way over devices; use another plan"),
    ],
)
def test_what_cannot_be_in_pieces_is_refused(model: str, plan: str, said: str):
    with pytest.raises(UnityError, match=re.escape(said)):
        planned(build(model, **SIZES[model]), plan, 2, SGD)
