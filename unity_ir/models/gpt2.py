"""GPT-2 (Radford et al., 2019): pre-norm transformer decoder with learned positions and a tied output embedding."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 8,
    sequence: int = 1024,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    separator: int = -1,
) -> Graph:
    """
    Build GPT-2, by default the small one, up to its cross-entropy loss; weights have the published checkpoint's names.
    Inputs are ids [batch, sequence]: `tokens`, and `labels`, the next tokens.

    `sequence` is the length of a sample, `hidden` the width, `vocabulary` the number of tokens. With a `separator`,
    samples are packed of documents, each of which ends with this token: attention stays within them, and positions
    count from the beginning of each.
    """
    b = Builder("gpt2")
    tokens = b.input("tokens", batch, sequence, dtype="i64")
    labels = b.input("labels", batch, sequence, dtype="i64")
    documents = b.documents(tokens, separator, vocabulary)
    table = b.weight("wte.weight", vocabulary, hidden)
    places = b.weight("wpe.weight", sequence, hidden)
    x = b.op("add", b.op("embedding", tokens, table), b.op("embedding", documents[2], places) if documents else places)
    for i in range(layers):
        h = b.layer_norm(x, f"h.{i}.ln_1")
        q, k, v = b.split(b.linear(h, f"h.{i}.attn.c_attn", 3 * hidden), 2, (hidden,) * 3)
        h = b.attention(q, k, v, heads, heads, causal=True, documents=documents)
        x = b.op("add", x, b.linear(h, f"h.{i}.attn.c_proj", hidden))
        h = b.linear(b.layer_norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc", 4 * hidden)
        x = b.op("add", x, b.linear(b.op("gelu", h), f"h.{i}.mlp.c_proj", hidden))
    logits = b.op("matmul_nt", b.layer_norm(x, "ln_f"), table)
    return b.graph(b.op("cross_entropy", logits, labels))
