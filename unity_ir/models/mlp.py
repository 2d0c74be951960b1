"""The perceptron of Unity's evaluation (section 6.1): 16 dense layers of 8192."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph


def build(batch: int = 1024, hidden: int = 8192, layers: int = 16, classes: int = 8192) -> Graph:
    """
    Build an MLP of `layers` dense layers, with relu between them and without biases, up to its cross-entropy loss.
    Inputs are `x` [batch, hidden] and the class ids `labels` [batch]; all layers are `hidden` wide, except the last, of
    `classes`.
    """
    b = Builder("mlp")
    x, labels = b.input("x", batch, hidden), b.input("labels", batch, dtype="i64")
    for i in range(layers - 1):
        x = b.op("relu", b.linear(x, f"dense{i}", hidden, bias=False))
    logits = b.linear(x, f"dense{layers - 1}", classes, bias=False)
    return b.graph(b.op("cross_entropy", logits, labels))
