"""The compact graph: equal nodes are one, rewriting rebuilds what follows, erasing leaves the serial graph."""

import gc
from random import Random

import pytest
from graphs import boxes, data_for, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.pcg import node as module
from unity_ir.pcg.graph import Graph, erase, rewrite, topological
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import apply, leaf, parallel, rebuild
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.random_plan import sample

RANDOMS = st.integers(0, 10**6).map(Random)
TYPE = tensor_type((4, 6), "f64")


@given(RANDOMS)
@settings(max_examples=50)
def test_rebuilding_gives_the_very_same_graph(random: Random):
    graph = random_graph(random, 8)
    assert rewrite(graph, lambda node, operands: rebuild(node, operands, node.view).results) == graph
    assert erase(graph) == graph


@pytest.mark.slow
@given(RANDOMS, st.integers(0, 99))
@settings(max_examples=50)
def test_erasure_of_any_plan_is_the_serial_graph(random: Random, seed: int):
    graph = random_graph(random, 5)
    assert erase(sample(graph, boxes(2, 3), seed)) == graph


@given(RANDOMS)
@settings(max_examples=50)
def test_nodes_come_after_their_operands_once(random: Random):
    nodes = random_graph(random, 8).nodes()
    assert len(nodes) == len(set(nodes))
    for i, node in enumerate(nodes):
        assert all(v.node in nodes[:i] for v in node.operands)


@given(RANDOMS)
@settings(max_examples=30)
def test_rewrite_replaces_everywhere(random: Random):
    """relu(x) by x * 1 where x is positive anyway: everything after it is rebuilt, nothing keeps the old value."""
    graph = random_graph(random, 8)
    seen = [n for n in graph.nodes() if n.op == "gelu"]
    new = rewrite(graph, lambda n, o: apply("relu", o).results if n.op == "gelu" else rebuild(n, o, n.view).results)
    assert not any(n.op == "gelu" for n in new.nodes())
    assert (new == graph) == (not seen)
    inputs, weights = data_for(graph)
    for value, other in zip(graph.outputs, new.outputs, strict=True):
        assert interpret(new, inputs, weights)[other].shape == value.shape


def test_equal_nodes_are_one_and_different_ones_are_not():
    x = leaf("input", TYPE, name="x").result
    assert apply("relu", [x]) is apply("relu", [x])
    assert apply("add", [x, x]) is not apply("mul", [x, x])
    assert parallel("replicate", x, by=2) is parallel("replicate", x, by=2)
    assert parallel("replicate", x, by=2) is not parallel("replicate", x, by=3)
    assert apply("matmul", [x, leaf("weight", tensor_type((6, 2), "f64"), name="w").result]) is apply(
        "matmul", [x, leaf("weight", tensor_type((6, 2), "f64"), name="w").result], {"act": "identity"}
    )
    assert leaf("weight", TYPE, name="x") is not leaf("input", TYPE, name="x")


def test_nodes_that_differ_in_their_operands_alone_have_one_form():
    x, y = (leaf("input", TYPE, name=name).result for name in "xy")
    assert apply("add", [x, y]).form is apply("add", [y, x]).form
    assert apply("add", [x, y]).form is not apply("mul", [x, y]).form
    # A value that is read twice counts once, and its gradients are added.
    assert apply("add", [x, x]).form is not apply("add", [x, y]).form
    assert apply("add", [x, x]).form.repeats == (0, 0)
    assert apply("relu", [leaf("input", TYPE, name="z").result]).form is apply("relu", [x]).form
    other = leaf("input", tensor_type((6, 4), "f64"), name="x").result
    assert apply("relu", [other]).form is not apply("relu", [x]).form
    assert parallel("replicate", x, by=2).form is not parallel("replicate", x, by=3).form


@pytest.mark.slow
def test_unused_nodes_are_forgotten():
    x = leaf("input", TYPE, name="only here").result
    kept = apply("relu", [x])
    gc.collect()
    before = len(module._interned)
    for _ in range(3):
        x = apply("gelu", [x]).result
    assert len(module._interned) == before + 3
    del x
    gc.collect()
    assert len(module._interned) == before
    assert kept.op == "relu"


def test_long_chain_needs_no_deep_stack():
    value = leaf("input", TYPE, name="x").result
    for _ in range(5000):
        value = apply("relu", [value]).result
    assert len(topological([value])) == 5001
    assert erase(Graph("long", (), (value,))).outputs == (value,)
