"""The baselines' plans compute what the model does, and are what their names say."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from graphs import boxes, data_for, random_graph
from zoo import SMALL

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate, nodes_with_gradient
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of, place
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
from unity_ir.search.baselines.recipe import megatron_form
from unity_ir.search.tofu.coarsen import coarsen, without_groups
from unity_ir.search.tofu.search import VARIANTS, fewest_bytes, tofu
from unity_ir.search.tofu.step import StepBuilder

BASELINES = ("data-parallel", "fsdp", "expert", *VARIANTS)
MODELS = ("bert_large", "gpt2", "llama3_8b", "dlrm", "xdl", "rnnlm", "nmt", "alexnet", "moe")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_plans_of_the_zoo_are_of_their_model(model: str):
    serial = build(model, **{**SMALL[model], "batch": 8})
    # The expert takes fused products apart, and makes the loss vocabulary-parallel, to divide them.
    forms = [megatron_form(serial, tp).outputs for tp in (2, 4)]
    for strategy in BASELINES:
        found = run(serial, boxes(2, 2), strategy)
        made = erase(found.graph).outputs
        assert made == serial.outputs or (strategy == "expert" and made in forms)
        assert found.cost.time > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", BASELINES)
def test_any_plan_has_the_serial_gradients(strategy: str):
    for seed in range(12):
        graph, machine = random_graph(Random(seed), 5, dims=(4, 8)), boxes(2, 2)
        try:
            plan = run(graph, machine, strategy).graph
        except UnityError:  # the batch is not divisible
            assert strategy in ("data-parallel", "fsdp")
            continue
        inputs, weights = data_for(graph)
        serial = differentiate(graph, Optimizer())
        whole = interpret(serial, inputs, weights)
        expected = {u.weight.node.name: whole[u.grad] for u in serial.updates}
        step = differentiate(plan, Optimizer(), machine.mesh)
        pieces = interpret_pieces(step, inputs, weights)
        for u in step.updates:
            got = join(pieces[u.grad], u.grad.type)
            np.testing.assert_allclose(got, expected[u.weight.node.name], rtol=1e-7, atol=1e-8)


def test_megatron_divides_a_block_by_columns_and_then_by_rows():
    x, y = (leaf("input", tensor_type((8, 1024), "f32"), name=n) for n in "xy")
    h = x.result
    for i, act in enumerate(["gelu", "identity"]):
        w = leaf("weight", tensor_type((1024, 1024), "f32"), name=f"w{i}").result
        h = apply("matmul", [h, w], {"act": act}).result
    graph = Graph("block", (x, y), (apply("mse", [h, y.result]).result,))
    machine = boxes(4)
    found = run(graph, machine, "expert")
    layouts = place(found.graph, machine.mesh).layouts
    assert [layouts[w.result] for w in found.graph.weights()] == [(1, 1), (0, 0)]
    assert [m.kind for m, _ in found.cost.moves if m.kind not in ("retype", "slice")] == ["all_reduce"]


def test_layers_of_a_recurrent_network_have_devices_of_their_own():
    graph, machine = build("lstm_stack", **{**SMALL["lstm_stack"], "layers": 4, "steps": 3, "batch": 4}), boxes(4)
    plan = run(graph, machine, "expert").graph
    placement = place(plan, machine.mesh)
    where = {n.name: pins_of(placement.layouts[n.result]) for n in plan.weights()}
    devices = {where[f"lstm.{i}.weight_hh"] for i in range(4)}
    assert all(len(d) == 2 for d in devices)
    assert len(devices) > 1
    assert all(where[f"lstm.{i}.weight_hh"] == where[f"lstm.{i}.weight_ih"] for i in range(4))


# --- Tofu


def test_tofu_keeps_an_equal_part_of_everything_on_each_device():
    graph = build("mlp", batch=64, hidden=64, layers=3, classes=64)
    for machine in (boxes(2), boxes(2, 2), boxes(2, 2, 2)):
        plan = tofu(graph, machine)
        for part in ("weights", "gradients"):
            assert cost(plan, machine).memory[part] * machine.devices == cost(graph, boxes(1)).memory[part]


def test_a_step_of_tofu_moves_the_fewest_bytes():
    checked = 0
    for seed in range(40):
        graph = random_graph(Random(seed), 3, dims=(2, 4))
        axes = StepBuilder(graph, without_groups(graph))
        step = axes.step(2)
        counts = [*map(len, step.operators), *map(len, step.values)]
        if np.prod(counts) > 20000:
            continue
        checked += 1

        def bytes(choice: tuple[int, ...], step=step) -> float:
            n = len(step.operators)
            own = sum(float(o[choice[i]]) for i, o in enumerate(step.own))
            return own + sum(float(t[choice[i], choice[n + j]]) for (i, j), t in step.edges.items())

        operators, values = fewest_bytes(step)
        best = min(map(bytes, product(*map(range, counts))))
        assert bytes((*operators, *values)) == best
    assert checked > 15


def test_unrolled_steps_are_one_group():
    few, many = (build("lstm_stack", **{**SMALL["lstm_stack"], "steps": steps}) for steps in (6, 9))
    groups = [coarsen(g).operators.values() for g in (few, many)]
    count = [len(set(g)) for g in groups]
    # What takes the steps apart, and puts them together, is of its own shape for each.
    assert count[1] - count[0] <= 3
    assert len(groups[1]) - len(groups[0]) > 10
    machine = boxes(2, 2)
    coarse, fine = (cost(tofu(few, machine, coarse=c), machine).bytes for c in (True, False))
    assert coarse <= 1.1 * fine


def test_no_reduction_divides_nothing_along_what_is_summed():
    graph = build("mlp", batch=64, hidden=64, layers=3, classes=64)
    plan = tofu(graph, boxes(2, 2), "tofu-no-reduction")
    made = [v for n in plan.nodes() if n in nodes_with_gradient(plan) and n.is_compute for v in n.results if v.shape]
    assert all(v.type.sum == 1 for v in made)
    assert cost(plan, boxes(2, 2)).bytes >= cost(tofu(graph, boxes(2, 2)), boxes(2, 2)).bytes
