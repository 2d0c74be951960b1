"""A loss in several operators is in f32 from its log-softmax on; what is computed of a log-softmax otherwise is not."""

from __future__ import annotations

from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.types import tensor_type


def value(op: str, name: str, *shape: int, dtype: str = "f32") -> Value:
    return leaf(op, tensor_type(shape, dtype), name=name).result


def scores() -> Value:
    product = apply("matmul", [value("input", "x", 8, 6), value("weight", "w", 6, 12)]).result
    return apply("log_softmax", [apply("add", [product, value("weight", "b", 12)]).result]).result


def types(loss: Value) -> dict[str, str]:
    """The element type that each operator of the model in bf16 makes, by name."""
    x = next(n for n in Graph("f", (), (loss,)).nodes() if n.op == "input" and n.name == "x")
    found = mixed_precision(Graph("f", (x,), (loss,)), "bf16")
    return {n.op: n.result.type.dtype for n in found.nodes() if n.is_compute and n.op != "cast"}


def test_a_mean_over_some_labels_is_in_f32():
    labels = value("input", "labels", 8, dtype="i64")
    counts = apply("ne", [labels, leaf("constant", tensor_type((), "i64"), value=0.0).result]).result
    zero = leaf("constant", tensor_type((), "f32"), value=0.0).result
    kept = apply("select", [counts, apply("class_score", [scores(), labels]).result, zero]).result
    number = apply("reduce_sum", [apply("cast", [counts], {"to": "f32"}).result], {"dim": 0, "count": 1}).result
    loss = apply("div", [apply("neg", [apply("reduce_sum", [kept], {"dim": 0, "count": 1}).result]).result, number])
    found = types(loss.result)
    long = ("log_softmax", "class_score", "select", "reduce_sum", "neg", "div")
    assert {op: found[op] for op in (*long, "matmul", "add")} == dict.fromkeys(long, "f32") | {
        "matmul": "bf16",
        "add": "bf16",
    }


def test_a_product_of_a_log_softmax_is_not():
    out = apply("matmul", [scores(), value("weight", "u", 12, 12)]).result
    found = types(apply("mse", [out, value("input", "y", 8, 12)]).result)
    assert (found["log_softmax"], found["matmul"], found["mse"]) == ("bf16", "bf16", "f32")
