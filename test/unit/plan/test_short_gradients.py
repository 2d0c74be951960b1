"""Updates read gradients in the type in which an operator made them, where a kernel would only cast them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unity_ir.cost.kernels import bytes_of_update, seconds_of_update
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Mesh, pinned_at
from unity_ir.plan.instructions import Compute, Instruction, Leaf, Tensor, UpdateWeight
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.short_gradients import with_short_gradients
from unity_ir.search import run

TORCH = PlanOptions(kernels="torch")
GPT2 = {"batch": 2, "sequence": 4, "layers": 1, "hidden": 16, "heads": 2, "vocabulary": 32}


def planned_gpt2(options: PlanOptions, count: int = 1, clip: float = 0.0, micro_batches: int = 1) -> Plan:
    machine, optimizer = load(f"dgx-h100:1x{count}"), Optimizer("adamw", clip=clip)
    graph = run(
        mixed_precision(build("gpt2", **GPT2), "bf16"), machine, "data-parallel", optimizer, micro_batches=micro_batches
    ).graph
    return plan_step(lower(fuse_collectives(differentiate(graph, optimizer, machine.mesh)), machine), options)


def types(plan: Plan) -> set[str]:
    """The types of the gradients that updates read."""
    return {plan.program.tensors[i.grad].dtype for i in plan.program.body if isinstance(i, UpdateWeight)}


@pytest.mark.slow
def test_updates_read_what_operators_store():
    """But what products and Triton's kernels cast themselves is in f32; so is what ranks or micro-batches add up."""
    assert types(planned_gpt2(TORCH)) == {"f32", "bf16"}
    assert types(planned_gpt2(PlanOptions(matmul="torch"))) == {"f32"}
    assert types(planned_gpt2(PlanOptions(matmul="triton"))) == {"f32"}
    assert types(planned_gpt2(TORCH, count=2)) == {"f32"}
    assert types(planned_gpt2(TORCH, micro_batches=2)) == {"f32"}


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_what_an_update_reads_is_priced(clip: float):
    plan, optimizer, device = planned_gpt2(TORCH, clip=clip), Optimizer("adamw", clip=clip), load("dgx-h100:1x1").device
    program = plan.program
    updates = [i for i in program.body if isinstance(i, UpdateWeight) and program.tensors[i.grad].dtype == "bf16"]
    assert len(updates) > 10
    for each in updates:
        count = program.bytes[each.weight] // 4
        assert bytes_of_update(program, each, optimizer) == (28 + 2 * (clip > 0)) * count
        in_f32 = replace(each, grad=each.weight)
        assert seconds_of_update(program, each, optimizer, device) < seconds_of_update(
            program, in_f32, optimizer, device
        )


def casting(
    *more: Instruction, dtype: str = "f32", layout: int = REPEAT, row: int = 0, outputs: tuple[int, ...] = ()
) -> Program:
    """A program that casts a gradient of bf16 for an update; and more instructions."""
    long, short = Tensor((4,), dtype, (layout,)), Tensor((4,), "bf16", (layout,), row=row)
    cast = Compute("cast", (1,), (2,), (("to", dtype),), ("i",))
    body = (Leaf("weight", 0, "w"), Leaf("input", 1, "g"), cast, *more, UpdateWeight(0, 2))
    return Program("casting", Mesh((2,)), {0: long, 1: short, 2: long, 3: long}, body, outputs, None)


@pytest.mark.parametrize(
    ("program", "is_short"),
    [
        (casting(), True),
        (casting(Compute("neg", (2,), (3,), (), ("i",))), False),
        (casting(outputs=(2,)), False),
        (casting(dtype="bf16"), False),
        (casting(layout=pinned_at(1)), False),
        (casting(row=64), False),
    ],
    ids=["alone", "read by others", "returned", "no longer", "on a part of the machine", "rows are padded"],
)
def test_only_what_an_update_alone_reads(program: Program, is_short: bool):
    found = with_short_gradients(program)
    assert (UpdateWeight(0, 1) in found.body) == is_short
    assert (found == program) == (not is_short)
