"""Every model of the zoo: its published size, its text, and its loss and gradients against PyTorch by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unity_ir.dialects.convert import from_graph, to_graph
from unity_ir.errors import UnityError
from unity_ir.models import build, from_text, names
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, Node, Optimizer, erase, leaf, rewrite
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.types import tensor_type

Weights = Mapping[str, Tensor]

PUBLISHED = {
    "bert_large": 335_174_458,  # transformers' BertForMaskedLM of bert-large-uncased
    "gpt2": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "mlp": 16 * 8192 * 8192,
}
"""Parameters."""

SMALL: dict[str, dict[str, int]] = {
    "bert_large": {"batch": 2, "sequence": 5, "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 11},
    "gpt2": {"batch": 2, "sequence": 5, "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 11},
    "llama3_8b": {
        **{"batch": 2, "sequence": 5, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2},
        **{"intermediate": 12, "vocabulary": 11},
    },
    "mlp": {"batch": 6, "hidden": 8, "layers": 3, "classes": 5},
}


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def mlp(w: Weights, x: Tensor, labels: Tensor) -> Tensor:
    x = F.relu(linear(w, "dense0", x))
    return F.cross_entropy(linear(w, "dense2", F.relu(linear(w, "dense1", x))), labels)


def gpt2(w: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    x = w["wte.weight"][tokens] + w["wpe.weight"]
    for i in range(2):
        qkv = linear(w, f"h.{i}.attn.c_attn", layer_norm(w, f"h.{i}.ln_1", x)).chunk(3, -1)
        x = x + linear(w, f"h.{i}.attn.c_proj", sdpa(*(heads(t, 2) for t in qkv), causal=True))
        h = F.gelu(linear(w, f"h.{i}.mlp.c_fc", layer_norm(w, f"h.{i}.ln_2", x)))
        x = x + linear(w, f"h.{i}.mlp.c_proj", h)
    return F.cross_entropy((layer_norm(w, "ln_f", x) @ w["wte.weight"].T).flatten(0, 1), labels.flatten())


def bert_large(w: Weights, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
    words, kinds = w["embeddings.word_embeddings.weight"], w["embeddings.token_type_embeddings.weight"]
    x = words[tokens] + kinds[segments] + w["embeddings.position_embeddings.weight"]
    x = layer_norm(w, "embeddings.LayerNorm", x, 1e-12)
    for i in range(2):
        name = f"encoder.layer.{i}"
        qkv = [heads(linear(w, f"{name}.attention.self.{part}", x), 2) for part in ("query", "key", "value")]
        h = linear(w, f"{name}.attention.output.dense", sdpa(*qkv, causal=False))
        x = layer_norm(w, f"{name}.attention.output.LayerNorm", x + h, 1e-12)
        h = linear(w, f"{name}.output.dense", F.gelu(linear(w, f"{name}.intermediate.dense", x)))
        x = layer_norm(w, f"{name}.output.LayerNorm", x + h, 1e-12)
    x = layer_norm(w, "predictions.transform.LayerNorm", F.gelu(linear(w, "predictions.transform.dense", x)), 1e-12)
    return F.cross_entropy((x @ words.T + w["predictions.bias"]).flatten(0, 1), labels.flatten())


def rotate(x: Tensor) -> Tensor:
    """As complex numbers turned by an angle."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]), 500000.0 ** (-torch.arange(half, dtype=x.dtype) / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def llama3_8b(w: Weights, tokens: Tensor, labels: Tensor) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-5)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(2):
        name = f"model.layers.{i}"
        h = norm(f"{name}.input_layernorm", x)
        q, k, v = (
            heads(linear(w, f"{name}.self_attn.{part}_proj", h), n) for part, n in (("q", 4), ("k", 2), ("v", 2))
        )
        x = x + linear(w, f"{name}.self_attn.o_proj", sdpa(rotate(q), rotate(k), v, causal=True))
        h = norm(f"{name}.post_attention_layernorm", x)
        h = F.silu(linear(w, f"{name}.mlp.gate_proj", h)) * linear(w, f"{name}.mlp.up_proj", h)
        x = x + linear(w, f"{name}.mlp.down_proj", h)
    return F.cross_entropy(linear(w, "lm_head", norm("model.norm", x)).flatten(0, 1), labels.flatten())


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "bert_large": bert_large,
    "gpt2": gpt2,
    "llama3_8b": llama3_8b,
    "mlp": mlp,
}


def test_every_model_is_tested():
    assert set(names()) == set(PUBLISHED) == set(SMALL) == set(BY_HAND)


@pytest.mark.parametrize("name", names())
def test_has_the_published_number_of_parameters(name: str):
    assert sum(w.types[0].elements for w in build(name).weights()) == PUBLISHED[name]


@pytest.mark.parametrize("name", names())
def test_reads_back_and_is_its_own_erasure(name: str):
    graph = build(name, **SMALL[name])
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


@pytest.mark.parametrize("name", names())
def test_loss_and_gradients_equal_pytorch(name: str):
    graph = differentiate(in_double(build(name, **SMALL[name])), Optimizer())
    random = np.random.default_rng(0)
    below = {"segments": 2, "tokens": 11, "labels": 5}
    inputs = {
        n.name: random.integers(0, below[n.name], n.types[0].shape)
        if n.types[0].is_integer
        else random.standard_normal(n.types[0].shape)
        for n in graph.inputs
    }
    weights = {n.name: random.standard_normal(n.types[0].shape) for n in graph.weights()}
    values = interpret(graph, inputs, weights)

    at = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    loss = BY_HAND[name](at, **{n: torch.tensor(a) for n, a in inputs.items()})
    loss.backward()
    assert float(values[graph.outputs[0]]) == pytest.approx(loss.item(), rel=1e-9)
    for update in graph.updates:
        want = at[update.weight.node.name].grad
        assert want is not None
        np.testing.assert_allclose(values[update.grad], want.numpy(), atol=1e-9, err_msg=update.weight.node.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt3", "no model 'gpt3'; known are bert_large"),
        ("gpt2,depth=2", "gpt2 has no key 'depth'; it has batch, sequence, layers"),
        ("gpt2,layers", "'layers' is not key=number"),
        ("gpt2,layers=-1", "'layers=-1' is not key=number"),
        ("gpt2,layers=0", "layers is 0; it must be 1 or more"),
        ("gpt2,hidden=10", "pcg.split_heads: "),
        ("builder", "no model 'builder'"),
    ],
)
def test_what_is_no_model_is_refused(text: str, message: str):
    with pytest.raises(UnityError, match=r"^[^\n]+$") as error:
        from_text(text)
    assert message in str(error.value)
