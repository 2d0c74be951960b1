"""Which dim of each input the samples of a batch run along."""

from __future__ import annotations

from itertools import pairwise

import pytest

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.batch_dims import batch_dims


def test_tables_of_an_import_have_no_samples():
    """Though the tokens are gathered in another order, by which no dim of theirs can be divided, and the table can."""
    ids = leaf("input", tensor_type((4,), "i64"), name="ids")
    table = leaf("input", tensor_type((4, 6), "f32"), name="constant.0")
    weight = leaf("weight", tensor_type((8, 1), "f32"), name="w").result
    order = apply("index_select", [apply("embedding", [ids.result, weight]).result, ids.result], {"dim": 0}).result
    loss = apply("mse", [apply("mul", [order, table.result]).result, table.result]).result
    assert batch_dims(Graph("f", (ids, table), (loss,))) == {ids.result: 0}


def weights(*sizes: int) -> list[Value]:
    return [leaf("weight", tensor_type((a, b), "f32"), name=f"w{a}.{b}").result for a, b in pairwise(sizes)]


def mixture(batch: int) -> Graph:
    """Tokens [batch, 4] that are flattened and gathered in an order that depends on them; logits are cut."""
    ids, labels = (leaf("input", tensor_type((batch, 4), "i64"), name=name) for name in ("ids", "labels"))
    table, head = weights(7, 6, 7)
    x = apply("embedding", [ids.result, table]).result
    flat = apply("reshape", [x], {"shape": (batch * 4, 6)}).result
    order = apply("topk", [apply("reduce_sum", [flat], {"dim": 1}).result], {"k": batch * 4}).results[1]
    flat = apply("embedding", [order, flat]).result
    x = apply("add", [x, apply("reshape", [flat], {"shape": (batch, 4, 6)}).result]).result
    x = apply("gelu", [apply("gelu", [x]).result]).result
    cut = {"dim": 1, "start": 0, "size": 3, "step": 1}
    logits, goals = (apply("slice", [v], cut).result for v in (apply("matmul", [x, head]).result, labels.result))
    return Graph("f", (ids, labels), (apply("cross_entropy", [logits, goals]).result,))


@pytest.mark.parametrize("batch", [1, 2])
def test_samples_whose_rows_are_gathered_are_the_first_dim_of_all_inputs(batch: int):
    """Though an operator has two variables of their class, and the sequence has none: labels are cut along it."""
    graph = mixture(batch)
    assert batch_dims(graph) == {node.result: 0 for node in graph.inputs}


def test_one_sample_is_no_sequence():
    """Though reshapes leave its dim out, and more operators have the tokens' class."""
    x, y = (leaf("input", tensor_type((1, 4, size), "f32"), name=name) for name, size in (("x", 6), ("y", 2)))
    first, second = weights(6, 3, 2)
    h = apply("reshape", [x.result], {"shape": (4, 6)}).result
    h = apply("matmul", [apply("gelu", [apply("matmul", [h, first]).result]).result, second]).result
    loss = apply("mse", [apply("reshape", [h], {"shape": (1, 4, 2)}).result, y.result]).result
    assert batch_dims(Graph("f", (x, y), (loss,))) == {x.result: 0, y.result: 0}


def test_samples_are_in_all_inputs():
    """Though another dim is in more operators."""
    x, y = (leaf("input", tensor_type(shape, "f32"), name=name) for name, shape in (("x", (4, 3, 6)), ("y", (4,))))
    (weight,) = weights(6, 6)
    h = apply("matmul", [x.result, weight]).result
    loss = apply("mse", [apply("reduce_sum", [h], {"dim": 1, "count": 2}).result, y.result]).result
    h = apply("reduce_sum", [h], {"dim": 0}).result
    for _ in range(4):
        h = apply("gelu", [h]).result
    loss = apply("add", [loss, apply("reduce_sum", [h], {"dim": 0, "count": 2}).result]).result
    assert batch_dims(Graph("f", (x, y), (loss,))) == {x.result: 0, y.result: 0}
