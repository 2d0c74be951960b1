"""Llama 3 of 8B parameters (Meta, 2024): pre-norm decoder, grouped-query attention, rotary positions, gated MLP."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.freeze import freeze
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 1,
    sequence: int = 8192,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    intermediate: int = 14336,
    vocabulary: int = 128256,
    separator: int = -1,
    lora: int = 0,
) -> Graph:
    """
    Build Llama 3, by default of 8B parameters, up to its cross-entropy loss; weights have the published checkpoint's
    names. Inputs are ids [batch, sequence]: `tokens`, and `labels`, the next tokens.

    `sequence` is the length of a sample, `hidden` the width; `heads` are those of queries, `kv_heads` of keys and
    values; `intermediate` is the width of the MLP. With a `separator`, samples are packed of documents, each of which
    ends with this token: attention stays within them, and positions count from the beginning of each.

    With a rank `lora`, the projections of queries and values have adapters of this rank (`Builder.low_rank`), and all
    other weights are frozen.
    """
    b = Builder("llama3_8b")
    tokens = b.input("tokens", batch, sequence, dtype="i64")
    labels = b.input("labels", batch, sequence, dtype="i64")
    documents = b.documents(tokens, separator, vocabulary)
    kv = hidden // heads * kv_heads
    x = b.op("embedding", tokens, b.weight("model.embed_tokens.weight", vocabulary, hidden))
    for i in range(layers):
        name = f"model.layers.{i}"
        h = b.op("rms_norm", x, b.weight(f"{name}.input_layernorm.weight", hidden))
        sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv}
        q, k, v = (b.linear(h, f"{name}.self_attn.{part}", size, bias=False) for part, size in sizes.items())
        q, v = (b.low_rank(h, y, f"{name}.self_attn.{part}", lora) for part, y in (("q_proj", q), ("v_proj", v)))
        h = b.attention(q, k, v, heads, kv_heads, causal=True, rotary=500000.0, documents=documents)
        x = b.op("add", x, b.linear(h, f"{name}.self_attn.o_proj", hidden, bias=False))
        h = b.op("rms_norm", x, b.weight(f"{name}.post_attention_layernorm.weight", hidden))
        x = b.op("add", x, b.gated_mlp(h, f"{name}.mlp", intermediate))
    x = b.op("rms_norm", x, b.weight("model.norm.weight", hidden))
    graph = b.graph(b.op("cross_entropy", b.linear(x, "lm_head", vocabulary, bias=False), labels))
    return freeze(graph, "*,!*.lora_*") if lora else graph
