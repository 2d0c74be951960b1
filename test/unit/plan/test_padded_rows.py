"""Tensors whose rows are unaligned are stored with padded rows, where all kernels that use them take strides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan import padded_rows
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step

BERT = {"batch": 2, "sequence": 4, "layers": 1, "hidden": 16, "heads": 2}


def planned(graph: Graph, **options: Any) -> Plan:
    machine = load("box:1")
    return plan_step(lower(differentiate(graph, Optimizer("sgd"), machine.mesh), machine), PlanOptions(**options))


def rows(plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """Shape and row of every padded tensor."""
    return sorted((t.shape, t.row) for t in plan.program.tensors.values() if t.row)


def model(vocabulary: int) -> Graph:
    return mixed_precision(build("bert_large", **BERT, vocabulary=vocabulary), "bf16")


def test_logits_and_their_gradient_are_padded():
    assert rows(planned(model(259))) == [((2, 4, 259), 320), ((2, 4, 259), 320)]


def test_with_products_in_pytorch_their_operands_are_padded():
    assert rows(planned(model(259), matmul="torch")) == [((2, 4, 259), 320)]


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (model(264), {}),  # 528 bytes are aligned
        (model(101), {}),  # short rows
        (build("bert_large", **BERT, vocabulary=259), {}),  # float32 is copied element by element
        (model(259), {"kernels": "torch"}),
    ],
)
def test_others_are_not(graph: Graph, options: dict[str, Any]):
    assert rows(planned(graph, **options)) == []


@pytest.mark.parametrize("matmul", ["triton", "torch"])
def test_padding_changes_no_number(matmul: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from loading import compiled, module

    graph = model(259)

    def run(name: str) -> tuple[Any, ...]:
        path = tmp_path / f"{name}.py"
        program: Any = module(path, compiled(emit(planned(graph, matmul=matmul), graph).text, path))
        ctx = SimpleNamespace(device=torch.device("cpu"), index=lambda axes, position=0: position, at=lambda pins: True)
        return program.forward_backward(ctx, program.init_weights(ctx), program.Data().batch(0))

    # What lies beyond a row must not be read.
    new_empty, made = torch.Tensor.new_empty, list[tuple[int, ...]]()

    def spoiled(*args: Any, **more: Any) -> torch.Tensor:
        found = new_empty(*args, **more)
        made.append(tuple(found.shape))
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", spoiled)
    loss, grads = run("padded")
    assert any(shape[-1:] == (320,) for shape in made)
    monkeypatch.setattr(padded_rows, "FEWEST", 10_000)
    expected_loss, expected = run("plain")
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[n], g) for n, g in expected.items())
