"""Qwen3-30B-A3B (Qwen, 2025): decoder of 128 small experts, 8 per token, with norms of queries and keys."""

from unity_ir.models.builder import Builder
from unity_ir.models.experts import Mixture, chosen_experts, chosen_shares
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 1,
    sequence: int = 4096,
    layers: int = 48,
    hidden: int = 2048,
    heads: int = 32,
    kv_heads: int = 4,
    head: int = 128,
    intermediate: int = 768,
    experts: int = 128,
    chosen: int = 8,
    vocabulary: int = 151936,
    separator: int = -1,
    capacity: int = 0,
    group: int = 0,
    balance: int = 0,
) -> Graph:
    """
    Build Qwen3's mixture of experts, by default the one of 30B parameters, up to its cross-entropy loss; weights have
    the published checkpoint's names, those of a layer's experts stacked. Each token goes to the `chosen` of `experts`
    experts of largest gate, whose gates are scaled to sum to 1. Inputs are ids [batch, sequence]: `tokens`, and
    `labels`, the next tokens.

    `head` is the width of a head of queries, keys and values, `kv_heads` the heads of keys and values, `intermediate`
    the width of an expert. With a `separator`, samples are packed of documents, each of which ends with this token.

    With a `capacity`, each expert takes this many per cent of an even share of every `group` of tokens (0: of a
    sample's tokens), and no more; without, no token is dropped. `balance` is the weight of the balance loss of each
    layer, in ten-thousandths.

    Raises `UnityError` for a group that does not divide the tokens.
    """
    b = Builder("qwen3_moe")
    tokens, labels = (b.input(name, batch, sequence, dtype="i64") for name in ("tokens", "labels"))
    documents = b.documents(tokens, separator, vocabulary)
    mixture = Mixture.of(b, tokens, capacity, group, balance)
    x = b.op("embedding", tokens, b.weight("model.embed_tokens.weight", vocabulary, hidden))
    for i in range(layers):
        name = f"model.layers.{i}"
        h = b.op("rms_norm", x, b.weight(f"{name}.input_layernorm.weight", hidden), eps=1e-6)
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        parts = [b.linear(h, f"{name}.self_attn.{part}_proj", n * head, bias=False) for part, n in counts.items()]
        q, k, v = (b.op("split_heads", p, heads=n) for p, n in zip(parts, counts.values(), strict=True))
        q, k = (
            b.op("rms_norm", p, b.weight(f"{name}.self_attn.{part}_norm.weight", head), eps=1e-6)
            for part, p in (("q", q), ("k", k))
        )
        q, k = (b.rotary(p, 1000000.0, documents) for p in (q, k))
        h = b.attend(q, k, v, True, documents)
        x = b.op("add", x, b.linear(h, f"{name}.self_attn.o_proj", hidden, bias=False))
        h = b.op("rms_norm", x, b.weight(f"{name}.post_attention_layernorm.weight", hidden), eps=1e-6)
        h = b.op("reshape", h, shape=(batch * sequence, hidden))
        gates = b.op("softmax", b.linear(h, f"{name}.mlp.gate", experts, bias=False))
        indices, shares = chosen_shares(b, gates, chosen)
        mixture.balanced(gates, indices)
        h = chosen_experts(mixture, h, indices, shares, f"{name}.mlp.experts", experts, intermediate)
        x = b.op("add", x, b.op("reshape", h, shape=x.shape))
    x = b.op("rms_norm", x, b.weight("model.norm.weight", hidden), eps=1e-6)
    loss = b.op("cross_entropy", b.linear(x, "lm_head", vocabulary, bias=False), labels)
    return b.graph(mixture.added_to(loss))
