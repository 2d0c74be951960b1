"""Recipes compute what the model does, move the bytes of the papers' formulas, and refuse what they cannot express."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import boxes
from recipes import bytes_per_device, check_gradients, parsed
from zoo import SMALL

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import build
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.freeze import freeze
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import apply, leaf, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import place
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.schedule import AHEAD
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees, expert_degrees, recipe
from unity_ir.search.choose.candidates import BaselineKind, Baselines
from unity_ir.simulate.report import simulated

pytestmark = pytest.mark.slow

SIZES = {"f32": (4, 4), "bf16": (2, 4), "bf16,reduce=bf16": (2, 2)}
"""Bytes of an element of a weight as it is moved, and of its gradient as it is summed."""


def a100s(*sizes: int) -> Machine:
    """Levels of these sizes of devices that compute in bf16, with links on which nothing costs anything to start."""
    return replace(boxes(*sizes), device=replace(load("dgx-a100:1").device, launch=0.0))


def in_precision(graph: Graph, precision: str) -> Graph:
    if precision == "f32":
        return graph
    return mixed_precision(graph, "bf16", "bf16" if precision.endswith("reduce=bf16") else "f32")


TRANSFORMER = {"layers": 2, "hidden": 16, "heads": 4, "vocabulary": 24, "sequence": 8, "batch": 4}
TRANSFORMERS = {
    "gpt2": TRANSFORMER,
    "llama3_8b": {**TRANSFORMER, "kv_heads": 4, "intermediate": 8},
    "bert_large": TRANSFORMER,
}

# --- what plans compute


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "degrees",
    [
        "zero=2",
        "zero=2,shards=2",
        "zero=3",
        "tp=2",
        "tp=2,sp=true",
        "tp=4,sp=true",
        "tp=2,zero=1,sp=true",
        "tp=2,zero=3",
    ],
)
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_recipes_of_transformers_have_the_serial_gradients(model: str, degrees: str):
    serial, machine = build(model, **TRANSFORMERS[model]), boxes(2, 2)
    check_gradients(serial, recipe(serial, machine, parsed(degrees)), machine)


SENDS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("sp", [False, True])
def test_adapters_of_low_rank_leave_heads_divided(sp: bool, rank: int):
    """An adapter's second product is divided by columns, as the layer beside it: only its small input is gathered."""
    machine = boxes(2)
    serial, plain = (build("llama3_8b", **{**TRANSFORMERS["llama3_8b"], "hidden": 32}, lora=r) for r in (rank, 0))
    plain = freeze(plain, "*,!*.q_proj.*,!*.v_proj.*")
    plans = [recipe(graph, machine, Degrees(tp=2, sp=sp)) for graph in (serial, plain)]
    check_gradients(serial, plans[0], machine)
    adapted, large = (
        sorted(m.kind for m, _ in cost(plan, machine).moves if m.elements * 2 >= 4 * 8 * 32 and m.kind in SENDS)
        for plan in plans
    )
    assert adapted == large


@pytest.mark.parametrize("degrees", ["zero=2", "zero=3", "tp=2", "tp=2,zero=1"])
@pytest.mark.parametrize("model", ["mlp", "dlrm", "xdl", "alexnet", "moe"])
def test_recipes_of_other_models_have_the_serial_gradients(model: str, degrees: str):
    more = {"heads": 2, "kv_heads": 2} if model == "moe" else {}
    serial, machine = build(model, **{**SMALL[model], "batch": 8, **more}), boxes(2, 2)
    check_gradients(serial, recipe(serial, machine, parsed(degrees)), machine)


# --- the bytes that plans move, as the papers have them


