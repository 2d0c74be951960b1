"""Every model of the zoo: its published size, its text, and its loss and gradients against PyTorch by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from products import graph_products
from torch.utils.flop_counter import FlopCounterMode
from zoo import BY_HAND, SMALL, by_hand, small

from unity_ir.dialects.convert import from_graph, to_graph
from unity_ir.errors import UnityError
from unity_ir.models import build, from_text, names
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase, rewrite
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Node, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.counts import contraction_flops

PUBLISHED = {
    "alexnet": 61_100_840,  # torchvision
    "bert_large": 335_174_458,  # transformers' BertForMaskedLM of bert-large-uncased
    "deepseek_v3": 671_026_419_200,  # transformers' DeepseekV3ForCausalLM
    "gpt2": 124_439_808,
    "inception_v3": 27_161_264,  # torchvision, with the auxiliary classifier
    "lenet": 61_706,
    "llama3_8b": 8_030_261_248,
    "mlp": 16 * 8192 * 8192,
    "moe": 46_702_792_704,  # transformers' MixtralForCausalLM of Mixtral-8x7B
    "qwen3_moe": 30_532_122_624,  # transformers' Qwen3MoeForCausalLM of Qwen3-30B-A3B
    "resnet101": 44_549_160,  # torchvision
    "resnext50": 25_028_904,  # torchvision's resnext50_32x4d
    # Dense layers without biases, layer by layer, and tables of rows of 64.
    "candle_uno": (942 + 2 * 5270 + 2 * 2048) * 4192 + 5 * 7 * 4192**2 + (5 * 4192 + 2) * 4192 + 3 * 4192**2 + 4192,
    "dlrm": 64 * 512 + 512**2 + 512 * 64 + 576 * 1024 + 2 * 1024**2 + 1024 + 8 * 64_000_000,
    "xdl": 256 * 256 + 256 * 256 + 256 * 2 + 4 * 64_000_000,
    # A table, LSTM layers (4 gates of two products and two biases), dense layers.
    "rnnlm": 10000 * 2048 + 2 * 4 * 2048 * (2 * 2048 + 2) + 2049 * 10000,
    "rnntc": 20480 * 1024 + 4 * 4 * 1024 * (2 * 1024 + 2) + 1025 * 2,
    "nmt": 2 * 20480 * 1024 + 4 * 4 * 1024 * (2 * 1024 + 2) + 4 * 1024**2 + 1024 + 1025 * 20480,
    "lstm_stack": 4 * 4096 * (256 + 5 * 4096 + 6 * (4096 + 2)) + 4097 * 256,
    # Of the formula that gives ResNet-50 its published number; Tofu's Table 2 is below.
    "wresnet": 383_571_176,
}
"""Parameters."""


PACKED = [f"{name},separator=3" for name in ("deepseek_v3", "gpt2", "llama3_8b", "moe", "qwen3_moe")]
TEXTS = [*names(), "moe,dispatch=sparse", *PACKED]
SLOTS = [
    *("moe,dispatch=sparse,capacity=60,balance=300", "moe,dispatch=sparse,capacity=100,sequence=6,group=4"),
    *("qwen3_moe,capacity=130,group=10,balance=1000", "deepseek_v3,capacity=50,balance=100", "moe,balance=200,group=5"),
]
"""Experts that drop tokens, and losses that balance them."""


def test_every_model_is_tested():
    assert set(names()) == set(PUBLISHED) == set(SMALL) == set(BY_HAND)


def parameters(graph: Graph) -> int:
    return sum(w.types[0].elements for w in graph.weights())


@pytest.mark.parametrize("name", names())
def test_has_the_published_number_of_parameters(name: str):
    assert parameters(build(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama3_70b", 70_553_706_496), ("llama3_405b", 405_853_388_800), ("mixtral_8x7b", PUBLISHED["moe"])],
)
def test_a_further_size_has_the_published_number_of_parameters(name: str, published: int):
    graph = build(name)
    assert graph.name == name
    assert parameters(graph) == published
    assert sum(n.op == "attention" for n in build(name, layers=2).nodes()) == 2


def test_inception_without_its_auxiliary_classifier_has_the_published_number_of_parameters():
    weights = [w for w in build("inception_v3").weights() if not w.name.startswith("AuxLogits.")]
    assert sum(w.types[0].elements for w in weights) == 23_834_568


def test_wresnet_of_width_1_is_resnet_50():
    assert parameters(build("wresnet", width=1)) == 25_557_032


WRESNETS = {
    **{(50, 4): 4.2, (50, 6): 9.6, (50, 8): 17.1, (50, 10): 26.7},
    **{(101, 4): 7.8, (101, 6): 17.1, (101, 8): 30.6, (101, 10): 47.7},
    **{(152, 4): 10.5, (152, 6): 23.4, (152, 8): 41.7, (152, 10): 65.1},
}
"""Tofu, Table 2, by depth and width: GiB of weights, gradients and the optimizer's history."""

