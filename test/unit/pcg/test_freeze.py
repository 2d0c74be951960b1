"""Frozen weights: what the graph, its training step, the search and the count of memory make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from zoo import SMALL

import unity_ir as ui
from unity_ir.cost.work import model_flops
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate, nodes_with_gradient
from unity_ir.pcg.freeze import freeze
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.layers import layers
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.check_step import check_step
from unity_ir.plan.instructions import UpdateWeight
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Program
from unity_ir.search import run
from unity_ir.tdl.counts import contraction_flops

TEXT = """
func.func @f(%x: !pcg.tensor<[8, 4], f32>) -> !pcg.tensor<[], f32> {{
  %a = pcg.weight "a" {} : !pcg.tensor<[4, 4], f32>
  %b = pcg.weight "{}" {} : !pcg.tensor<[4, 4], f32>
  %1 = pcg.matmul %x, %a : !pcg.tensor<[8, 4], f32>, !pcg.tensor<[4, 4], f32>
  %2 = pcg.matmul %1, %b : !pcg.tensor<[8, 4], f32>, !pcg.tensor<[4, 4], f32>
  %3 = pcg.reduce_mean %2 {{dim = 0, count = 2}} : !pcg.tensor<[8, 4], f32>
  func.return %3 : !pcg.tensor<[], f32>
}}
"""


def llama(**sizes: int) -> Graph:
    return build("llama3_8b", **{**SMALL["llama3_8b"], "layers": 3, **sizes})


def head(graph: Graph) -> Graph:
    """A Llama of three layers of which only the last and what follows are trained."""
    return freeze(graph, "*,!model.layers.2.*,!model.norm.*,!lm_head.*")


@pytest.mark.parametrize(
    ("first", "name", "second", "message"),
    [
        ("frozen", "a", "", "pcg.weight: 'a' is frozen in one place and trained in another; rename one"),
        ("master f64 frozen", "b", "", "pcg.weight: it is frozen, which only a weight without a master can be"),
    ],
)
def test_what_cannot_be_frozen_is_said(first: str, name: str, second: str, message: str):
    with pytest.raises(UnityError) as raised:
        ui.plan(TEXT.format(first, name, second), machine="box:1", search="data-parallel")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_graph_of_frozen_weights_alone_has_no_training_step():
    with pytest.raises(UnityError, match=r"^func.func @f: every weight is frozen$"):
        differentiate(ui.plan(TEXT.format("frozen", "b", "frozen"), search=None).graph, Optimizer())


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        ("lm_head.*, *norm*", lambda name: "norm" not in name and "lm_head" not in name),
        ("*,!*mlp*,*.1.mlp*", lambda name: "mlp" in name and ".1." not in name),
        ("!*", lambda name: True),
    ],
)
def test_the_last_pattern_that_matches_counts(patterns: str, trained: Callable[[str], bool]):
    graph = llama()
    found = freeze(graph, patterns)
    assert [n.name for n in found.weights()] == [n.name for n in graph.weights()]
    assert {n.name for n in found.weights() if n.is_trained} == {n.name for n in graph.weights() if trained(n.name)}
    assert freeze(found, "!*") == graph


def test_the_backward_ends_at_the_lowest_trained_weight():
    graph = head(llama())
    step = differentiate(graph, Optimizer())
    assert {u.weight.node for u in step.updates} == {n for n in graph.weights() if n.is_trained}
    forward = set(graph.nodes())
    below = {n for n in forward if n.is_compute and n not in nodes_with_gradient(graph)}
    read = {v.node for n in step.nodes() if n not in forward for v in n.operands}
    # Of the two layers below it reads what they end in, and no weight.
    assert {n.op for n in below & read} == {"add"}
    assert len(below & read) == 1
    assert not [n.name for n in read if n.op == "weight" and "layers.2" not in n.name and "layers" in n.name]


def test_layers_below_are_layers_and_differ_from_trained_ones():
    assert len(layers(llama()).layers) == 3
    assert len(layers(llama(layers=6, lora=2)).layers) == 6
    found = layers(head(llama()))
    names = [{v.node.name for n in part.nodes for v in n.operands if v.node.op == "weight"} for part in found.layers]
    assert [any(f".{i}." in name for name in own) for i, own in enumerate(names)] == [True] * len(names)
    assert len(names) == 2


def test_flops_are_those_that_are_done():
    graph = llama()
    whole, head_alone = model_flops(graph), model_flops(freeze(graph, "*,!lm_head.*"))
    (product,) = (n for n in graph.nodes() if n.is_compute and any(_name(v) == "lm_head.weight" for v in n.operands))
    last = contraction_flops(product.analysis.bound)
    # All forwards, and of the head the gradient of the weight alone.
    assert head_alone == whole // 3 + last
    assert model_flops(freeze(graph, "lm_head.*")) == whole - last


def _name(value: Value) -> str:
    return value.node.name if value.node.op == "weight" else ""


@pytest.mark.parametrize(("where", "search"), [("dgx-h100:1x1", "data-parallel"), ("dgx-h100:1", "fsdp")])
def test_memory_of_llama_with_adapters_is_what_a_count_by_hand_says(where: str, search: str):
    machine = load(where)
    graph = build("llama3_8b", lora=16, batch=machine.devices)
    adapters = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    found = run(mixed_precision(graph, "bf16"), machine, search, Optimizer("adamw")).cost.memory
    # Published weights in bf16; adapters in f32 with a cast in bf16, a gradient, and two moments.
    assert found["weights"] == (8_030_261_248 * 2 + adapters * (4 + 2)) / machine.devices
    assert found["gradients"] == adapters * 4 / machine.devices
    assert found["optimizer state"] == adapters * 8 / machine.devices


def program(graph: Graph) -> Program:
    machine = load("box:1")
    return lower(differentiate(graph, Optimizer(), machine.mesh), machine)


def test_a_step_updates_trained_weights_and_no_others():
    whole, frozen = llama(), head(llama())
    check_step(program(frozen), frozen)
    with pytest.raises(UnityError, match=r"weight 'model.embed_tokens.weight' is frozen, and has an spmd.update"):
        check_step(program(whole), frozen)
    with pytest.raises(UnityError, match=r"has no spmd.update; it must reach the loss"):
        check_step(program(frozen), whole)
    made = program(frozen)
    last = next(i for i in made.body if isinstance(i, UpdateWeight))
    with pytest.raises(UnityError, match=r"one spmd.update of every trained weight"):
        check_step(replace(made, body=(*made.body, last)), frozen)
