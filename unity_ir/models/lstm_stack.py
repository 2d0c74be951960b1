"""Tofu's recurrent network (section 7.1): a deep stack of wide LSTM layers, unrolled over 20 steps."""

from unity_ir.models.recurrent import Recurrent
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 512, steps: int = 20, layers: int = 6, hidden: int = 4096, features: int = 256, classes: int = 256
) -> Graph:
    """
    Build Tofu's stack of LSTM layers up to its loss, unrolled over `steps` steps; the default batch is Tofu's (section
    7.2). Inputs are `x` [batch, steps, features] and the class ids `labels` [batch, steps].

    Tofu's stacks have 6, 8 and 10 layers of 4096, 6144 and 8192 units (`hidden`). Input and output sizes are not
    published; its Table 2 leaves room for at most some hundred `features`, and as many `classes`.
    """
    b = Recurrent("lstm_stack")
    x, labels = b.input("x", batch, steps, features), b.input("labels", batch, steps, dtype="i64")
    h = b.joined(b.lstm(b.steps(x), "lstm", hidden, layers))
    return b.graph(b.op("cross_entropy", b.linear(h, "softmax", classes), labels))