@pytest.mark.parametrize("precision", SIZES)
def test_bytes_of_zero_are_those_of_its_paper(precision: str):
    """
    ZeRO, section 7: all-reduced gradients are 2 W; with ZeRO-1 and 2 W are gathered and W reduce-scattered, with ZeRO-3
    W are gathered twice; here W has the bytes of its type, for weights the computed one and for gradients the one they
    are summed in. No backward reads the first weight, which is gathered once.
    """
    serial = in_precision(build("mlp", batch=16, hidden=64, layers=3, classes=64), precision)
    machine, n, elements = a100s(2, 4), 8, 3 * 64 * 64
    weight, grad = SIZES[precision]
    expected = {
        "zero=0": 2 * elements * grad * (n - 1) / n,
        "zero=1": elements * (weight + grad) * (n - 1) / n,
        "zero=2": elements * (weight + grad) * (n - 1) / n,
        "zero=2,shards=4": elements * (weight + grad) * 3 / 4 + 2 * elements / 4 * grad * 1 / 2,
        "zero=3": (elements * (2 * weight + grad) - 64 * 64 * weight) * (n - 1) / n,
    }
    for degrees, size in expected.items():
        plan = recipe(serial, machine, parsed(degrees))
        assert bytes_per_device(plan, machine) == size, degrees
        assert cost(plan, machine).bytes == n * size, degrees


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("precision", SIZES)
def test_bytes_of_zero_with_micro_batches(precision: str, count: int):
    """
    Gradients are summed once with ZeRO-0 and 1, in every micro-batch with ZeRO-2 and 3; weights are gathered once, but
    with ZeRO-3 twice in every micro-batch. No backward reads the first weight, which is gathered once.
    """
    serial = in_precision(build("mlp", batch=16 * count, hidden=64, layers=3, classes=64), precision)
    machine, n, elements, first = a100s(2, 4), 8, 3 * 64 * 64, 64 * 64
    weight, grad = SIZES[precision]
    expected = {
        "zero=0": 2 * elements * grad,
        "zero=1": elements * (weight + grad),
        "zero=2": elements * (weight + count * grad),
        "zero=3": (elements - first) * count * 2 * weight + first * weight + elements * count * grad,
    }
    for degrees, size in expected.items():
        options = {"zero": parsed(degrees).zero}
        plan = run(serial, machine, "degrees", options=options, micro_batches=count)
        assert bytes_per_device(plan.graph, machine) == size * (n - 1) / n, degrees
        assert plan.cost.bytes == size * (n - 1), degrees


def test_zero3_holds_no_gathered_weight_but_those_about_to_be_read():
    """
    Of a deep network ZeRO-2 holds every gathered weight until its backward; ZeRO-3 those of a few layers at once
    (`AHEAD` gathers are under way beside those that are read).
    """
    serial, machine = in_precision(build("mlp", batch=8, hidden=2048, layers=24, classes=2048), "f32"), a100s(8)
    sgd = Optimizer()
    plans = {zero: recipe(serial, machine, Degrees(zero=zero)) for zero in (2, 3)}
    held = {zero: cost(plan, machine, sgd).memory for zero, plan in plans.items()}
    whole = 2048 * 2048 * 4
    assert held[2]["activations"] - held[3]["activations"] == 23 * whole
    assert {k: v for k, v in held[2].items() if k != "activations"} == {
        k: v for k, v in held[3].items() if k != "activations"
    }
    peaks = {zero: simulated(plan, machine, sgd).peak for zero, plan in plans.items()}
    assert peaks[2] - peaks[3] >= (23 - 2 * AHEAD) * whole


