"""Recipes of imported modules: the gradients of the serial graph, the bytes of the formulas, and nothing left whole."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch
from extent import sample
from graphs import boxes
from recipes import bytes_per_device, check_gradients, parsed
from torch_recipes import BATCH, HIDDEN, LAYERS, MODULES, SEQUENCE

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.frontends.torch import from_torch
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import place
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.attention import has_sequence
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.tdl.counts import contraction_flops

pytestmark = pytest.mark.slow

TRANSFORMERS = ("fused", "separate", "written", "gpt2", "llama", "bert")
FUSED = ("fused", "gpt2")
SPLIT = {"dim": 2, "sizes": (16, 16, 16)}
OTHERS = ("network", "recommender")


@cache
def imported(name: str) -> Graph:
    if name in ("gpt2", "llama", "bert"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, inputs, loss = MODULES[name]()
    return from_torch(module, inputs, loss=loss).graph


CASES = [
    (name, degrees)
    for degrees in ("tp=4,sp=true", "tp=2,zero=3", "zero=1", "tp=2", "tp=2,zero=2,sp=true", "zero=2,shards=2")
    for name in (*TRANSFORMERS, *OTHERS)
    if "sp" not in degrees or name in TRANSFORMERS
]
CASES += [("adapted", degrees) for degrees in ("tp=2", "tp=4,sp=true", "tp=2,zero=3")]
CONTEXT = [(name, degrees) for name in ("fused", "gpt2", "llama", "bert") for degrees in ("cp=4", "cp=2,tp=2,sp=true")]
CONTEXT += [(name, "cp=2,stripes=true") for name in ("fused", "separate")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "degrees"), [*sample(CASES, 5), *sample(CONTEXT, 3)])
def test_recipes_have_the_serial_gradients(name: str, degrees: str):
    serial, machine = imported(name), boxes(2, 2)
    check_gradients(serial, recipe(serial, machine, parsed(degrees)), machine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("written", "degrees: cp divides the sequence of attention operators, which this graph lacks; leave it out"),
        ("bert", "stripes: they balance causal attention of a forward graph, which this one lacks; leave them out"),
        ("llama", r"stripes: pcg\.slice, after pcg\.attention, depends on the order of tokens; leave stripes out"),
    ],
)
def test_sequences_that_are_not_divided(name: str, message: str):
    """Attention of several operators; without a causal mask; where logits are sliced before the loss."""
    with pytest.raises(UnityError, match=f"^{message}$"):
        recipe(imported(name), boxes(2, 2), parsed("cp=2" if name == "written" else "cp=2,stripes=true"))


def test_heads_that_no_products_of_their_own_make_are_refused():
    """Though tp divides their number: a gelu is between the product of queries, keys and values, and its split."""
    x = leaf("input", tensor_type((4, 8, 16), "f32"), name="x")
    weight = leaf("weight", tensor_type((16, 48), "f32"), name="w").result
    parts = apply("split", [apply("gelu", [apply("matmul", [x.result, weight]).result]).result], SPLIT).results
    heads = [apply("split_heads", [p], {"heads": 2}).result for p in parts]
    h = apply("attention", heads, {"scale": 1.0}).result
    loss = apply("mse", [apply("merge_heads", [h]).result, x.result]).result
    with pytest.raises(UnityError, match=r"^degrees: tp=2 leaves 2 heads of attention whole, since no products"):
        recipe(Graph("f", (x,), (loss,)), boxes(2), Degrees(tp=2))


def root(value: Value) -> Node:
    """What a value of a plan is, moved, cast, or a part of."""
    while value.node.is_parallel or value.node.op in ("cast", "split"):
        value = value.node.operands[0]
    return value.node


def reads_weight(node: Node) -> bool:
    """Whether a node of a plan multiplies a weight matrix, or looks up in a table."""
    if not any(root(v).op == "weight" and len(v.shape) == 2 for v in node.operands):
        return False
    return contraction_flops(node.analysis.bound) > 0 or any(v.type.is_integer for v in node.operands)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", [*TRANSFORMERS, "adapted", *OTHERS])
def test_tensor_parallelism_divides_all_dense_layers_tables_and_heads(name: str, devices: int):
    """
    Of transformers every product with a weight, and heads; of the network, dense layers; of the recommender, tables.
    Their weights rest in as many pieces. A table of positions may be left whole.
    """
    serial, tp = imported(name), 4
    machine = boxes(devices // tp, tp) if devices > tp else boxes(tp)
    plan = recipe(serial, machine, Degrees(tp=tp))
    placement = place(plan, machine.mesh)
    tensor = range(len(machine.mesh.sizes))[-2:]

    def is_divided(node: Node) -> bool:
        if node.op == "attention" or "conv" in node.op:
            return node.op == "attention"
        is_table = any(v.type.is_integer for v in node.operands)
        return reads_weight(node) and (is_table if name == "recommender" else True)

    nodes = [n for n in placement.assignments if is_divided(n)]
    for node in nodes:
        assert all(isinstance(placement.assignments[node][axis], str) for axis in tensor), node.op
        for weight in map(root, node.operands):
            if weight.op == "weight" and len(weight.types[0].shape) == 2:
                assert prod(weight.types[0].degrees) == tp, weight.name
    per_layer = {"fused": 6, "gpt2": 6, "llama": 7, "adapted": 10}.get(name, 6) + (name != "written")
    assert len(nodes) >= {"network": 2, "recommender": 3}.get(name, per_layer * LAYERS + 2)


BERT_HEAD = {False: 5, True: 2}
"""
Activations that the dense layer of BERT's head moves beside: it is by columns, and a norm reads its whole result. With
`sp` the rest is all-to-alls.
"""


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_activations_move_the_bytes_of_megatron(name: str, sp: bool):
    """All of the machine is `tp`, so no gradient of a matrix moves; what is as large are activations."""
    serial, t = imported(name), 4
    machine = boxes(t)
    moves = cost(training_step(recipe(serial, machine, Degrees(tp=t, sp=sp)), Optimizer(), machine.mesh), machine).moves
    large = BATCH * SEQUENCE * HIDDEN
    expected = ((4 * LAYERS + 2) * 2 + (BERT_HEAD[sp] if name == "bert" else 0)) * (t - 1) / t * large
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    found = sum(m.traffic(machine.mesh) for m, _ in moves if m.kind in kinds and m.elements * t >= large)
    assert found / t == expected


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_product_costs_an_all_to_all_of_its_weight_and_gradient(name: str):
    """Whether the weight is [in, out], as in GPT-2, or [out, in], as of `nn.Linear`."""
    serial, t = imported(name), 4
    machine = boxes(t)
    plan = recipe(serial, machine, Degrees(tp=t))
    moves = cost(training_step(plan, Optimizer(), machine.mesh), machine).moves
    to_columns = [m.elements for m, _ in moves if m.kind == "all_to_all"]
    assert to_columns == [HIDDEN * HIDDEN // t] * LAYERS * 2 * 3
    assert not [m for m, _ in moves if m.kind == "all_gather" and m.elements * t == HIDDEN * HIDDEN]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_loss_is_parallel_over_the_vocabulary(name: str):
    """Also where logits are sliced before it, as models of the transformers library do."""
    serial, machine = imported(name), boxes(4)
    plan = recipe(serial, machine, Degrees(tp=4))
    assert not [n for n in plan.nodes() if n.op == "cross_entropy"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", sample(["separate", "network", "recommender", "llama"], 2))
def test_bytes_of_zero_are_those_of_its_paper(name: str, zero: int):
    serial, machine, n = imported(name), boxes(2, 4), 8
    plan = recipe(serial, machine, Degrees(zero=zero))
    kept = {w.name: w.types[0].elements for w in serial.weights()}
    elements = sum(kept.values()) * 4 * (n - 1) / n
    found = bytes_per_device(plan, machine)
    # Of two batch norms three statistics and two of their gradients, a number for each channel.
    more = 2 * 5 * 16 * 4 * 2 * (n - 1) / n if name == "network" else 0
    if zero == 3:
        # What no backward reads is gathered once.
        assert 2 * elements + more <= found <= 3 * elements + more
    else:
        assert found == 2 * elements + more


# --- what is a transformer


def test_softmax_alone_is_no_attention():
    """A recommender that weighs its candidates by a softmax of a dense layer is one, and has no sequence."""
    table = leaf("weight", tensor_type((64, 16), "f32"), name="table").result
    ids = leaf("input", tensor_type((8,), "i64"), name="ids")
    weight = leaf("weight", tensor_type((16, 8), "f32"), name="w").result
    y = leaf("input", tensor_type((8, 8), "f32"), name="y")
    h = apply("softmax", [apply("matmul", [apply("embedding", [ids.result, table]).result, weight]).result]).result
    graph = Graph("f", (ids, y), (apply("mse", [h, y.result]).result,))
    assert not has_sequence(graph)
    with pytest.raises(UnityError, match="sp=true divides the sequence of attention, which this graph lacks"):
        recipe(graph, boxes(2), Degrees(tp=2, sp=True))
    plan = recipe(graph, boxes(2), Degrees(tp=2))
    assert {n.name: n.types[0].degrees for n in plan.weights()} == {"table": (1, 2), "w": (1, 1)}


def test_attention_written_out_is_one():
    assert has_sequence(imported("written"))
    assert not has_sequence(imported("recommender"))
    assert not has_sequence(imported("network"))
