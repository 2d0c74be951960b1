"""FlexFlow's text classifier (section 8, RNNTC): LSTM layers, and a softmax layer on the last step."""

from unity_ir.models.recurrent import Recurrent
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 64,
    steps: int = 40,
    layers: int = 4,
    hidden: int = 1024,
    vocabulary: int = 20480,
    classes: int = 2,
) -> Graph:
    """
    Build FlexFlow's text classifier, LSTM layers over `steps` tokens and a softmax layer on the last state, up to its
    loss; layers, hidden size and steps are as published, the vocabulary is that of FlexFlow's recurrent example. Inputs
    are the ids `tokens` [batch, steps] and `labels` [batch].
    """
    b = Recurrent("rnntc")
    tokens, labels = b.input("tokens", batch, steps, dtype="i64"), b.input("labels", batch, dtype="i64")
    h = b.lstm(b.embedded(tokens, "embedding", vocabulary, hidden), "lstm", hidden, layers)
    return b.graph(b.op("cross_entropy", b.linear(h[-1], "softmax", classes), labels))
