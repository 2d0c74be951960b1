"""Recipes compute what the model does, move the bytes of the papers' formulas, and refuse what they cannot express."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import boxes, data_for
from zoo import SMALL

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate, training_step
from unity_ir.pcg.graph import Graph, Optimizer, Value, apply, leaf, rebuild, rewrite
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.sharding import place
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.baselines.rewrites import split_products, vocabulary_parallel_loss

SIZES = {"f32": (4, 4), "bf16": (2, 4), "bf16,reduce=bf16": (2, 2)}
"""Bytes of an element of a weight as it is moved, and of its gradient as it is summed."""


def in_precision(graph: Graph, precision: str) -> Graph:
    if precision == "f32":
        return graph
    return mixed_precision(graph, "bf16", "bf16" if precision.endswith("reduce=bf16") else "f32")


def bytes_per_device(plan: Graph, machine: Machine) -> float:
    """Bytes that a device receives in a step, where every collective is a ring."""
    return cost(training_step(plan, Optimizer(), machine.mesh), machine).bytes / machine.devices


def check_gradients(serial: Graph, plan: Graph, machine: Machine) -> None:
    inputs, weights = data_for(serial)
    whole_step = differentiate(serial, Optimizer())
    whole = interpret(whole_step, inputs, weights)
    expected = {u.weight.node.name: whole[u.grad] for u in whole_step.updates}
    step = differentiate(plan, Optimizer(), machine.mesh)
    pieces = interpret_pieces(step, inputs, weights)
    assert {u.weight.node.name for u in step.updates} == expected.keys()
    for u in step.updates:
        got = join(pieces[u.grad], u.grad.type)
        np.testing.assert_allclose(got, expected[u.weight.node.name], rtol=1e-6, atol=1e-8)


# --- what plans compute


@pytest.mark.parametrize(
    "degrees", ["zero=2", "zero=2,shards=2", "tp=2", "tp=2,sp=true", "tp=4,sp=true", "tp=2,zero=1,sp=true"]
)
@pytest.mark.parametrize("model", ["gpt2", "llama3_8b", "bert_large"])
def test_recipes_of_transformers_have_the_serial_gradients(model: str, degrees: str):
    serial, machine = build(model, **{**SMALL[model], "batch": 4}), boxes(2, 2)
    check_gradients(serial, recipe(serial, machine, parsed(degrees)), machine)


@pytest.mark.parametrize("degrees", ["zero=2", "tp=2", "tp=2,zero=1"])
@pytest.mark.parametrize("model", ["mlp", "dlrm", "xdl", "alexnet", "moe"])
def test_recipes_of_other_models_have_the_serial_gradients(model: str, degrees: str):
    serial, machine = build(model, **{**SMALL[model], "batch": 8}), boxes(2, 2)
    check_gradients(serial, recipe(serial, machine, parsed(degrees)), machine)


def parsed(text: str) -> Degrees:
    pairs = (setting.split("=") for setting in text.split(","))
    return Degrees(**{k: True if v == "true" else int(v) for k, v in pairs})
