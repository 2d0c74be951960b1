"""The backward of random graphs, whole and in pieces, and its collectives."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from extent import examples
from graphs import boxes, data_for, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.pcg.differentiate import differentiate, nodes_with_gradient
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import apply, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.pcg.view import View
from unity_ir.search.baselines.random_plan import sample
from unity_ir.tdl.functions import Array

RANDOMS = st.integers(0, 10**6).map(Random)
SGD = Optimizer()


def gradients(step: Graph, inputs: dict[str, Array], weights: dict[str, Array]) -> dict[str, Array]:
    values = interpret(step, inputs, weights)
    return {u.weight.node.name: values[u.grad] for u in step.updates}


@given(RANDOMS)
@settings(max_examples=examples(60))
def test_gradients_are_slopes(random: Random):
    graph = random_graph(random, random.randint(1, 9))
    inputs, weights = data_for(graph)
    found = gradients(differentiate(graph, SGD), inputs, weights)
    assert set(found) == {n.name for n in graph.weights() if n in nodes_with_gradient(graph)}
    (loss, *_) = graph.outputs
    for name, gradient in found.items():
        way = np.random.default_rng(1).standard_normal(gradient.shape)
        ends = [interpret(graph, inputs, {**weights, name: weights[name] + e * way})[loss] for e in (1e-6, -1e-6)]
        slope, expected = (ends[0] - ends[1]) / 2e-6, np.sum(gradient * way)
        np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-5 * max(1.0, float(np.abs(ends[0]))))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (2, 3)])
@given(RANDOMS, st.integers(0, 999))
@settings(max_examples=examples(25))
def test_any_plan_has_the_serial_gradients(sizes: tuple[int, ...], random: Random, seed: int):
    graph, machine = random_graph(random, random.randint(1, 6)), boxes(*sizes)
    inputs, weights = data_for(graph)
    serial = differentiate(graph, SGD)
    whole, expected = interpret(serial, inputs, weights), gradients(serial, inputs, weights)
    plan = sample(graph, machine, seed)
    placed = differentiate(plan, SGD, machine.mesh)
    for step in (placed, fuse_collectives(placed), differentiate(plan, SGD)):
        pieces = interpret_pieces(step, inputs, weights)
        for got, want in zip(step.outputs, serial.outputs, strict=True):
            np.testing.assert_allclose(join(pieces[got], got.type), whole[want], rtol=1e-8, atol=1e-8)
        assert {u.weight.node.name for u in step.updates} == set(expected)
        for u in step.updates:
            assert u.grad.type == u.weight.type
            np.testing.assert_allclose(
                join(pieces[u.grad], u.grad.type), expected[u.weight.node.name], rtol=1e-7, atol=1e-8
            )


@pytest.mark.slow
@given(RANDOMS, st.integers(0, 999))
@settings(max_examples=examples(60))
def test_fusing_keeps_the_cost(random: Random, seed: int):
    machine = boxes(2, 3, overhead=1e-6)
    step = differentiate(sample(random_graph(random, 6), machine, seed), SGD, machine.mesh)
    fused = fuse_collectives(step)
    before, after = cost(step, machine), cost(fused, machine)
    assert (before.elements, before.memory_bytes) == (after.elements, after.memory_bytes)
    assert before.time == pytest.approx(after.time, rel=1e-12)
    for node in fused.nodes():
        # What could be fused has been: no collective's two halves are left alone with each other.
        if node.op == "replicate" and node.operands[0].node.op in ("reduce", "combine"):
            inner = node.operands[0]
            assert (
                inner.node.view is not None
                or len(fused.users()[inner]) > 1
                or inner.node.attribute("by") != node.attribute("by")
                or inner in fused.outputs
                or any(inner == u.grad for u in fused.updates)
            )


@pytest.mark.parametrize(
    ("chain", "fused"),
    [
        ([("reduce", {"by": 2}), ("replicate", {"by": 2})], "all_reduce"),
        ([("reduce", {"by": 2}), ("partition", {"dim": 1, "by": 2})], "reduce_scatter"),
        ([("combine", {"dim": 0, "by": 2}), ("replicate", {"by": 2})], "all_gather"),
        ([("combine", {"dim": 0, "by": 2}), ("partition", {"dim": 1, "by": 2})], "all_to_all"),
        ([("combine", {"dim": 0, "by": 2}), ("partition", {"dim": 0, "by": 2})], "partition"),
        ([("reduce", {"by": 2}), ("replicate", {"by": 4})], "replicate"),
    ],
)
def test_chain_fuses_to(chain: list[tuple[str, dict[str, int]]], fused: str):
    value = leaf("input", tensor_type((4, 6), "f64", (2, 1), 2), name="x").result
    for op, attributes in chain:
        value = parallel(op, value, **attributes).result
    (got,) = fuse_collectives(Graph("f", (), (value,))).outputs
    assert (got.node.op, got.type) == (fused, value.type)
    assert (len(Graph("f", (), (got,)).nodes()) == 2) == (fused not in ("partition", "replicate"))


@pytest.mark.parametrize("why", ["read by an operator", "an output", "placed"])
def test_chain_whose_middle_is_needed_stays(why: str):
    x = leaf("input", tensor_type((4, 6), "f64", (2, 1)), name="x").result
    view = View(0, (), ((2, 1),)) if why == "placed" else None
    middle = parallel("combine", x, view, dim=0, by=2).result
    end = parallel("replicate", middle, by=2).result
    others = {"read by an operator": (apply("relu", [middle]).result,), "an output": (middle,), "placed": ()}[why]
    graph = Graph("f", (), (end, *others))
    assert fuse_collectives(graph) == graph


def test_weight_in_copies_gets_its_whole_gradient_in_each():
    """Megatron's and data parallelism's all-reduce, from nothing but the weight's type."""
    x = leaf("input", tensor_type((4, 6), "f64", (2, 1)), name="x")
    w = leaf("weight", tensor_type((6, 2), "f64", (1, 1), 1, 2), name="w").result
    y = leaf("input", tensor_type((4, 2), "f64", (2, 1)), name="y")
    graph = Graph("f", (x, y), (apply("mse", [apply("matmul", [x.result, w]).result, y.result]).result,))
    inputs, weights = data_for(graph)
    expected = gradients(differentiate(erase(graph), SGD), inputs, weights)["w"]
    for step in (differentiate(graph, SGD), differentiate(graph, SGD, boxes(2).mesh)):
        (update,) = step.updates
        assert update.grad.type == update.weight.type == w.type
        assert [n.op for n in fuse_collectives(step).nodes() if n.is_parallel] == ["all_reduce"]
        pieces = interpret_pieces(step, inputs, weights)[update.grad]
        for piece in pieces.values():
            np.testing.assert_allclose(piece, expected)


