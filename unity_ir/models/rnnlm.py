"""FlexFlow's language model (section 8, RNNLM): LSTM layers, and a softmax layer on every step."""

from unity_ir.models.recurrent import Recurrent
from unity_ir.pcg.graph import Graph


def build(batch: int = 64, steps: int = 40, layers: int = 2, hidden: int = 2048, vocabulary: int = 10000) -> Graph:
    """
    Build FlexFlow's language model up to its loss, unrolled over `steps` steps; layers, hidden size and steps are as
    published, the 10,000 words are Penn Treebank's. Inputs are ids [batch, steps]: `tokens`, and `labels`, the next
    tokens.

    With 2 steps, it is the model whose optimum FlexFlow finds by exhaustive search (section 8.3).
    """
    b = Recurrent("rnnlm")
    tokens, labels = (b.input(name, batch, steps, dtype="i64") for name in ("tokens", "labels"))
    h = b.lstm(b.embedded(tokens, "embedding", vocabulary, hidden), "lstm", hidden, layers)
    return b.graph(b.op("cross_entropy", b.linear(b.joined(h), "softmax", vocabulary), labels))