@pytest.mark.parametrize("precision", SIZES)
def test_fsdp_gathers_every_weight_by_one_call_over_all_devices(precision: str):
    serial = in_precision(build("gpt2", **{**TRANSFORMER, "batch": 8}), precision)
    machine = a100s(2, 4)
    plan = run(serial, machine, "fsdp").graph
    moves = cost(training_step(plan, Optimizer(), machine.mesh), machine).moves
    crossing = [(m.kind, m.group) for m, _ in moves if m.kind not in ("retype", "slice")]
    weights = len(serial.weights())
    assert sorted(crossing) == [("all_gather", 8)] * weights + [("reduce_scatter", 8)] * weights
    assert {d for m, d in moves if m.kind == "all_gather"} == {"f32" if precision == "f32" else "bf16"}
    elements = sum(n.types[0].elements for n in serial.weights())
    assert bytes_per_device(plan, machine) == elements * sum(SIZES[precision]) * 7 / 8


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("precision", SIZES)
def test_bytes_of_tensor_parallelism_are_those_of_megatron(precision: str, sp: bool):
    """
    Megatron-LM, section 3: 4 all-reduces of the activations in each layer, one of the embedding and one of the head's
    gradient, and, of the loss, one number per token of each of its sums. With sequence parallelism they are as many
    reduce-scatters and all-gathers, and gradients of norms are summed over all devices.
    """
    b, s, h, v, f, layers, t, d = 4, 8, 16, 24, 32, 2, 4, 2
    serial = in_precision(
        build(
            "llama3_8b", batch=b, sequence=s, layers=layers, hidden=h, heads=4, kv_heads=4, intermediate=f, vocabulary=v
        ),
        precision,
    )
    machine = a100s(d, t)
    weight, grad = SIZES[precision]
    tokens = b // d * s
    ring = 2 * (t - 1) / t
    activations = (4 * layers + 2) * ring * tokens * h * weight
    # The largest logit of every device, the sum of exponentials, and the label's score.
    loss = (t - 1) * tokens * 4 + 2 * ring * tokens * 4
    divided = (layers * (4 * h * h + 3 * h * f) + 2 * v * h) / t
    norms = (2 * layers + 1) * h
    gradients = 2 * (d - 1) / d * divided * grad
    of_norms = 2 * norms * grad * ((d * t - 1) / (d * t) if sp else (d - 1) / d)
    plan = recipe(serial, machine, Degrees(tp=t, sp=sp))
    assert bytes_per_device(plan, machine) == activations + loss + gradients + of_norms


