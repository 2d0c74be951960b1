"""Transformers by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.common import Keys, Weights, linear

_DECODER = {
    **{"batch": 2, "sequence": 5, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2},
    **{"intermediate": 12, "vocabulary": 11},
}

SMALL: dict[str, dict[str, int]] = {
    "bert_large": {"batch": 2, "sequence": 5, "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 11},
    "gpt2": {"batch": 2, "sequence": 5, "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 11},
    "llama3_8b": _DECODER,
    "moe": {**_DECODER, "experts": 4, "chosen": 2},
    "qwen3_moe": {**_DECODER, "head": 6, "experts": 4, "chosen": 2},
    "deepseek_v3": {
        **{"batch": 2, "sequence": 5, "layers": 2, "dense_layers": 1, "hidden": 16, "heads": 4, "head": 6, "rotary": 4},
        **{"q_rank": 10, "kv_rank": 7, "dense_intermediate": 12, "intermediate": 9, "vocabulary": 11},
        **{"experts": 8, "chosen": 3, "groups": 4, "chosen_groups": 2},
    },
}


def layer_norm(w: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def rms_norm(w: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    causal = causal and mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2).flatten(2)


def documents(keys: Keys, tokens: Tensor) -> tuple[Tensor | None, Tensor]:
    """
    What a query may see [sample, 1, query, key], None for all before it, and the positions [sample, token] within
    documents, of which each ends with the separator.
    """
    if keys["separator"] < 0:
        return None, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    ends = tokens == keys["separator"]
    document = ends.cumsum(1) - ends.long()
    same = document[:, :, None] == document[:, None]
    seen = same & torch.ones_like(same[0]).tril()
    return seen[:, None], seen.sum(-1) - 1


def gpt2(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    mask, places = documents(keys, tokens)
    x = w["wte.weight"][tokens] + w["wpe.weight"][places]
    for i in range(keys["layers"]):
        qkv = linear(w, f"h.{i}.attn.c_attn", layer_norm(w, f"h.{i}.ln_1", x)).chunk(3, -1)
        x = x + linear(w, f"h.{i}.attn.c_proj", sdpa(*(heads(t, keys["heads"]) for t in qkv), True, mask))
        h = F.gelu(linear(w, f"h.{i}.mlp.c_fc", layer_norm(w, f"h.{i}.ln_2", x)))
        x = x + linear(w, f"h.{i}.mlp.c_proj", h)
    return F.cross_entropy((layer_norm(w, "ln_f", x) @ w["wte.weight"].T).flatten(0, 1), labels.flatten())


def bert_large(w: Weights, keys: Keys, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
    words, kinds = w["embeddings.word_embeddings.weight"], w["embeddings.token_type_embeddings.weight"]
    x = words[tokens] + kinds[segments] + w["embeddings.position_embeddings.weight"]
    x = layer_norm(w, "embeddings.LayerNorm", x, 1e-12)
    for i in range(keys["layers"]):
        name = f"encoder.layer.{i}"
        parts = ("query", "key", "value")
        qkv = [heads(linear(w, f"{name}.attention.self.{part}", x), keys["heads"]) for part in parts]
        h = linear(w, f"{name}.attention.output.dense", sdpa(*qkv, causal=False))
        x = layer_norm(w, f"{name}.attention.output.LayerNorm", x + h, 1e-12)
        h = linear(w, f"{name}.output.dense", F.gelu(linear(w, f"{name}.intermediate.dense", x)))
        x = layer_norm(w, f"{name}.output.LayerNorm", x + h, 1e-12)
    x = layer_norm(w, "predictions.transform.LayerNorm", F.gelu(linear(w, "predictions.transform.dense", x)), 1e-12)
    return F.cross_entropy((x @ words.T + w["predictions.bias"]).flatten(0, 1), labels.flatten())


def rotate(x: Tensor, base: float, places: Tensor) -> Tensor:
    """As complex numbers turned by an angle, [sample, head, place, feature] at `places` [sample, place]."""
    half = x.shape[-1] // 2
    each = torch.arange(half, dtype=x.dtype, device=x.device)
    angle = (places[..., None].to(x.dtype) * base ** (-each / half))[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def decoder(
    w: Weights, keys: Keys, tokens: Tensor, labels: Tensor, base: float, mlp: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """Llama's, with another `mlp` and another base of rotary positions."""
    x = w["model.embed_tokens.weight"][tokens]
    mask, places = documents(keys, tokens)
    counts = {"q": keys["heads"], "k": keys["kv_heads"], "v": keys["kv_heads"]}
    for i in range(keys["layers"]):
        name = f"model.layers.{i}"
        h = rms_norm(w, f"{name}.input_layernorm", x)
        q, k, v = (heads(linear(w, f"{name}.self_attn.{part}_proj", h), n) for part, n in counts.items())
        q, k = (rotate(t, base, places) for t in (q, k))
        x = x + linear(w, f"{name}.self_attn.o_proj", sdpa(q, k, v, True, mask))
        x = x + mlp(name, rms_norm(w, f"{name}.post_attention_layernorm", x))
    return F.cross_entropy(linear(w, "lm_head", rms_norm(w, "model.norm", x)).flatten(0, 1), labels.flatten())


