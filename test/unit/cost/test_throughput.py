"""Tokens per second, MFU, and the error band that `--stats` prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unity_ir.cost.throughput import batch_count, error_text, throughput_lines
from unity_ir.cost.work import model_flops
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run

SMALL = "gpt2,batch=16,sequence=256,layers=2,hidden=256,heads=4,vocabulary=512"


def test_tokens_are_those_of_ids_and_samples_of_what_has_none():
    assert batch_count(from_text(SMALL)) == (16 * 256, "tokens")
    assert batch_count(from_text("resnet101,batch=8")) == (8, "samples")
    assert batch_count(from_text("mlp,batch=32")) == (32, "samples")


@pytest.mark.slow
def test_throughput_and_mfu_are_of_the_whole_step():
    """A plan in micro-batches has the batch of all of them."""
    machine = load("dgx-a100:1")
    graph = mixed_precision(from_text(SMALL), "bf16")
    for micro_batches in (1, 2):
        placed = run(graph, machine, "degrees", Optimizer("adam"), {"zero": 3}, micro_batches=micro_batches).graph
        throughput, accuracy = throughput_lines(placed, machine, 0.5)
        assert throughput.startswith("throughput     1,024 tokens per second and device, MFU ")
        part = model_flops(graph) / 0.5 / 8 / 312e12
        assert f"MFU {part * 100:.2g}% of the peak in bf16" in throughput
        assert "published steps of transformer models on A100" in accuracy
        large, _ = throughput_lines(placed, machine, model_flops(graph) / 8 / 312e12 / 0.5)
        assert "MFU 50.0% of the peak in bf16" in large


def test_products_in_f32_are_of_the_peak_in_f32():
    (line,) = throughput_lines(from_text("mlp,batch=32"), load("dgx-a100:1x1"), 1.0)
    assert line.startswith("throughput     32 samples per second and device")
    assert line.endswith("of the peak in f32")


@pytest.mark.parametrize(
    ("model", "machine", "begins"),
    [
        (SMALL, "dgx-h100", "of "),
        ("resnet101,batch=8", "p100", "of "),
        ("mlp,batch=32", "dgx-h100", ""),
        (SMALL, "cpu", ""),
    ],
)
def test_an_error_is_given_only_where_steps_were_compared(model: str, machine: str, begins: str):
    said = error_text(from_text(model), load(machine))
    assert said.startswith(begins)
    assert bool(said) == bool(begins)


def test_a_graph_with_its_backward_has_no_throughput():
    from unity_ir.pcg.differentiate import differentiate

    step = differentiate(from_text(SMALL), Optimizer())
    assert throughput_lines(step, load("dgx-a100:1x1"), 1.0) == ()
    assert throughput_lines(replace(from_text(SMALL)), load("dgx-a100:1x1"), 0.0) == ()