RNNS = {
    **{(6, 4096): 8.4, (8, 4096): 11.4, (10, 4096): 14.4},
    **{(6, 6144): 18.6, (8, 6144): 28.5, (10, 6144): 32.1},
    **{(6, 8192): 33.0, (8, 8192): 45.3, (10, 8192): 57.0},
}
"""Tofu, Table 2, by layers and hidden size."""


def tofu(graph: Graph) -> float:
    """
    How the table counts: three times the weights in float32 (section 7.1), these rounded to 0.1 GiB.

    All its numbers are multiples of 0.3; without the rounding first, half of them would be another.
    """
    return round(3 * round(parameters(graph) * 4 / 2**30, 1), 1)


@pytest.mark.parametrize(("depth", "width"), WRESNETS)
def test_wresnet_has_the_size_tofu_gives(depth: int, width: int):
    # 26.7 for 50 by 10 would be 8.9 GiB of weights. They are 8.81.
    want = 26.4 if (depth, width) == (50, 10) else WRESNETS[depth, width]
    assert tofu(build("wresnet", depth=depth, width=width, batch=1)) == want


@pytest.mark.parametrize(("layers", "hidden"), RNNS)
def test_lstm_stack_has_the_size_tofu_gives(layers: int, hidden: int):
    # Two of the table's are not on the line through the other two of their row: 28.5 would be 25.5 on it, 45.3 be 45.0.
    want = {(8, 6144): 25.5, (8, 8192): 45.0}.get((layers, hidden), RNNS[layers, hidden])
    assert tofu(build("lstm_stack", layers=layers, hidden=hidden, batch=1)) == want


@pytest.mark.slow
@pytest.mark.parametrize("text", [*TEXTS, *SLOTS])
def test_reads_back_and_is_its_own_erasure(text: str):
    name, keys = small(text)
    graph = build(name, **keys)
    func = from_graph(graph)
    func.verify()
    assert to_graph(func) == graph
    assert erase(graph) == graph


def in_double(graph: Graph) -> Graph:
    """The same graph over float64."""

    def double(node: Node, operands: Any) -> Any:
        if node.is_leaf and not node.types[0].is_integer:
            return leaf(node.op, tensor_type(node.types[0].shape, "f64"), None, **dict(node.attributes)).results
        return node.results if node.is_leaf else node.operator(*operands, **dict(node.attributes))

    return rewrite(graph, double)


@pytest.mark.slow
@pytest.mark.parametrize("text", [*TEXTS, *SLOTS])
def test_loss_and_gradients_equal_pytorch(text: str):
    check_gradients(text)


def test_deepseek_with_experts_in_every_layer():
    graph = build("deepseek_v3", **small("deepseek_v3,dense_layers=0")[1])
    assert not any(".mlp.gate_proj" in n.name for n in graph.weights())
    check_gradients("deepseek_v3,dense_layers=0")


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0, 30, 100, 400])
def test_experts_that_all_tokens_choose_or_none(capacity: int):
    """The biases that balance DeepSeek-V3's experts send every token to the first three of eight."""
    bias = np.array([30.0, 20.0, 10.0, *[-50.0] * 5])
    check_gradients(f"deepseek_v3,capacity={capacity},balance=100", {"e_score_correction_bias": bias})


def check_gradients(text: str, given: Mapping[str, np.ndarray[Any, Any]] | None = None) -> None:
    """Weights are random; one whose name ends as a key of `given` has that array."""
    name, keys = small(text)
    graph = differentiate(in_double(build(name, **keys)), Optimizer())
    random = np.random.default_rng(0)
    below = {"segments": 2, "labels": 5}
    inputs = {
        n.name: random.integers(0, below.get(n.name, 11), n.types[0].shape)
        if n.types[0].is_integer
        else random.standard_normal(n.types[0].shape)
        for n in graph.inputs
    }
    weights = {n.name: random.standard_normal(n.types[0].shape) for n in graph.weights()}
    for end, array in (given or {}).items():
        weights.update({name: array for name in weights if name.endswith(end)})
    values = interpret(graph, inputs, weights)

    at = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    loss = by_hand(name, keys, at, {n: torch.tensor(a) for n, a in inputs.items()})
    loss.backward()
    assert float(values[graph.outputs[0]]) == pytest.approx(loss.item(), rel=1e-9)
    for update in graph.updates:
        want = at[update.weight.node.name].grad
        assert want is not None
        np.testing.assert_allclose(values[update.grad], want.numpy(), atol=1e-9, err_msg=update.weight.node.name)


def test_experts_can_be_divided_all_the_way():
    graph = build("moe", **SMALL["moe"])
    experts = SMALL["moe"]["experts"]
    inside = [
        n for n in graph.nodes() if n.is_compute and len(n.types[0].shape) == 3 and n.types[0].shape[0] == experts
    ]
    assert {"expand", "batch_matmul", "silu", "mul", "reshape"} == {n.op for n in inside}
    assert all(n.analysis.result_dims[0][0] is not None for n in inside)
    joined = [n for n in graph.nodes() if n.op == "reduce_sum" and n.operands[0].node in inside]
    assert len(joined) == SMALL["moe"]["layers"]
    for node in joined:
        analysis = node.analysis
        assert analysis.operand_dims["x"][0] in analysis.splittable


