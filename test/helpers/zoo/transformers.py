"""Small instances of the zoo's models, and the same models written by hand in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]


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
