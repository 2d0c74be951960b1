"""FlexFlow's translation model (section 8, NMT): LSTM encoder and decoder, attention on top, and a softmax layer."""

from unity_ir.models.recurrent import Recurrent
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value


def build(batch: int = 64, steps: int = 40, layers: int = 2, hidden: int = 1024, vocabulary: int = 20480) -> Graph:
    """
    Build FlexFlow's translation model up to its loss; layers, hidden size and steps are as published, the vocabulary is
    that of FlexFlow's example. Inputs are ids [batch, steps]: the source's `tokens`, the target's `words`, and
    `labels`, the next words.

    `steps` is the length of the source and of the target, `layers` the number of LSTM layers on each side. Each decoder
    layer starts from the last state of its encoder layer.
    """
    b = Recurrent("nmt")
    tokens, words, labels = (b.input(name, batch, steps, dtype="i64") for name in ("tokens", "words", "labels"))
    source = b.embedded(tokens, "encoder.embedding", vocabulary, hidden)
    target = b.embedded(words, "decoder.embedding", vocabulary, hidden)
    for i in range(layers):
        source, state = b.lstm_layer(source, f"encoder.lstm.{i}", hidden)
        target, _ = b.lstm_layer(target, f"decoder.lstm.{i}", hidden, state)
    x = _attend(b, b.joined(target), b.joined(source))
    return b.graph(b.op("cross_entropy", b.linear(x, "softmax", vocabulary), labels))


def _attend(b: Recurrent, queries: Value, keys: Value) -> Value:
    """Bahdanau et al. (2014): scores are v . tanh(q W + k U); the mean of the keys and the query go on together."""
    batch, steps, hidden = queries.shape
    q = b.op("reshape", b.linear(queries, "attention.query", hidden, bias=False), shape=(batch, steps, 1, hidden))
    k = b.op("reshape", b.linear(keys, "attention.key", hidden, bias=False), shape=(batch, 1, keys.shape[1], hidden))
    scores = b.linear(b.op("tanh", b.op("add", q, k)), "attention.score", 1, bias=False)
    weights = b.op("softmax", b.op("reshape", scores, shape=scores.shape[:-1]))
    context = b.op("batch_matmul", weights, keys)
    return b.op("tanh", b.linear(b.op("concat", context, queries, dim=2), "attention.output", hidden, bias=False))