def test_chosen_experts_can_be_divided_too():
    graph = build("moe", **SMALL["moe"], dispatch="sparse")
    routed = [n for n in graph.nodes() if n.op == "routed_matmul"]
    assert len(routed) == 3 * SMALL["moe"]["layers"]
    assert all({"v", "t0", "t1", "n", "k"} == set(n.analysis.splittable) for n in routed)
    # A quarter of the dense dispatch's experts are chosen.
    keys = {**SMALL["moe"], "experts": 8, "chosen": 2}
    dense, sparse = (build("moe", **keys, dispatch=dispatch) for dispatch in ("dense", "sparse"))
    of_experts = 3 * 2 * keys["batch"] * keys["sequence"] * keys["hidden"] * keys["intermediate"] * keys["layers"]
    assert graph_products(dense) - graph_products(sparse) == of_experts * (8 - 2)


def counted_by_pytorch(name: str, graph: Graph, keys: dict[str, int | str], backward: bool) -> int:
    """FLOPs of the model by hand, by shapes alone."""

    def empty(node: Node) -> torch.Tensor:
        (type,) = node.types
        dtype = torch.int64 if type.is_integer else torch.float32
        return torch.empty(type.shape, dtype=dtype, device="meta", requires_grad=node.op == "weight")

    with FlopCounterMode(display=False) as counter:
        weights, inputs = ({n.name: empty(n) for n in nodes} for nodes in (graph.weights(), graph.inputs))
        loss = by_hand(name, keys, weights, inputs)
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("text", TEXTS)
def test_forward_flops_are_those_pytorch_counts(text: str, size: str):
    name, keys = small(text)
    keys = keys if size == "small" else {k: v for k, v in keys.items() if isinstance(v, str)}
    graph = build(name, **keys)
    assert graph_products(graph) == counted_by_pytorch(name, graph, keys, backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_flops_of_a_step_are_those_pytorch_counts(text: str):
    name, keys = small(text)
    graph = build(name, **keys)
    step = graph_products(differentiate(graph, Optimizer()))
    for node in graph.nodes():
        if node.op in ("attention", "attention_ranges"):
            # Its gradient computes the scores again, one of its forward's two contractions. PyTorch, where it does not
            # fuse attention, keeps them.
            q, _, v = (operand.shape[-1] for operand in node.operands[:3])
            step -= contraction_flops(node.analysis.bound) * q // (q + v)
        elif node.op == "conv2d":
            # PyTorch's formula for the gradient of the weights takes each group to be of all channels.
            step += (int(node.attribute("groups")) - 1) * contraction_flops(node.analysis.bound)
    assert step == counted_by_pytorch(name, graph, keys, backward=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt3", "no model 'gpt3'; known are alexnet, bert_large"),
        ("gpt2,depth=2", "gpt2 has no key 'depth'; it has batch, sequence, layers"),
        ("gpt2,layers", "'layers' is not key=number"),
        ("gpt2,layers=-1", "layers is -1; it must be 1 or more"),
        ("gpt2,layers=--1", "'layers=--1' is not key=number"),
        ("gpt2,separator=-2", "separator is -2; it must be -1 or more"),
        ("gpt2,separator=50257", "separator is 50257; it must be a token, below 50257"),
        ("gpt2,layers=0", "layers is 0; it must be 1 or more"),
        ("gpt2,layers=few", "gpt2: layers is 'few'; it must be a number"),
        ("moe,dispatch=none", "--model: dispatch is 'none'; it must be dense or sparse"),
        ("moe,capacity=100", "--model: a capacity needs dispatch=sparse; with dense, experts compute every token"),
        ("qwen3_moe,group=128", "group is 128, but there is no capacity and no balance to use it"),
        ("deepseek_v3,capacity=100,group=96", "group is 96; it must divide the 4096 tokens"),
        ("moe,dispatch=sparse,capacity=-5", "moe: capacity is -5; it must be 0 or more"),
        ("moe,dispatch=1", "--model: dispatch is 1; it must be dense or sparse"),
        ("gpt2,hidden=10", "pcg.split_heads: "),
        ("wresnet,depth=18", "wresnet: depth is 18; it must be one of 14, 26, 50, 101, 152"),
        ("resnext50,groups=3", "conv2: 128 to 128 channels are not 3 equal groups"),
        ("deepseek_v3,dense_layers=-1", "dense_layers is -1; it must be 0 or more"),
        ("deepseek_v3,experts=100", "100 experts are not 8 equal groups of 2 or more, of which 4 can be chosen"),
        ("deepseek_v3,chosen_groups=1,chosen=33", "chosen is 33, but 1 groups have 32 experts"),
        ("builder", "no model 'builder'"),
        ("experts", "no model 'experts'"),
    ],
)
def test_what_is_no_model_is_refused(text: str, message: str):
    with pytest.raises(UnityError, match=r"^[^\n]+$") as error:
        from_text(text)
    assert message in str(error.value)
