"""Every model of the zoo: its published size, its text, and its loss and gradients against PyTorch by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from zoo import BY_HAND, SMALL

from unity_ir.dialects.convert import from_graph, to_graph
from unity_ir.errors import UnityError
from unity_ir.models import build, from_text, names
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, Node, Optimizer, erase, leaf, rewrite
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.types import tensor_type

PUBLISHED = {
    "bert_large": 335_174_458,  # transformers' BertForMaskedLM of bert-large-uncased
    "gpt2": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "mlp": 16 * 8192 * 8192,
}
"""Parameters."""


def test_every_model_is_tested():
    assert set(names()) == set(PUBLISHED) == set(SMALL) == set(BY_HAND)


@pytest.mark.parametrize("name", names())
def test_has_the_published_number_of_parameters(name: str):
    assert sum(w.types[0].elements for w in build(name).weights()) == PUBLISHED[name]


@pytest.mark.parametrize("name", names())
def test_reads_back_and_is_its_own_erasure(name: str):
    graph = build(name, **SMALL[name])
    func = from_graph(graph)
    func.verify()
    assert to_graph(func) == graph
    assert erase(graph) == graph


def in_double(graph: Graph) -> Graph:
    """The same graph over float64."""

    def double(node: Node, operands: Any) -> Any:
        if node.is_leaf and not node.types[0].is_integer:
            return leaf(node.op, tensor_type(node.types[0].shape, "f64"), None, **dict(node.attributes)).results
        return node.results if node.is_leaf else node.operator(*operands, **dict(node.attributes))

    return rewrite(graph, double)


@pytest.mark.parametrize("name", names())
def test_loss_and_gradients_equal_pytorch(name: str):
    graph = differentiate(in_double(build(name, **SMALL[name])), Optimizer())
    random = np.random.default_rng(0)
    below = {"segments": 2, "tokens": 11, "labels": 5}
    inputs = {
        n.name: random.integers(0, below[n.name], n.types[0].shape)
        if n.types[0].is_integer
        else random.standard_normal(n.types[0].shape)
        for n in graph.inputs
    }
    weights = {n.name: random.standard_normal(n.types[0].shape) for n in graph.weights()}
    values = interpret(graph, inputs, weights)

    at = {n: torch.tensor(a, requires_grad=True) for n, a in weights.items()}
    loss = BY_HAND[name](at, **{n: torch.tensor(a) for n, a in inputs.items()})
    loss.backward()
    assert float(values[graph.outputs[0]]) == pytest.approx(loss.item(), rel=1e-9)
    for update in graph.updates:
        want = at[update.weight.node.name].grad
        assert want is not None
        np.testing.assert_allclose(values[update.grad], want.numpy(), atol=1e-9, err_msg=update.weight.node.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt3", "no model 'gpt3'; known are bert_large"),
        ("gpt2,depth=2", "gpt2 has no key 'depth'; it has batch, sequence, layers"),
        ("gpt2,layers", "'layers' is not key=number"),
        ("gpt2,layers=-1", "'layers=-1' is not key=number"),
        ("gpt2,layers=0", "layers is 0; it must be 1 or more"),
        ("gpt2,hidden=10", "pcg.split_heads: "),
        ("builder", "no model 'builder'"),
    ],
)
def test_what_is_no_model_is_refused(text: str, message: str):
    with pytest.raises(UnityError, match=r"^[^\n]+$") as error:
        from_text(text)
    assert message in str(error.value)
