"""Algebraic rules: every application computes the same, and has the gradients of the same weights."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from graphs import data_for, random_cnn, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.rules.algebraic import algebraic

ALGEBRAIC = algebraic()
RULES = {r.name: r for r in ALGEBRAIC}


ELSEWHERE = {
    "split-of-matmul-nt",
    "split-of-concat",
    "concat-of-split",
    "matmul-of-parts",
    "embedding-bag-as-sum",
    "matmul-of-embedding",
    "max-pool2d-of-relu",
}
"""Rules that random graphs of matrices have no place for."""


def check(graph: Graph, after: Graph) -> None:
    """Outputs and gradients by name are what they were."""
    inputs, weights = data_for(graph)
    for n in graph.inputs:
        if n.types[0].dtype == "i64":
            inputs[n.name] = np.random.default_rng(0).integers(0, ROWS, n.types[0].shape)
    values, new = interpret(graph, inputs, weights), interpret(after, inputs, weights)
    assert [n.name for n in after.inputs] == [n.name for n in graph.inputs]
    for a, b in zip(graph.outputs, after.outputs, strict=True):
        assert a.type == b.type
        np.testing.assert_allclose(new[b], values[a], rtol=1e-9, atol=1e-9)
    if graph.outputs[0].shape == ():
        steps = [differentiate(g, Optimizer()) for g in (graph, after)]
        found = [interpret(s, inputs, weights) for s in steps]
        grads = [{u.weight.node.name: v[u.grad] for u in s.updates} for s, v in zip(steps, found, strict=True)]
        # A weight the loss does not depend on has no gradient; merged with one that has, it gets zeros.
        assert grads[0].keys() <= grads[1].keys()
        for name, grad in grads[1].items():
            np.testing.assert_allclose(grad, grads[0].get(name, 0.0 * grad), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@given(st.integers(0, 10**6))
@settings(max_examples=100)
def test_every_application_keeps_outputs_and_gradients(seed: int):
    graph = random_graph(Random(seed), Random(seed).randint(2, 9), dims=(2, 4))
    for rule in ALGEBRAIC:
        for _, after in rule.applications(graph):
            assert after.outputs != graph.outputs
            check(graph, after)
            for second in ALGEBRAIC:
                for _, twice in second.applications(after):
                    check(graph, twice)


@pytest.mark.slow
def test_random_graphs_try_every_rule():
    applied = Counter(
        rule.name
        for seed in range(150)
        for rule in ALGEBRAIC
        for _ in rule.applications(random_graph(Random(seed), 8, dims=(2, 4)))
    )
    assert applied.keys() >= RULES.keys() - ELSEWHERE


def test_relu_after_pooling_has_the_same_gradients():
    applied = 0
    for seed in range(150):
        graph = random_cnn(Random(seed), 6)
        for _, after in RULES["max-pool2d-of-relu"].applications(graph):
            applied += 1
            check(graph, after)
    assert applied > 5


ROWS = 5
"""Of tables; ids are less."""


@pytest.mark.slow
@pytest.mark.parametrize("parts", range(2, 10))
def test_embeddings_before_a_product(parts: int):
    """Parts of different widths, of bags and of single rows; every rule that applies to them, twice."""
    ids = [leaf("input", tensor_type((4, 3), "i64"), name=f"ids{i}") for i in range(parts)]
    target = leaf("input", tensor_type((4, 2), "f64"), name="target")
    tables = [leaf("weight", tensor_type((ROWS, i % 3 + 1), "f64"), name=f"t{i}").result for i in range(parts)]
    rows = [apply("embedding_bag", [n.result, t]).result for n, t in zip(ids, tables, strict=True)]
    x = apply("concat", rows, {"dim": 1}).result
    w = leaf("weight", tensor_type((x.shape[1], 2), "f64"), name="w").result
    loss = apply("mse", [apply("matmul", [x, w]).result, target.result]).result
    graph = Graph("f", (*ids, target), (loss,))
    ((_, summed),) = RULES["matmul-of-parts"].applications(graph)
    assert len([n for n in summed.nodes() if n.op == "matmul"]) == parts
    check(graph, summed)
    for _, single in RULES["embedding-bag-as-sum"].applications(summed):
        check(graph, single)


def test_a_product_of_a_table_in_place_of_one_of_its_rows():
    ids, target = (
        leaf("input", tensor_type((4, 3), "i64"), name="ids"),
        leaf("input", tensor_type((4, 3, 2), "f64"), name="t"),
    )
    table, w = (leaf("weight", tensor_type(s, "f64"), name=n).result for s, n in (((ROWS, 6), "table"), ((6, 2), "w")))
    y = apply("matmul", [apply("embedding", [ids.result, table]).result, w]).result
    graph = Graph("f", (ids, target), (apply("mse", [y, target.result]).result,))
    ((_, after),) = RULES["matmul-of-embedding"].applications(graph)
    check(graph, after)


def serial(*shapes: tuple[int, ...]) -> Graph:
    """An input for each shape."""
    nodes = tuple(leaf("input", tensor_type(s, "f64"), name=f"x{i}") for i, s in enumerate(shapes))
    return Graph("f", nodes, tuple(n.result for n in nodes))


def test_split_and_concat_undo_each_other():
    (x, y) = serial((2, 4), (2, 6)).outputs
    joined = apply("concat", [x, y], {"dim": 1}).result
    back = apply("split", [joined], {"dim": 1, "sizes": (4, 6)}).results
    graph = Graph("f", (x.node, y.node), (*back, joined))
    ((_, after),) = RULES["split-of-concat"].applications(graph)
    assert after.outputs == (x, y, joined)
    again = Graph("f", (x.node, y.node), (apply("concat", list(back), {"dim": 1}).result,))
    ((_, shorter),) = RULES["concat-of-split"].applications(again)
    assert shorter.outputs == (joined,)


@pytest.mark.parametrize(
    ("sizes", "dim"),
    [((6, 4), 1), ((5, 5), 1), ((1, 1), 0)],
)
def test_split_elsewhere_is_left_alone(sizes: tuple[int, ...], dim: int):
    (x, y) = serial((2, 4), (2, 6)).outputs
    joined = apply("concat", [x, y], {"dim": 1}).result
    parts = apply("split", [joined], {"dim": dim, "sizes": sizes}).results
    assert not list(RULES["split-of-concat"].applications(Graph("f", (x.node, y.node), parts)))


def test_concat_of_other_parts_is_left_alone():
    (x,) = serial((4, 4)).outputs
    a, b = apply("split", [x], {"dim": 0, "sizes": (2, 2)}).results
    for operands, dim in (([b, a], 0), ([a, a], 0), ([a, b], 1), ([a], 0)):
        joined = apply("concat", operands, {"dim": dim}).result
        assert not list(RULES["concat-of-split"].applications(Graph("f", (x.node,), (joined,))))


def test_rewrite_that_would_lose_a_weight_is_left_alone():
    """The second part is never read, but the model has its weight, which training must go on listing."""
    (x,) = serial((2, 4)).outputs
    v, w = (leaf("weight", tensor_type((2, 4), "f64"), name=n).result for n in "vw")
    joined = apply("concat", [v, w], {"dim": 1}).result
    first, second = apply("split", [joined], {"dim": 1, "sizes": (4, 4)}).results
    alone = Graph("f", (x.node,), (apply("mse", [first, x]).result,))
    assert not list(RULES["split-of-concat"].applications(alone))
    both = Graph("f", (x.node,), (apply("mse", [first, second]).result,))
    assert len(list(RULES["split-of-concat"].applications(both))) == 1


def test_product_that_others_read_is_not_fused():
    (x, y) = serial((2, 4), (4, 6)).outputs
    product = apply("matmul", [x, y]).result
    fused = apply("relu", [product]).result
    alone = Graph("f", (x.node, y.node), (fused,))
    assert len(list(RULES["fuse-activation"].applications(alone))) == 1
    shared = Graph("f", (x.node, y.node), (fused, apply("gelu", [product]).result))
    assert not list(RULES["fuse-activation"].applications(shared))
