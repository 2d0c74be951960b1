"""Casts of small weights are made by one launch; large ones, and those of steps in parts, by themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import compiled, module

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan import shared_casts
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph

GPT = {"batch": 2, "sequence": 4, "layers": 1, "hidden": 24, "heads": 2, "vocabulary": 35}


def planned(graph: Graph, **options: Any) -> Plan:
    return plan_graph(graph, load("box:1"), Optimizer("sgd"), PlanOptions(**options))


def model() -> Graph:
    return mixed_precision(build("gpt2", **GPT), "bf16")


def test_small_weights_share_a_launch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_casts, "LARGEST", 24 * 24)
    plan = planned(model())
    (names,) = (set(those.values()) for those in plan.shared_casts.values())
    assert "h.0.mlp.c_fc.weight" not in names
    assert {"ln_f.weight", "h.0.attn.c_attn.bias", "h.0.attn.c_proj.weight"} <= names
    alone = planned(model()).program
    monkeypatch.setattr(shared_casts, "FEWEST", 1000)
    assert planned(model()).launches == plan.launches + len(names) - 1
    assert alone == plan.program


@pytest.mark.parametrize(
    ("graph", "options"), [(build("gpt2", **GPT), {}), (model(), {"kernels": "torch"})], ids=["f32", "torch"]
)
def test_others_do_not(graph: Graph, options: dict[str, Any]):
    assert not planned(graph, **options).shared_casts


def test_it_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    graph = model()

    def run(name: str) -> tuple[Any, ...]:
        path = tmp_path / f"{name}.py"
        text = emit(planned(graph), graph).text
        program: Any = module(path, compiled(text, path))
        ctx = SimpleNamespace(device=torch.device("cpu"), index=lambda axes, position=0: position, at=lambda pins: True)
        weights = program.init_weights(ctx)
        program.forward_backward(ctx, weights, program.Data().batch(0))
        for weight in weights.values():
            weight.mul_(1.5)  # as the update does, in place: the casts are made anew
        return text, *program.forward_backward(ctx, weights, program.Data().batch(0))

    text, loss, grads = run("shared")
    monkeypatch.setattr(shared_casts, "FEWEST", 1000)
    plain, expected_loss, expected = run("alone")
    assert "all_bf16(" in text
    assert "all_bf16" not in plain
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[n], g) for n, g in expected.items())
