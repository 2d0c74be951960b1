"""
Programs of the zoo's models, small, on two ranks: loss, gradients by name and weights equal PyTorch's.

A sample by default; every model and plan with ZOO=all (`make zoo`).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from models import by_hand, machine
from ranks import Ranks, check, gradients
from zoo import SMALL
from zoo import by_hand as zoo_by_hand

from unity_ir.lowering.program import emit
from unity_ir.lowering.spmd import lower
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.search import run

PLANS = ("data-parallel", "random-0", "random-1")
SAMPLE = [
    *(("lenet", "data-parallel"), ("alexnet", "random-1"), ("resnet101", "random-0"), ("resnext50", "random-1")),
    *(("wresnet", "random-1"), ("moe", "data-parallel"), ("dlrm", "random-0"), ("rnntc", "random-0")),
]
DEEP = ("inception_v3",)
"""Where float32 in PyTorch itself is further from float64 than a program's own check lets pass, entry by entry."""
EVERY = [(model, plan) for model in SMALL for plan in PLANS]


def small(model: str) -> tuple[dict[str, int], Graph]:
    """Its settings, with a batch that two ranks divide, and the graph."""
    keys = {key: (4 if key == "batch" else value) for key, value in SMALL[model].items()}
    return keys, build(model, **keys)


def program(graph: Graph, plan: str) -> str:
    on = machine("ideal:2")
    strategy, _, seed = plan.partition("-") if plan.startswith("random") else (plan, "", "0")
    placed = run(graph, on, strategy, seed=int(seed)).graph
    step = fuse_collectives(differentiate(placed, Optimizer("sgd", 0.1), on.mesh))
    return emit(lower(step, on), graph, kernels="torch").text


@pytest.mark.parametrize(("model", "plan"), EVERY if os.environ.get("ZOO") == "all" else SAMPLE)
def test_equals_pytorch(ranks: Ranks, model: str, plan: str):
    keys, graph = small(model)
    text = program(graph, plan)
    if model not in DEEP:
        assert ranks.run(text, 2, check, 1) == [[]] * 2
    weights, batch, loss, grads = ranks.run(text, 2, gradients)[0]
    want_loss, want = by_hand(lambda w, inputs: zoo_by_hand(model, keys, w, inputs), weights, batch)
    assert loss == pytest.approx(want_loss, rel=1e-4)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        off = np.linalg.norm(grad - want[name])
        assert off <= 1e-3 * np.linalg.norm(want[name]) + 1e-6, name
