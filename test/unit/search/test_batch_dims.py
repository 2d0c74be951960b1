"""Which dim of each input the samples of a batch run along."""

from __future__ import annotations

from unity_ir.pcg.graph import Graph, apply, leaf
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
