"""Layers are found by structure."""

from __future__ import annotations

import pytest
from zoo import SMALL

from unity_ir.models import build, names
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.layers import layers, parts


@pytest.mark.parametrize("model", names())
def test_one_value_passes_from_part_to_part(model: str):
    graph = build(model, **SMALL[model])
    found = parts(graph)
    where = {node: i for i, part in enumerate(found) for node in part.nodes}
    assert set(where) <= {n for n in graph.nodes() if n.is_compute and n in nodes_with_gradient(graph)}
    for i, part in enumerate(found):
        read = {v for n in where if where[n] > i for v in n.operands if where.get(v.node, i + 1) <= i}
        assert read == ({part.end} if part.end is not None else set())
    for node, i in where.items():
        assert all(where.get(v.node, i) <= i for v in node.operands)


@pytest.mark.parametrize("model", ["gpt2", "llama3_8b", "bert_large", "moe"])
def test_each_layer_of_a_transformer_is_one(model: str):
    graph = build(model, **{**SMALL[model], "layers": 3})
    found = layers(graph)
    assert len(found.layers) == 3
    assert len({tuple(n.op for n in part.nodes) for part in found.layers}) == 1
    for number, part in enumerate(found.layers):
        of = [v.node.name for n in part.nodes for v in n.operands if v.node.op == "weight"]
        # BERT normalises after its sums: a layer begins at the sum, with the norm of the layer before.
        assert sum(f".{number}." in name for name in of) >= len(of) - 2 * (model == "bert_large")
    assert "cross_entropy" in {n.op for n in found.tail[-1].nodes}


def test_layers_of_other_sizes_are_layers():
    """A perceptron whose first layer reads other features; the last, without an activation, is what follows."""
    graph = build("mlp", **SMALL["mlp"])
    assert len(layers(graph).layers) > 1
    assert {len(part.nodes) for part in layers(graph).layers} == {2}


def test_a_recurrent_network_has_none():
    assert layers(build("rnnlm", **SMALL["rnnlm"])).layers == ()
    assert layers(Graph("none", (), ())) == layers(Graph("none", (), ()))
    assert parts(Graph("none", (), ())) == ()
