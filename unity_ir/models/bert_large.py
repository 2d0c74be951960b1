"""BERT-Large (Devlin et al., 2018): post-norm transformer encoder, trained on masked tokens."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 8,
    sequence: int = 512,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    vocabulary: int = 30522,
) -> Graph:
    """
    Build BERT's encoder, and its masked-language-model head up to the cross-entropy loss; the head multiplies by the
    token embedding's table. Inputs are ids [batch, sequence]: `tokens`, `segments` (0 or 1) and `labels`; the loss is
    the mean over all labels.

    `sequence` is the length of a sample, `hidden` the width, `vocabulary` the number of tokens.
    """
    b = Builder("bert_large")
    tokens = b.input("tokens", batch, sequence, dtype="i64")
    segments = b.input("segments", batch, sequence, dtype="i64")
    labels = b.input("labels", batch, sequence, dtype="i64")
    table = b.weight("embeddings.word_embeddings.weight", vocabulary, hidden)
    kinds = b.weight("embeddings.token_type_embeddings.weight", 2, hidden)
    positions = b.weight("embeddings.position_embeddings.weight", sequence, hidden)
    x = b.op("add", b.op("embedding", tokens, table), b.op("embedding", segments, kinds))
    x = b.layer_norm(b.op("add", x, positions), "embeddings.LayerNorm", eps=1e-12)
    for i in range(layers):
        name = f"encoder.layer.{i}"
        q, k, v = (b.linear(x, f"{name}.attention.self.{part}", hidden) for part in ("query", "key", "value"))
        h = b.linear(b.attention(q, k, v, heads, heads, causal=False), f"{name}.attention.output.dense", hidden)
        x = b.layer_norm(b.op("add", x, h), f"{name}.attention.output.LayerNorm", eps=1e-12)
        h = b.op("gelu", b.linear(x, f"{name}.intermediate.dense", 4 * hidden))
        h = b.linear(h, f"{name}.output.dense", hidden)
        x = b.layer_norm(b.op("add", x, h), f"{name}.output.LayerNorm", eps=1e-12)
    h = b.op("gelu", b.linear(x, "predictions.transform.dense", hidden))
    h = b.layer_norm(h, "predictions.transform.LayerNorm", eps=1e-12)
    logits = b.op("add", b.op("matmul_nt", h, table), b.weight("predictions.bias", vocabulary))
    return b.graph(b.op("cross_entropy", logits, labels))
