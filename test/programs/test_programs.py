"""Emitted programs on real ranks: loss, every gradient by name and the weights after 2 steps equal PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
from extent import ALL, sample
from models import MODELS, by_hand, machine, normed
from ranks import Ranks, check, gradients
from zoo import SMALL
from zoo import by_hand as zoo_by_hand

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.schedule import BUCKET_BYTES
from unity_ir.search import run

PLANS = ["joint", "data-parallel", *(f"random-{seed}" for seed in range(3))]
PLACED = [(where, plan) for where in ("ideal:2x2", "ideal:2") for plan in PLANS]
CASES = [(model, *placed) for model in MODELS for placed in PLACED]
FIFTH = [c for c in CASES if (3 * [*MODELS].index(c[0]) + PLACED.index(c[1:])) % 5 == 0]
"""Each model is placed in two ways, and each way has one model or two."""


def program(
    graph: Graph,
    where: str,
    plan: str,
    optimizer: str = "sgd",
    matmul: str = "triton",
    bucket: int = BUCKET_BYTES,
    kernels: str = "triton",
    lr: float | None = None,
) -> str:
    """The text of a plan's program."""
    on = machine(where)
    strategy, _, seed = plan.partition("-") if plan.startswith("random") else (plan, "", "")
    placed = run(graph, on, strategy, options={"seed": int(seed)} if seed else None).graph
    settings = Optimizer(optimizer, lr or (0.1 if optimizer == "sgd" else 1e-3))
    step = fuse_collectives(differentiate(placed, settings, on.mesh))
    return emit(plan_step(lower(step, on), PlanOptions(matmul, kernels, bucket=bucket)), graph).text


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "where", "plan"), CASES if ALL else FIFTH)
def test_equals_pytorch(ranks: Ranks, model: str, where: str, plan: str):
    build, reference = MODELS[model]
    optimizer = "adam" if plan in ("joint", "random-0") else "sgd"
    text = program(build(), where, plan, optimizer, "torch" if plan == "random-1" else "triton")
    world = machine(where).devices
    assert ranks.run(text, world, check, 2) == [[]] * world
    weights, batch, loss, grads = ranks.run(text, world, gradients)[0]
    want_loss, want = by_hand(reference, weights, batch)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=1e-5 * np.abs(want[name]).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_gradient_that_is_rounding_alone_is_not_wrong(ranks: Ranks, optimizer: str):
    text = program(normed(), "ideal:2", "data-parallel", optimizer, kernels="torch")
    assert ranks.run(text, 2, check) == [[]] * 2
    # In float64 it is told as well.
    strict = text.replace("ROUNDING = 4", "ROUNDING = 0")
    assert ranks.run(strict, 2, check) == [[]] * 2
    strict = strict.replace("IN_DOUBLE = True", "IN_DOUBLE = False")
    assert any("gradient of conv.bias differs" in line for line in ranks.run(strict, 2, check)[0])


TRANSFORMERS = [
    ("llama3_8b", "ideal:2x2", "joint"),
    ("gpt2", "ideal:2x2", "joint"),
    ("bert_large", "ideal:2x2", "joint"),
    ("bert_large", "ideal:2", "random-0"),
    ("gpt2", "ideal:2", "random-0"),
    ("llama3_8b", "ideal:2", "random-0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "where", "plan"), sample(TRANSFORMERS, 6, 3))
def test_transformers_equal_pytorch(ranks: Ranks, model: str, where: str, plan: str):
    keys = {**SMALL[model], "batch": 4, "sequence": 4, "vocabulary": 12}
    graph = build(model, **keys)
    text = program(graph, where, plan)
    world = machine(where).devices
    assert ranks.run(text, world, check, 2) == [[]] * world
    weights, batch, loss, grads = ranks.run(text, world, gradients)[0]
    want_loss, want = by_hand(lambda w, inputs: zoo_by_hand(model, keys, w, inputs), weights, batch)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, grad in grads.items():
        # The gradient of a key's bias is 0: softmax does not see what it adds.
        atol = max(2e-5 * np.abs(want[name]).max(), 1e-9)
        np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=atol, err_msg=name)
