"""
Programs of models of which only adapters or the last layers are trained, and moving averages of these, against PyTorch
in f64.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch_models
from ranks import Ranks, check
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tuned import tuned

from unity_ir.frontends.torch.imported import Imported, from_torch
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.freeze import freeze
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import ReshardMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.pipeline.staged import Stages

STEPS, RATE, CLIP, EMA = 3, 1e-2, 0.05, 0.7


class LoRALinear(nn.Module):
    """y = W x + (alpha / r) B A x, of a frozen linear layer (or one of GPT-2's, whose weight is transposed)."""

    def __init__(self, inner: nn.Module, r: int = 2, alpha: float = 6.0):
        super().__init__()
        weight = inner.weight if isinstance(inner, nn.Linear) else inner.weight.T
        assert isinstance(weight, torch.Tensor)
        self.inner, self.scale = inner, alpha / r
        self.a = nn.Parameter(torch.randn(r, weight.shape[1]) * 0.3)
        self.b = nn.Parameter(torch.randn(weight.shape[0], r) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def with_adapters(module: nn.Module, layers: set[str]) -> None:
    module.requires_grad_(False)
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if name in layers:
                setattr(parent, name, LoRALinear(child))


@cache
def model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], Imported]:
    """A model in f64 with frozen weights, a batch, and its graph in f32, for programs run `in_double`."""
    torch.manual_seed(0)
    module, _, _ = torch_models.gpt2("sdpa") if name == "gpt2" else torch_models.llama("sdpa")
    if name == "head":
        module.requires_grad_(False)
        for part in ("model.layers.1", "model.norm", "lm_head"):
            module.get_submodule(part).requires_grad_(True)
    else:
        with_adapters(module, {"q_proj", "v_proj", "c_attn"})
    ids = torch.randint(0, torch_models.VOCABULARY, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    single = from_torch(module, batch)
    with torch_models.InDouble():
        double = from_torch(module.double(), batch)
    return module, batch, replace(single, weights=double.weights, tables=double.tables)


@cache
def by_pytorch(name: str) -> dict[str, Any]:
    """Train the model `name` with PyTorch's AdamW for `STEPS` steps; return what `tuned` returns."""
    module, batch, _ = model(name)
    module = copy.deepcopy(module)
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    adamw = torch.optim.AdamW(named.values(), lr=RATE, weight_decay=0.1)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for _ in range(STEPS):
        with torch_models.InDouble():
            loss = module(**batch).loss
        adamw.zero_grad()
        loss.backward()
        found["losses"].append(float(loss.detach()))
        found["gradients"].append({n: p.grad.numpy().copy() for n, p in named.items() if p.grad is not None})
        found["norms"].append(float(nn.utils.clip_grad_norm_(named.values(), CLIP)))
        adamw.step()
        averaged.update_parameters(module)
    whole = {"weights": module, "averages": averaged.module}
    return found | {what: {n: p.detach().numpy() for n, p in of.named_parameters()} for what, of in whole.items()}


def step(graph: Graph, where: str, plan: str) -> Graph:
    on = load(where)
    is_recipe = plan.startswith("tp")
    made = recipe(graph, on, Degrees(tp=2, zero=int(plan[2:]))) if is_recipe else run(graph, on, plan).graph
    adamw = Optimizer("adamw", RATE, weight_decay=0.1, clip=CLIP, ema=EMA)
    return fuse_collectives(differentiate(made, adamw, on.mesh))


def program(graph: Graph, where: str, plan: str, imported: Imported | None = None) -> str:
    made = plan_step(lower(step(graph, where, plan), load(where)), PlanOptions(kernels="torch"))
    return emit(made, graph, origin=None if imported is None else imported.origin).text


def in_double(text: str) -> str:
    """A program in float64, as its `--check` runs it."""
    return re.sub(r"\btorch\.float32\b", "torch.float64", text).replace(".float()", ".double()")


CASES = [
    *(("llama", *plan) for plan in (("box:1", "joint"), ("2gpu", "fsdp"), ("2gpu", "tp0"), ("2gpu", "joint"))),
    *(("gpt2", *plan) for plan in (("2gpu", "joint"), ("box:4", "fsdp"), ("box:4", "expert"))),
    *(("llama", "box:4", "tp3"), ("gpt2", "2gpu", "expert"), ("head", "2gpu", "fsdp"), ("head", "box:4", "tp1")),
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "where", "plan"), CASES)
def test_three_steps_equal_those_of_pytorch(ranks: Ranks, name: str, where: str, plan: str):
    module, batch, imported = model(name)
    text = program(imported.graph, where, plan, imported)
    world, want = load(where).devices, by_pytorch(name)
    given = {n: w.numpy() for n, w in imported.weights.items()}
    tables = {n: t.numpy() for n, t in (batch | imported.tables).items()}
    each = ranks.run(in_double(text), world, tuned, given, tables, STEPS)
    found, trained = each[0], {n for n, p in module.named_parameters() if p.requires_grad}
    assert {n for own in each for n in own["moments"]} == trained
    for what in ("losses", "norms"):
        np.testing.assert_allclose(found[what], want[what], rtol=1e-9, err_msg=what)
    for grads, wanted in zip(found["gradients"], want["gradients"], strict=True):
        assert grads.keys() == wanted.keys() == trained
        for n, grad in grads.items():
            np.testing.assert_allclose(grad, wanted[n], rtol=1e-6, atol=1e-11, err_msg=n)
    assert found["weights"].keys() == found["averages"].keys() == want["weights"].keys()
    for n in given:
        weight, average = found["weights"][n], found["averages"][n]
        if n in trained:
            np.testing.assert_allclose(weight, want["weights"][n], rtol=0, atol=1e-8, err_msg=n)
            np.testing.assert_allclose(average, want["averages"][n], rtol=0, atol=1e-8, err_msg=n)
            assert not np.allclose(weight, given[n], rtol=0, atol=1e-4), n
            assert not np.allclose(weight, average, rtol=0, atol=1e-4), n
        else:
            np.testing.assert_array_equal(weight, given[n], err_msg=n)
            np.testing.assert_array_equal(average, given[n], err_msg=n)


