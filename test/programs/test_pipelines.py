"""
Programs whose operators are in stages, on 2, 4 and 8 ranks: over two steps losses, gradients by name, Adam's moments
and weights equal those of the model written by hand in PyTorch.

A sample of pairs by default: each model, order, way to divide a stage and number of ranks meets several of the others;
all with ZOO=all (`make zoo`).
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from by_hand import differences
from ranks import Ranks, trained
from zoo import by_hand as zoo_by_hand
from zoo_plans import VARIANTS, program, sized

from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer

ADAM = Optimizer("adam", 1e-2, weight_decay=0.1)

ORDERS = ("gpipe,2", "1f1b,2", "eager-1f1b,2", "interleaved,2,2", "looped-bfs,2,2", "zb-h1,2", "zb-h2,2", "zb-v,2,2")
ORDERS += ("dualpipe-v,2,2", "1f1b,4", "zb-h1,4", "zb-v,4,2")
TRANSFORMERS = ("bert_large", "gpt2", "llama3_8b")
MODELS = (*TRANSFORMERS, "dlrm", "lenet", "lstm_stack", "mlp", "moe", "nmt", "rnnlm", "xdl", *VARIANTS)
SPARSE = "moe,dispatch=sparse"


def possible(model: str, order: str, plan: str, world: int) -> bool:
    """Whether each part of the ranks has something to divide, and the model what is divided."""
    part = world // int(order.split(",")[1])
    if plan.startswith("degrees,tp"):
        return part == 2 and model in TRANSFORMERS
    if plan.startswith("experts"):
        return part > 1 and model == SPARSE
    return part in (1, 2) and (part == 2 or plan.startswith("data-parallel"))


PLANS = ("data-parallel/4", "fsdp/4", "fsdp/4i", "degrees,zero=3/4i", "degrees,zero=1/4", "random-1/4", "random-3/4i")
PLANS += ("recompute-2/4", "recompute-4/4i", "joint/4", "degrees,tp=2/4", "degrees,tp=2,sp=true/4", "experts/4")
CASES = [each for each in product(MODELS, ORDERS, PLANS, (2, 4, 8)) if possible(*each)]
SAMPLE = [
    ("bert_large", "zb-h2,2", "degrees,tp=2,sp=true/4", 4),
    ("dlrm", "looped-bfs,2,2", "random-3/4i", 4),
    ("gpt2", "1f1b,4", "fsdp/4i", 8),
    ("gpt2", "dualpipe-v,2,2", "recompute-4/4i", 4),
    ("lenet", "1f1b,2", "data-parallel/4", 2),
    ("llama3_8b", "interleaved,2,2", "degrees,tp=2/4", 4),
    ("lstm_stack", "eager-1f1b,2", "random-1/4", 4),
    ("mlp", "zb-h1,4", "degrees,zero=1/4", 8),
    ("moe", "zb-v,2,2", "degrees,zero=3/4i", 4),
    (SPARSE, "zb-h1,2", "experts/4", 4),
    ("nmt", "zb-v,4,2", "joint/4", 8),
    ("nmt", "interleaved,2,2", "recompute-2/4", 4),
    ("rnnlm", "gpipe,2", "fsdp/4", 4),
    ("xdl", "zb-v,2,2", "data-parallel/4", 2),
]


def told(case: tuple[str, str, str, int]) -> str:
    return "-".join(map(str, case)).replace(",", ".")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES if os.environ.get("ZOO") == "all" else SAMPLE, ids=told)
def test_equals_pytorch(ranks: Ranks, case: tuple[str, str, str, int]):
    torch.set_num_threads(1)
    model, order, plan, world = case
    name, keys = sized(model)
    text = program(build(name, **keys), f"{order}:{plan}", world, ADAM, double=True)
    found = ranks.run(text, world, trained, 2, False)[0]
    assert differences(found, lambda w, inputs: zoo_by_hand(name, keys, w, inputs), ADAM, "f64") == []


def test_the_sample_has_everything():
    parts = [set(each) for each in zip(*SAMPLE, strict=True)]
    assert parts == [{*MODELS}, {*ORDERS}, {*PLANS}, {2, 4, 8}]
    assert all(possible(*case) for case in SAMPLE)
