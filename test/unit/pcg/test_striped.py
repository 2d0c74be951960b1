"""Graphs whose tokens are in striped order compute what they did, and which they cannot be made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unity_ir.errors import UnityError
from unity_ir.models import build
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Value, apply, leaf
from unity_ir.pcg.striped import block_of, causal_degree, sequence_variables, striped
from unity_ir.pcg.types import tensor_type

SMALL: dict[str, Any] = {"batch": 2, "sequence": 24, "layers": 1, "hidden": 16, "vocabulary": 16}


def values(graph: Graph) -> list[Any]:
    """The outputs of a graph for random inputs and weights, by their names."""
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {}
    for node in sorted({*graph.inputs, *graph.weights()}, key=lambda n: n.name):
        shape = node.types[0].shape
        made[node.name] = rng.normal(size=shape) if node.types[0].is_floating else rng.integers(0, 16, shape)
    names = {n.name for n in graph.inputs}
    found = interpret(
        graph, {n: v for n, v in made.items() if n in names}, {n: v for n, v in made.items() if n not in names}
    )
    return [found[v] for v in graph.outputs]


def with_hidden(graph: Graph) -> Graph:
    """A model that returns its logits, too."""
    return Graph(graph.name, graph.inputs, (*graph.outputs, graph.outputs[0].node.operands[0]))


@pytest.mark.parametrize("stripes", [2, 3, 4])
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("gpt2", {"heads": 2}),
        ("llama3_8b", {"heads": 4, "kv_heads": 2, "intermediate": 16}),
        ("moe", {"heads": 2, "kv_heads": 2, "intermediate": 16, "experts": 4, "dispatch": "sparse"}),
    ],
)
def test_computes_the_same(model: str, keys: dict[str, Any], stripes: int):
    graph = with_hidden(build(model, **SMALL, **keys))
    after = striped(graph, stripes)
    assert after.inputs == graph.inputs
    assert not {"attention", "rotary"} & {n.op for n in after.nodes()}
    for want, got in zip(values(graph), values(after), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def tensor(name: str, *shape: int, dtype: str = "f32") -> Value:
    return leaf("input", tensor_type(shape, dtype), name=name).result


def decoder(x: Value, **attributes: Any) -> Value:
    """Causal attention of [2, 24, 8] with itself."""
    heads = apply("split_heads", [x], {"heads": 2}).result
    name = "attention_dropout" if "drop" in attributes else "attention"
    made = apply(name, [heads, heads, heads], {"scale": 0.5, "causal": 1, **attributes}).result
    return apply("merge_heads", [made]).result


def of(x: Value, *outputs: Value) -> Graph:
    return Graph("g", (x.node,), outputs)


def test_samples_and_tokens_in_one_dim():
    """As losses of PyTorch have them: what is in one dim with the sequence is followed through it."""
    x, labels = tensor("x", 2, 24, 8), tensor("labels", 2, 24, dtype="i64")
    flat = apply("reshape", [decoder(x)], {"shape": (48, 8)}).result
    loss = apply("cross_entropy", [flat, apply("reshape", [labels], {"shape": (48,)}).result]).result
    graph = Graph("g", (x.node, labels.node), (loss,))
    assert sum(n.op == "stripe" for n in striped(graph, 4).nodes()) == 2

    def of_classes(given: Graph) -> Any:
        rng = np.random.default_rng(0)
        inputs = {"x": rng.normal(size=(2, 24, 8)), "labels": rng.integers(0, 8, (2, 24))}
        return interpret(given, inputs, {})[given.outputs[0]]

    np.testing.assert_allclose(of_classes(striped(graph, 4)), of_classes(graph), rtol=1e-9)


def test_what_is_before_attention_may_depend_on_the_order():
    """Labels that are those of the next token, and sums over the tokens before: computed in natural order."""
    x, labels = tensor("x", 2, 24, 8), tensor("labels", 2, 24, dtype="i64")
    made = decoder(apply("cumsum", [x], {"dim": 1}).result)
    padded = apply("pad", [labels], {"dim": 1, "before": 0, "after": 1}).result
    after = apply("slice", [padded], {"dim": 1, "start": 1, "size": 24}).result
    flat = (apply("reshape", [v], {"shape": (48, *v.shape[2:])}).result for v in (made, after))
    graph = Graph("g", (x.node, labels.node), (apply("cross_entropy", list(flat)).result, after, made))
    again = striped(graph, 4)
    assert again.outputs[1] == after
    assert again.outputs[2].node.op == "unstripe"
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=(2, 24, 8)), "labels": rng.integers(0, 8, (2, 24))}
    before, found = interpret(graph, inputs, {}), interpret(again, inputs, {})
    for want, got in zip(graph.outputs, again.outputs, strict=True):
        np.testing.assert_allclose(found[got], before[want], rtol=1e-9, atol=1e-12)


AFTER = ", after pcg.attention, depends on the order of tokens"
REFUSED = [
    ("slice", lambda x: apply("slice", [decoder(x)], {"dim": 1, "start": 1, "size": 23}).result, f"slice{AFTER}"),
    ("cumsum", lambda x: apply("cumsum", [decoder(x)], {"dim": 1}).result, f"cumsum{AFTER}"),
    ("concat", lambda x: apply("concat", [decoder(x), x], {"dim": 1}).result, f"concat{AFTER}"),
    ("cut", lambda x: apply("reshape", [decoder(x)], {"shape": (2, 4, 6, 8)}).result, f"reshape{AFTER}"),
    ("flat", lambda x: apply("reshape", [decoder(x)], {"shape": (48, 8)}).result, "a dim of 48 has more than the 24"),
    ("drop", lambda x: decoder(x, drop=0.5, seed=1), "attention_dropout has no form"),
    ("all", lambda x: apply("relu", [x]).result, "which this one lacks"),
    ("other", lambda x: decoder(x, causal=0), "which this one lacks"),
]


@pytest.mark.parametrize(("make", "message"), [pytest.param(m, s, id=name) for name, m, s in REFUSED])
def test_what_depends_on_the_order_is_refused(make: Any, message: str):
    x = tensor("x", 2, 24, 8)
    with pytest.raises(UnityError, match=message) as raised:
        striped(of(x, make(x)), 4)
    assert str(raised.value).startswith("stripes: ")
    assert "\n" not in str(raised.value)


def test_models_with_queues_and_documents_are_refused():
    keys = {**SMALL, "heads": 2, "kv_heads": 2, "intermediate": 16, "experts": 4, "dispatch": "sparse"}
    with pytest.raises(UnityError, match="queue, after pcg"):
        striped(build("moe", **keys, capacity=100), 4)
    with pytest.raises(UnityError, match=r"pcg\.attention_ranges has no form for tokens in striped order"):
        striped(build("gpt2", **SMALL, heads=2, separator=1), 4)


def test_masked_scores_are_shared_evenly():
    """The last of as many pieces as stripes has at most one part in the number of rounds more than the average."""
    for length, stripes in ((1024, 2), (8192, 8), (262144, 64), (48, 4)):
        block = block_of(length, stripes)
        rounds = length // (stripes * block)
        positions = np.arange(length).reshape(rounds, stripes, block)
        seen = (positions + 1.0).sum((0, 2))
        assert seen.max() / seen.mean() <= 1 + 1 / rounds
        assert rounds >= 8 or block <= 64


def test_blocks():
    assert [block_of(n, 8) for n in (262144, 8192, 4096, 1024, 96, 8)] == [128, 128, 64, 64, 4, 1]
    with pytest.raises(UnityError, match="3 do not divide a sequence of 16 tokens"):
        block_of(16, 3)


def test_variables_along_the_sequence():
    graph = build("llama3_8b", **SMALL, heads=4, kv_heads=2, intermediate=16)
    found = {node.op: variable for node, variable in sequence_variables(graph).items()}
    assert found["attention"] == "i"
    assert found["rotary"] == "s"
    assert found["split_heads"] == "s"
    assert len(sequence_variables(graph)) == sum(n.is_compute for n in graph.nodes())
    assert causal_degree(graph) == (1, 24)