def test_in_fsdp_frozen_weights_rest_in_shards_are_gathered_and_not_reduced():
    _, _, imported = model("llama")
    text = program(imported.graph, "2gpu", "fsdp", imported)
    specs = [line for line in text.splitlines() if line.endswith("frozen=True),")]
    assert len(specs) == 21
    assert all("(0,), frozen" in line or "(1,), frozen" in line for line in specs)
    made = lower(step(imported.graph, "2gpu", "fsdp"), load("2gpu"))
    moves = Counter(i.kind for i in made.body if isinstance(i, ReshardMove))
    assert (moves["all_gather"], moves["reduce_scatter"]) == (21 + 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_whose_weights_are_all_frozen_has_no_backward(ranks: Ranks, schedule: str):
    sizes = {"hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 12, "vocabulary": 12}
    graph = build("llama3_8b", batch=4, sequence=4, layers=4, **sizes)
    graph = freeze(graph, "*,!model.layers.3.*,!model.norm.*,!lm_head.*")
    on = load("2gpu")
    made = run(graph, on, "data-parallel", micro_batches=4, stages=Stages(2, schedule)).graph
    step = fuse_collectives(differentiate(made, Optimizer("adamw"), on.mesh))
    text = emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), graph).text
    first = [line for line in text.splitlines() if "torch.float32, ('at 0',)" in line]
    assert len(first) > 8
    assert all("frozen=True" in line for line in first)
    assert ranks.run(text, 2, check, 2) == [[]] * 2


MUTANTS = {
    "a frozen weight is updated": (
        "    for name, weight in trained(weights).items():\n",
        "    [w.mul_(1.01) for n, w in weights.items() if n == 'model.embed_tokens.weight']\n"
        "    for name, weight in trained(weights).items():\n",
        "frozen weight model.embed_tokens.weight has changed",
    ),
    "a trained one is not": (
        "    for name, weight in trained(weights).items():\n",
        "    for name, weight in [*trained(weights).items()][1:]:\n",
        "the update of model.layers.0.self_attn.q_proj.lora_A.weight",
    ),
    "the average begins at zero": (
        "    keep = ema * (1.0 - 0.0 ** (step - 1.0))\n    take = 1.0 - ema * (1.0 - 0.0 ** (step - 1.0))\n",
        "    keep = ema\n    take = 1.0 - ema\n",
        "average of it is not what PyTorch's adamw makes",
    ),
    "the average is of the weight before": (
        "    average.mul_(keep).add_(take * p)\n",
        "    average.mul_(keep).add_(take * (p + step_size * m))\n",
        "average of it is not what PyTorch's adamw makes",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_check_sees_what_is_updated(ranks: Ranks, dtype: str):
    sizes = {"hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 12, "vocabulary": 12}
    graph = build("llama3_8b", batch=4, sequence=4, layers=2, lora=2, **sizes)
    graph = graph if dtype == "f32" else mixed_precision(graph, dtype)
    text = program(graph, "dgx-h100:1x2", "fsdp")
    assert ranks.run(text, 2, check, 2) == [[]] * 2
    for what, (before, after, message) in MUTANTS.items():
        assert text.count(before) == 1
        said = ranks.run(text.replace(before, after), 2, check, 1)[0]
        assert any(message in line for line in said), (what, said)
