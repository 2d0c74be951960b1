"""Data-parallel plans divide samples: of inputs that have some, along the dim where they are."""

import pytest
from zoo import SMALL

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.sharding import REPEAT, place
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
from unity_ir.search.baselines.batch_dims import batch_dims

TWO = load("cpu:2")


def given(name: str, *shape: int, dtype: str = "f32") -> Value:
    return leaf("input", tensor_type(shape, dtype), name=name).result


def weight(name: str, *shape: int) -> Value:
    return leaf("weight", tensor_type(shape, "f32"), name=name).result


def graph(inputs: list[Value], loss: Value) -> Graph:
    return Graph("f", tuple(v.node for v in inputs), (loss,))


def with_tables() -> Graph:
    """Tokens with positions from a table of 3 by 4, scaled by one of a single number for each channel."""
    ids, angles, scale, labels = (
        given("ids", 6, 3, dtype="i64"),
        given("constant.0", 3, 4),
        given("constant.1", 4),
        given("labels", 6, 3, 5),
    )
    x = apply("embedding", [ids, weight("t", 7, 4)]).result
    x = apply("mul", [apply("add", [x, angles]).result, scale]).result
    return graph(
        [ids, angles, scale, labels], apply("mse", [apply("matmul", [x, weight("w", 4, 5)]).result, labels]).result
    )


def tables_first() -> Graph:
    """Bags [tables, batch, bag] of three tables, of which one split is an operand each."""
    ids, y = given("ids", 3, 8, 2, dtype="i64"), given("y", 8, 4)
    each = apply("split", [ids], {"dim": 0, "sizes": (1, 1, 1)}).results
    bags = [apply("reshape", [e], {"shape": (8, 2)}).result for e in each]
    found = [apply("embedding_bag", [b, weight(f"t{i}", 9, 4)]).result for i, b in enumerate(bags)]
    total = apply("add", [apply("add", [found[0], found[1]]).result, found[2]]).result
    return graph([ids, y], apply("mse", [total, y]).result)


@pytest.mark.parametrize("name", SMALL)
def test_every_input_of_the_zoo_has_samples_first(name: str):
    model = build(name, **SMALL[name])
    assert batch_dims(model) == {n.result: 0 for n in model.inputs}


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "expert"])
def test_tables_have_no_samples(strategy: str):
    model = with_tables()
    assert {v.node.name: d for v, d in batch_dims(model).items()} == {"ids": 0, "labels": 0}
    plan = run(model, TWO, strategy).graph
    layouts = {v.node.name: r for v, r in place(plan, TWO.mesh).layouts.items() if v.node.op == "input"}
    assert layouts["constant.0"] == layouts["constant.1"] == (REPEAT,)
    if strategy != "expert":
        assert layouts["ids"] == layouts["labels"] == (0,)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_samples_may_be_the_second_dim(strategy: str):
    model = tables_first()
    assert {v.node.name: d for v, d in batch_dims(model).items()} == {"ids": 1, "y": 0}
    plan = run(model, TWO, strategy).graph
    layouts = {v.node.name: r for v, r in place(plan, TWO.mesh).layouts.items() if v.node.op == "input"}
    assert layouts == {"ids": (1,), "y": (0,)}


def test_a_batch_that_devices_do_not_divide_is_refused():
    with pytest.raises(UnityError, match=r"^data-parallel: input ids has batch 6, which 4 devices do not divide"):
        run(with_tables(), load("cpu:4"), "data-parallel")