def llama3_8b(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    def mlp(name: str, h: Tensor) -> Tensor:
        h = F.silu(linear(w, f"{name}.mlp.gate_proj", h)) * linear(w, f"{name}.mlp.up_proj", h)
        return linear(w, f"{name}.mlp.down_proj", h)

    return decoder(w, keys, tokens, labels, 500000.0, mlp)


def within_capacity(keys: Keys, chosen: Tensor, shares: Tensor) -> Tensor:
    """
    The shares of choices of experts, [sample, token, choice] both, that are within the expert's capacity, else 0; one
    choice after the other: in every group all first ones, then all second ones.
    """
    if not keys["capacity"]:
        return shares
    kept = torch.ones(chosen.shape, device=chosen.device)
    size = keys["group"] or chosen.shape[1]
    most = math.ceil(keys["capacity"] / 100 * size * keys["chosen"] / keys["experts"])
    flat = kept.flatten(0, 1)
    for first in range(0, len(flat), size):
        counts: Counter[int] = Counter()
        for choice in range(keys["chosen"]):
            for token in range(first, first + size):
                expert = int(chosen.flatten(0, 1)[token, choice])
                flat[token, choice] = float(counts[expert] < most)
                counts[expert] += 1
    return torch.where(kept > 0, shares, 0)


def balance(keys: Keys, gates: Tensor, chosen: Tensor) -> Tensor:
    """The weighted balance loss of a layer, from gates [sample, token, expert]; DeepSeek-V3's formulas (17) to (20)."""
    losses: list[Tensor] = []
    size = keys["group"] or chosen.shape[1]
    for first in range(0, chosen.shape[0] * chosen.shape[1], size):
        own, picked = (x.flatten(0, 1)[first : first + size] for x in (gates, chosen))
        frequency = torch.stack([(picked == e).sum() for e in range(keys["experts"])])
        frequency = frequency * keys["experts"] / (keys["chosen"] * size)
        losses.append((frequency * own.mean(0)).sum())
    return keys["balance"] * 1e-4 * torch.stack(losses).mean()


def moe(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    """
    Dense: every expert by itself, over all tokens, times its share of the gates that were chosen. Sparse: the chosen
    experts' weights, fetched for every token.
    """
    balances: list[Tensor] = []

    def mlp(name: str, h: Tensor) -> Tensor:
        name = f"{name}.block_sparse_moe"
        gates = linear(w, f"{name}.gate", h).softmax(-1)
        values, chosen = gates.topk(keys["chosen"])
        shares = within_capacity(keys, chosen, values / values.sum(-1, keepdim=True))
        balances.append(balance(keys, gates, chosen))
        if keys["dispatch"] == "sparse":
            w1, w2, w3 = (w[f"{name}.experts.w{i}.weight"][chosen] for i in (1, 2, 3))
            each = h[..., None, None, :]
            return (shares[..., None] * ((F.silu(each @ w1) * (each @ w3)) @ w2).squeeze(-2)).sum(-2)
        out = torch.zeros_like(h)
        for e in range(keys["experts"]):
            w1, w2, w3 = (w[f"{name}.experts.w{i}.weight"][e] for i in (1, 2, 3))
            share = torch.where(chosen == e, shares, 0).sum(-1, keepdim=True)
            out = out + share * ((F.silu(h @ w1) * (h @ w3)) @ w2)
        return out

    return decoder(w, keys, tokens, labels, 1000000.0, mlp) + sum(balances)


def experts_of(w: Weights, name: str, h: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The chosen experts' weights, fetched for every token."""
    gate, up, down = (w[f"{name}.{part}_proj.weight"][chosen] for part in ("gate", "up", "down"))
    each = h[..., None, None, :]
    return (shares[..., None] * ((F.silu(each @ gate) * (each @ up)) @ down).squeeze(-2)).sum(-2)


def gated(w: Weights, name: str, h: Tensor) -> Tensor:
    return linear(w, f"{name}.down_proj", F.silu(linear(w, f"{name}.gate_proj", h)) * linear(w, f"{name}.up_proj", h))


def qwen3_moe(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    x = w["model.embed_tokens.weight"][tokens]
    mask, places = documents(keys, tokens)
    counts = {"q": keys["heads"], "k": keys["kv_heads"], "v": keys["kv_heads"]}
    loss = torch.zeros((), dtype=x.dtype, device=x.device)
    for i in range(keys["layers"]):
        name = f"model.layers.{i}"
        h = rms_norm(w, f"{name}.input_layernorm", x, 1e-6)
        parts = {part: heads(linear(w, f"{name}.self_attn.{part}_proj", h), n) for part, n in counts.items()}
        q, k = (
            rotate(rms_norm(w, f"{name}.self_attn.{part}_norm", parts[part], 1e-6), 1000000.0, places) for part in "qk"
        )
        x = x + linear(w, f"{name}.self_attn.o_proj", sdpa(q, k, parts["v"], True, mask))
        h = rms_norm(w, f"{name}.post_attention_layernorm", x, 1e-6)
        gates = linear(w, f"{name}.mlp.gate", h).softmax(-1)
        values, chosen = gates.topk(keys["chosen"])
        shares = within_capacity(keys, chosen, values / values.sum(-1, keepdim=True))
        x = x + experts_of(w, f"{name}.mlp.experts", h, chosen, shares)
        loss = loss + balance(keys, gates, chosen)
    logits = linear(w, "lm_head", rms_norm(w, "model.norm", x, 1e-6))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + loss


def deepseek_v3(w: Weights, keys: Keys, tokens: Tensor, labels: Tensor) -> Tensor:
    x = w["model.embed_tokens.weight"][tokens]
    mask, places = documents(keys, tokens)
    head, rotary = keys["head"], keys["rotary"]
    loss = torch.zeros((), dtype=x.dtype, device=x.device)
    for i in range(keys["layers"]):
        name = f"model.layers.{i}"
        h, own = rms_norm(w, f"{name}.input_layernorm", x, 1e-6), f"{name}.self_attn"
        q = linear(w, f"{own}.q_b_proj", rms_norm(w, f"{own}.q_a_layernorm", linear(w, f"{own}.q_a_proj", h), 1e-6))
        q = heads(q, keys["heads"])
        q = torch.cat([q[..., :head], rotate(q[..., head:], 10000.0, places)], -1)
        latent = linear(w, f"{own}.kv_a_proj_with_mqa", h)
        shared = rotate(latent[:, None, :, -rotary:], 10000.0, places).expand(-1, keys["heads"], -1, -1)
        latent = rms_norm(w, f"{own}.kv_a_layernorm", latent[..., :-rotary], 1e-6)
        kv = heads(linear(w, f"{own}.kv_b_proj", latent), keys["heads"])
        h = sdpa(q, torch.cat([kv[..., :head], shared], -1), kv[..., head:], True, mask)
        x = x + linear(w, f"{own}.o_proj", h)
        h = rms_norm(w, f"{name}.post_attention_layernorm", x, 1e-6)
        if i < keys["dense_layers"]:
            x = x + gated(w, f"{name}.mlp", h)
            continue
        scores = linear(w, f"{name}.mlp.gate", h).sigmoid()
        biased = (scores + w[f"{name}.mlp.gate.e_score_correction_bias"]).detach()
        grouped = biased.unflatten(-1, (keys["groups"], -1))
        _, best = grouped.topk(2)[0].sum(-1).topk(keys["chosen_groups"])
        left = torch.zeros_like(grouped).scatter(-2, best[..., None].expand(*best.shape, grouped.shape[-1]), 1.0)
        _, chosen = torch.where(left > 0, grouped, -torch.inf).flatten(-2).topk(keys["chosen"])
        loss = loss + balance(keys, scores / scores.sum(-1, keepdim=True), chosen)
        shares = scores.gather(-1, chosen)
        shares = within_capacity(keys, chosen, 2.5 * shares / shares.sum(-1, keepdim=True))
        x = x + experts_of(w, f"{name}.mlp.experts", h, chosen, shares) + gated(w, f"{name}.mlp.shared_experts", h)
    logits = linear(w, "lm_head", rms_norm(w, "model.norm", x, 1e-6))
    # Gradients of 0, where PyTorch has none.
    zero = sum(0.0 * w[name].sum() for name in w if name.endswith("correction_bias"))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + loss + zero


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "bert_large": bert_large,
    "deepseek_v3": deepseek_v3,
    "gpt2": gpt2,
    "llama3_8b": llama3_8b,
    "moe": moe,
    "qwen3_moe": qwen3_moe,
}