@pytest.mark.parametrize("precision", SIZES)
def test_a_fused_product_costs_an_all_to_all_of_its_weight_and_gradient(precision: str):
    """Heads are divided as if queries, keys and values were apart: no activation is moved but Megatron-LM's."""
    serial, machine = in_precision(build("gpt2", **TRANSFORMER), precision), a100s(4)
    plan = recipe(serial, machine, Degrees(tp=4))
    placement = place(plan, machine.mesh)
    heads = [a for n, a in placement.assignments.items() if n.op == "attention"]
    assert heads == [("h", "h")] * 2
    moves = cost(training_step(plan, Optimizer(), machine.mesh), machine).moves
    h, s, b = (TRANSFORMER[key] for key in ("hidden", "sequence", "batch"))
    activations = [m for m, _ in moves if m.kind == "all_reduce" and m.elements == b * s * h]
    assert len(activations) == 4 * 2 + 2
    to_columns = [m.elements for m, _ in moves if m.kind == "all_to_all"]
    assert to_columns == [h * h // 4] * 2 * 2 * 3


MIXTURE = {**TRANSFORMER, "kv_heads": 4, "intermediate": 24, "experts": 8, "chosen": 2, "batch": 8}


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_cost_four_exchanges_of_their_slots_per_layer(ep: int):
    """And no sums of their weights' gradients but over the devices that have the same experts."""
    serial, machine = build("moe", **MIXTURE, dispatch="sparse", capacity=100), a100s(2, 2)
    plan = recipe(serial, machine, Degrees(ep=ep))
    placed = place(plan, machine.mesh)
    weights = [n for n in plan.weights() if ".experts." in n.name]
    assert {n.types[0].degrees for n in weights} == {(ep, 1, 1)}
    products = [n for n in placed.assignments if n.op == "expert_matmul"]
    assert [placed.assignments[n] for n in products] == [("r1", "e") if ep == 2 else ("e", "e")] * 6
    moves = [m for m, _ in cost(training_step(plan, Optimizer(), machine.mesh), machine).moves]
    slots = MIXTURE["batch"] * MIXTURE["sequence"] * MIXTURE["chosen"]
    assert [m.elements for m in moves if m.kind == "all_to_all"] == [slots * MIXTURE["hidden"] // 4] * 4 * 2
    expert = MIXTURE["experts"] * MIXTURE["hidden"] * MIXTURE["intermediate"] // ep
    assert sum(m.kind == "all_reduce" and m.elements == expert for m in moves) == (6 if ep == 2 else 0)


def test_expert_parallelism_of_every_degree_is_a_baseline():
    """Also of those that are made without a search: joint compares the graph without rewrites with these alone."""
    serial, machine = build("moe", **MIXTURE, dispatch="sparse", capacity=100), a100s(2, 2)
    kinds: tuple[BaselineKind, ...] = ("usual", "quick")
    for kind in kinds:
        found = {c.name: c.graph for c in Baselines(machine, Optimizer())((serial, kind))}
        for ep in (2, 4):
            assert found[f"degrees,zero=2,ep={ep}"] == recipe(serial, machine, Degrees(zero=2, ep=ep))
    assert expert_degrees(serial, machine) == [2, 4]
    assert expert_degrees(build("moe", **MIXTURE, dispatch="sparse"), machine) == []
    assert expert_degrees(build("moe", **MIXTURE, dispatch="sparse"), machine, ["routed_matmul"]) == [2, 4]


@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_experts_are_divided_where_there_are_fewer_groups_than_devices(group: int):
    serial, machine = build("moe", **MIXTURE, dispatch="sparse", capacity=100, group=group), boxes(2, 2)
    plan = recipe(serial, machine, Degrees(ep=4))
    assert {n.types[0].degrees for n in plan.weights() if ".experts." in n.name} == {(4, 1, 1)}
    check_gradients(serial, plan, machine)


@pytest.mark.parametrize("degrees", ["ep=2", "ep=4,zero=2", "ep=2,zero=3", "tp=2,ep=2", "tp=2,sp=true,ep=2,zero=1"])
def test_recipes_of_mixtures_have_the_serial_gradients(degrees: str):
    keys = {**MIXTURE, "layers": 1, "capacity": 75, "balance": 500}
    serial, machine = build("moe", **keys, dispatch="sparse"), boxes(2, 2)
    check_gradients(serial, recipe(serial, machine, parsed(degrees)), machine)


# --- what weights and degrees may be


def test_weights_are_seen_through_casts():
    """A graph whose casts are operators, as imported ones are, is divided as one whose weights have masters."""

    def cast(graph: Graph) -> Graph:
        def changed(node, operands):
            if node.op == "weight":
                return [apply("cast", node.results, {"to": "bf16"}).result]
            if node.op == "cross_entropy":
                operands = (apply("cast", operands[:1], {"to": "f32"}).result, operands[1])
            return rebuild(node, operands).results

        return rewrite(graph, changed)

    serial, machine = build("llama3_8b", **TRANSFORMERS["llama3_8b"]), a100s(2, 2)
    for strategy, options in (("expert", {}), ("megatron", {"tp": 2}), ("degrees", {"tp": 2, "zero": 1})):
        layouts: list[dict[str, object]] = []
        for graph in (cast(serial), mixed_precision(serial, "bf16")):
            plan = run(graph, machine, strategy, options=options).graph
            placed = place(plan, machine.mesh).layouts
            layouts.append({n.name: placed[n.result] for n in plan.weights()})
        assert layouts[0] == layouts[1], strategy
        assert any(role >= 0 for layout in layouts[0].values() for role in layout)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ("ep=0", "ep is 0; a degree is 1 or more"),
        ("ep=3", "ep=3 is no product of the innermost mesh axes of boxes, 2 x 2 x 2; use 1, 2, 4 or 8"),
        ("tp=2,ep=8", "ep=8 is no product of the innermost mesh axes of boxes, 2 x 2; use 1, 2 or 4"),
        ("tp=2,ep=2", "ep=2 divides experts that take some tokens each, which this graph lacks; leave it out"),
        ("tp=3", "tp=3 is no product of the innermost mesh axes of boxes, 2 x 2 x 2; use 1, 2, 4 or 8"),
        ("tp=2,dp=8", "dp=8 times tp=2 is 16 devices, but boxes has 8; use dp=4"),
        ("tp=8", "tp=8 does not divide 4 heads of attention; use a divisor of them"),
        ("dp=8", "input tokens has batch 4, which 8 devices do not divide; use another batch or number of devices"),
        ("tp=0", "tp is 0; a degree is 1 or more"),
        ("zero=4", "zero is 4; it is 0, 1, 2 or 3"),
        ("shards=4", "shards=4 is among how many devices ZeRO divides; add zero=2"),
        ("sp=true", "sp=true divides activations over the devices of tp; add tp=2 or more"),
        ("cp=3", "cp=3 is no product of the innermost mesh axes of boxes, 2 x 2 x 2; use 1, 2, 4 or 8"),
        ("cp=2,tp=2,dp=8", "dp=8 times cp=2 times tp=2 is 32 devices, but boxes has 8; use dp=2"),
        ("stripes=true", "stripes=true balances causal attention over the devices of cp; add cp=2 or more"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees: str, message: str):
    with pytest.raises(UnityError, match=f"^degrees: {message}"):
        recipe(build("gpt2", **TRANSFORMER), a100s(2, 4), parsed(degrees))


def test_only_transformers_have_a_sequence_and_recurrent_networks_no_tp():
    with pytest.raises(UnityError, match="sp=true divides the sequence of attention, which this graph lacks"):
        recipe(build("mlp", **{**SMALL["mlp"], "batch": 8}), a100s(2, 2), Degrees(tp=2, sp=True))
    for name in ("mlp", "dlrm", "lenet"):
        with pytest.raises(UnityError, match="cp divides the sequence of attention operators, which this graph lacks"):
            recipe(build(name, **{**SMALL[name], "batch": 8}), a100s(2, 2), Degrees(tp=2, cp=2))
    with pytest.raises(UnityError, match="tp=2 divides no recurrent network"):
        recipe(build("lstm_stack", **{**SMALL["lstm_stack"], "batch": 4}), a100s(2, 2), Degrees(tp=2))


def test_weights_of_odd_sizes_take_the_axes_that_divide_them():
    x = leaf("input", tensor_type((8, 12), "f32"), name="x")
    w = leaf("weight", tensor_type((12, 6), "f32"), name="w").result
    y = leaf("input", tensor_type((8, 6), "f32"), name="y")
    loss = apply("mse", [apply("matmul", [x.result, w]).result, y.result]).result
    machine = a100s(8)
    plan = recipe(Graph("odd", (x, y), (loss,)), machine, Degrees(zero=1))
    (weight,) = plan.weights()
    assert place(plan, machine.mesh).layouts[weight.result] == (0, 0, 1)


def test_the_gradient_of_a_fused_weight_is_reduce_scattered_over_the_data_parallel_devices():
    serial, machine = in_precision(build("gpt2", **TRANSFORMER), "bf16"), a100s(2, 4)
    plan = recipe(serial, machine, Degrees(tp=4, zero=1))
    moves = [m for m, _ in cost(training_step(plan, Optimizer(), machine.mesh), machine).moves if m.axes == (0,)]
    # What is all-reduced is of one dim, which tp divides: biases of 4 h.
    assert {m.elements for m in moves if m.kind == "all_reduce"} == {TRANSFORMER["hidden"]}
    fused = 3 * TRANSFORMER["hidden"] ** 2 // 4
    assert [m.elements for m in moves if m.kind == "reduce_scatter"].count(fused) == TRANSFORMER["layers"]
