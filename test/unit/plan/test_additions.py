"""Products add up gradients of micro-batches and make float32, unless a plan leaves that to kernels of their own."""

from __future__ import annotations

import pytest

from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute, Fused, TimeStep, makers_of
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph
from unity_ir.search import run

GPT2 = {"batch": 4, "sequence": 16, "layers": 1, "hidden": 128, "heads": 2, "vocabulary": 64}
OPTIMIZER = Optimizer("adamw")


def planned(options: PlanOptions, strategy: str = "data-parallel", is_mixed: bool = True) -> Plan:
    graph, machine = build("gpt2", **GPT2), load("dgx-h100:1x2")
    graph = mixed_precision(graph, "bf16") if is_mixed else graph
    placed = run(graph, machine, strategy, OPTIMIZER, micro_batches=2).graph
    return plan_graph(placed, machine, OPTIMIZER, options)


def added(plan: Plan) -> dict[str, bool]:
    """Return, of each gradient that is added up, the operators that make it, and whether their kernel adds."""
    made = makers_of(plan.program.body)
    steps = (i for i in plan.program.body if isinstance(i, TimeStep) and i.kind == "accumulate")
    found = {i: made[i.operand] for i in steps}
    return {by.operator: i.is_added for i, by in found.items() if isinstance(by, Compute)}


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [True, False], ids=["mixed", "f32"])
@pytest.mark.parametrize("options", [PlanOptions(matmul="torch"), PlanOptions(matmul="triton"), PlanOptions()])
def test_products_alone_add(options: PlanOptions, is_mixed: bool):
    """But not those of the table that the head and the embedding share, whose gradients another kernel adds."""
    found = added(planned(options, is_mixed=is_mixed))
    products = {name for name in found if name.startswith("matmul_tn")}
    assert products
    assert {name for name, adds in found.items() if adds} == products
    assert len(found) > len(products)


def test_gradients_that_are_moved_before_are_added_by_a_kernel_of_their_own():
    assert not planned(PlanOptions(), "fsdp").program.added


@pytest.mark.slow
def test_eager_plans_cast_and_add_in_kernels_of_their_own():
    for kernels in ("torch", "triton"):
        plan = planned(PlanOptions(kernels=kernels, matmul="torch", eager=True))
        assert not plan.program.added
        assert not plan.program.leaves("cast")
        assert not any(isinstance(i, Fused) and i.implementation == "torch" for i in plan.program.body)
        assert plan.launches > planned(PlanOptions(kernels=kernels, matmul="torch")).launches
