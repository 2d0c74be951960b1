"""What operators written into each other must not change."""

from __future__ import annotations

from typing import Any

import torch
from operator_cases import DTYPES

from unity_ir.kernels.launchers import launcher
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.groups import with_fusions
from unity_ir.plan.instructions import Compute, Fused, Leaf, UpdateWeight
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Program


def gradients(program: Program, runner: Any) -> list[torch.Tensor]:
    """Those of all weights, of a program for one device, each instruction by its kernels."""
    found: dict[int, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for instruction in program.body:
        match instruction:
            case Leaf(op, result, _, value):
                tensor = program.tensors[result]
                made = torch.randn(tensor.shape, generator=generator)
                found[result] = (torch.full(tensor.shape, value) if op == "constant" else made).to(DTYPES[tensor.dtype])
            case Compute(_, operands, results):
                operator = local_operator(program, instruction)
                made = launcher(operator.line, operator.dtypes, "triton", operator.divided)
                found |= zip(results, runner.run(made, [found[r] for r in operands]), strict=True)
            case _:
                pass
    return [found[i.grad].double() for i in program.body if isinstance(i, UpdateWeight)]


def test_a_stored_maximum_is_compared_with_what_is_rounded_like_it(runner: Any) -> None:
    """A gradient that computes the elements of a maximum again: in registers alone they would be longer than that."""
    x, y = leaf("input", tensor_type((8, 16), "bf16"), name="x"), leaf("input", tensor_type((8,), "bf16"), name="y")
    w = leaf("weight", tensor_type((8, 16), "bf16"), name="w").result
    h = parallel("recompute", apply("mul", [x.result, w]).result).result
    h = parallel("recompute", apply("scale", [h], {"by": 0.3}).result).result
    top = apply("tanh", [apply("reduce_max", [h], {"dim": 1}).result]).result
    graph = Graph("again", (x, y), (apply("mse", [top, y.result]).result,))
    on = load("box:1")
    program = lower(differentiate(graph, Optimizer(), on.mesh), on)
    fused = with_fusions(program, lambda operator: "triton")
    assert any(isinstance(i, Fused) and "reduce_max" in i.operator for i in fused.body)
    (one,), (other,) = gradients(fused, runner), gradients(program, runner)
    assert (other != 0).any()
    torch.testing.assert_close(one, other, rtol=0.1, atol=0.01)


def test_sums_by_integers_keep_their_kernels() -> None:
    """A table read on both sides, and experts after each other: as one line they would be dense, or none."""
    x, e = leaf("input", tensor_type((8, 4), "f32"), name="x"), leaf("input", tensor_type((8,), "i64"), name="e")
    w = leaf("weight", tensor_type((2, 4, 4), "f32"), name="w").result
    table = leaf("weight", tensor_type((4, 4), "f32"), name="table").result
    h = apply("add", [x.result, apply("embedding", [e.result, table]).result]).result
    h = apply("routed_matmul", [apply("routed_matmul", [h, w, e.result]).result, w, e.result]).result
    loss = apply("cross_entropy", [apply("matmul_nt", [h, table]).result, e.result]).result
    on = load("box:1")
    program = lower(differentiate(Graph("tied", (x, e), (loss,)), Optimizer(), on.mesh), on)
    fused = with_fusions(program, lambda operator: "triton")
    groups = [i.operator for i in fused.body if isinstance(i, Fused)]
    assert groups == ["embedding + add", "embedding_grad + add"]