def test_weight_in_addends_is_refused():
    w = leaf("weight", tensor_type((), "f64", (), 2), name="w").result
    with pytest.raises(UnityError, match=r"^pcg\.weight: w rests in 2 partial sums, which cannot be updated"):
        differentiate(Graph("f", (), (w,)), SGD)


def test_gradient_of_an_unused_branch_is_not_built():
    x = leaf("input", tensor_type((4, 4), "f64"), name="x")
    w, v = (leaf("weight", tensor_type((4, 4), "f64"), name=n).result for n in "wv")
    h = apply("matmul", [x.result, w]).result
    loss = apply("mse", [h, x.result]).result
    side = apply("matmul", [h, v]).result
    step = differentiate(Graph("f", (x,), (loss, side)), SGD)
    assert [u.weight for u in step.updates] == [w]


def test_what_cannot_be_differentiated_is_refused():
    x = leaf("input", tensor_type((), "f64"), name="x")
    w = leaf("weight", tensor_type((2,), "f64"), name="w").result
    with pytest.raises(UnityError, match=r"^func\.func @f: no weight reaches its loss"):
        differentiate(Graph("f", (x,), (x.result,)), SGD)
    with pytest.raises(UnityError, match=r"^func\.func @f: its first output must be a scalar loss"):
        differentiate(Graph("f", (x,), (w,)), SGD)
    with pytest.raises(UnityError, match=r"^func\.func @f: its first output must be a scalar loss"):
        differentiate(Graph("f", (x,), ()), SGD)
    scalar = leaf("weight", tensor_type((), "f64"), name="s").result
    step = differentiate(Graph("f", (x,), (apply("mul", [scalar, x.result]).result,)), SGD)
    with pytest.raises(UnityError, match=r"^func\.func @f: already has a backward"):
        differentiate(step, SGD)
    backward = apply("relu_grad", [scalar, scalar]).result
    with pytest.raises(UnityError, match=r"^pcg\.relu_grad: has no gradient"):
        differentiate(Graph("f", (x,), (backward,)), SGD)


def test_loss_that_is_a_weight_has_gradient_one():
    w = leaf("weight", tensor_type((), "f64"), name="w").result
    step = differentiate(Graph("f", (), (w,)), SGD)
    assert gradients(step, {}, {"w": np.array(3.0)}) == {"w": 1.0}


def test_no_gradient_flows_through_integers_and_conditions():
    w = leaf("weight", tensor_type((4,), "f64"), name="w").result
    x = leaf("input", tensor_type((4,), "f64"), name="x")
    chosen = apply("select", [apply("lt", [w, x.result]).result, w, x.result]).result
    loss = apply("reduce_sum", [apply("mul", [chosen, chosen]).result], {"dim": 0}).result
    values = {"x": np.array([1.0, 2.0, 3.0, 4.0]), "w": np.array([3.0, 1.0, 4.0, 2.0])}
    found = gradients(differentiate(Graph("f", (x,), (loss,)), SGD), values, values)
    np.testing.assert_array_equal(found["w"], [0, 2, 0, 4])
    rounded = apply("cast", [apply("cast", [w], {"to": "i64"}).result], {"to": "f64"}).result
    loss = apply("reduce_sum", [rounded], {"dim": 0}).result
    with pytest.raises(UnityError, match="no weight reaches its loss"):
        differentiate(Graph("f", (), (loss,)), SGD)


def test_a_result_without_gradient_is_passed_over():
    """Of two results that a weight reaches, only the one of floating point numbers has a gradient."""
    w = leaf("weight", tensor_type((2, 3), "f64"), name="w").result
    values, indices = apply("topk", [w], {"k": 2}).results
    picked = apply("gather", [w, indices], {"dim": 1}).result
    loss = apply("reduce_sum", [apply("mul", [values, picked]).result], {"dim": 0, "count": 2}).result
    given = {"w": np.array([[3.0, 1.0, 4.0], [1.0, 5.0, 9.0]])}
    found = gradients(differentiate(Graph("f", (), (loss,)), SGD), {}, given)
    np.testing.assert_array_equal(found["w"], [[6, 0, 8], [0, 10, 18]])
