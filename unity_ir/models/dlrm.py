"""DLRM (Naumov et al., 2019), as FlexFlow trains it: bottom MLP and embeddings, concatenated, before a top MLP."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 1024,
    tables: int = 8,
    rows: int = 1_000_000,
    bag: int = 1,
    features: int = 64,
    dense: int = 64,
    bottom: int = 512,
    top: int = 1024,
) -> Graph:
    """
    Build DLRM up to its loss (mean squared error of a sigmoid), in the sizes of FlexFlow's published runs; the default
    batch is Unity's (section 6.1). Inputs are ids `ids0`, .. [batch, bag], `x` [batch, dense] and `labels` [batch, 1].

    By default the MLPs are 64-512-512-64 and 576-1024-1024-1024-1. Each of the `tables` embedding tables of `rows` x
    `features` is read at `bag` ids per sample, which are summed. `bottom` and `top` are the widths of the MLPs' hidden
    layers, `dense` that of the dense input.
    """
    b = Builder("dlrm")
    ids = [b.input(f"ids{i}", batch, bag, dtype="i64") for i in range(tables)]
    x, labels = b.input("x", batch, dense), b.input("labels", batch, 1)
    for i, size in enumerate((bottom, bottom, features)):
        x = b.op("relu", b.linear(x, f"bottom{i}", size, bias=False))
    looked_up = (b.op("embedding_bag", k, b.weight(f"table{i}", rows, features)) for i, k in enumerate(ids))
    x = b.op("concat", x, *looked_up, dim=1)
    for i in range(3):
        x = b.op("relu", b.linear(x, f"top{i}", top, bias=False))
    return b.graph(b.op("mse", b.op("sigmoid", b.linear(x, "top3", 1, bias=False)), labels))
