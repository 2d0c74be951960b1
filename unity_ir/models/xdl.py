"""XDL (Jiang et al., 2019), as FlexFlow trains it: embeddings, concatenated, before an MLP."""

from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph


def build(
    batch: int = 1024, tables: int = 4, rows: int = 1_000_000, bag: int = 1, features: int = 64, hidden: int = 256
) -> Graph:
    """
    Build XDL up to its loss (mean squared error of a sigmoid), in the sizes of FlexFlow's example; the default batch is
    Unity's (section 6.1). Inputs are ids `ids0`, .. [batch, bag] and `labels` [batch, 2].

    Each of the `tables` embedding tables of `rows` x `features` is read at `bag` ids per sample, which are summed;
    `hidden` is the width of the MLP.
    """
    b = Builder("xdl")
    ids = [b.input(f"ids{i}", batch, bag, dtype="i64") for i in range(tables)]
    labels = b.input("labels", batch, 2)
    looked_up = (b.op("embedding_bag", k, b.weight(f"table{i}", rows, features)) for i, k in enumerate(ids))
    x = b.op("concat", *looked_up, dim=1)
    for i in range(2):
        x = b.op("relu", b.linear(x, f"dense{i}", hidden, bias=False))
    return b.graph(b.op("mse", b.op("sigmoid", b.linear(x, "dense2", 2, bias=False)), labels))
