"""What repeats is written once: the same lines, the same table, the same numbers."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from extent import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.forms.addresses import Names
from unity_ir.lowering.emit import reference_text as reference_module
from unity_ir.lowering.emit.reference_text import reference_text
from unity_ir.lowering.emit.repeats import LEAST, Repeat, numbered, pattern, repeats
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.types import tensor_type


@given(st.lists(st.sampled_from("ab"), max_size=30), st.lists(st.sampled_from("abc"), max_size=30))
def test_runs_are_of_equal_parts(some: list[str], more: list[str]):
    keys = [*some, *more]
    found = list(repeats(keys))
    for run in found:
        parts = [keys[run.start + i * run.period :][: run.period] for i in range(run.count)]
        assert run.count >= LEAST
        assert all(part == parts[0] for part in parts)
        assert run.end <= len(keys)
    assert all(a.end <= b.start for a, b in pairwise(found))


def test_the_run_that_leaves_the_fewest_items_is_found():
    assert list(repeats("xaabaabaabaaby")) == [Repeat(1, 3, 4)]
    assert list(repeats("ababcd")) == []
    assert list(repeats("ababab", lambda run: 2)) == []


@given(st.integers(0, 12), st.integers(1, 3), st.integers(3, 6), st.text("ab.'{\\\"", max_size=4))
def test_numbered_names_are_what_they_say(first: int, step: int, count: int, rest: str):
    names = [f"h{first + i * step}.{rest}7.{first + i}" for i in range(count)]
    text = numbered(names, "i")
    assert (text is None) == ("{" in rest)
    if text is not None:
        assert [eval(text, {"i": i}) for i in range(count)] == names
    assert len({pattern(n) for n in names}) == 1


@pytest.mark.parametrize("names", [["a0", "a1", "a3"], ["a2", "a1", "a0"], ["a0", "b1"], ["a1", "a01"], ["a0", "a1.2"]])
def test_names_that_do_not_count_are_left(names: list[str]):
    assert numbered(names, "i") is None


def layered(seed: int) -> Graph:
    """Alike layers, of which each may read what layers before, inputs and constants have made, and what is around."""
    random = Random(seed)
    x = leaf("input", tensor_type((3, 3), "f32"), name="layer")
    steps = random.randint(1, 5)
    plan = [
        (random.choice(["matmul", "mul", "add", "relu", "split"]), random.random(), random.random())
        for _ in range(steps)
    ]
    values: list[Value] = [x.result, apply("tanh", [x.result]).result]
    for i in range(random.randint(3, 9)):
        odd = random.random() < 0.05
        for n, (op, a, b) in enumerate(plan):
            # Counted from the end, so that layers are alike, or from the front.
            recent = values[-1 - int(a * min(2 * steps, len(values)))] if a < 0.9 else values[0]
            other = values[-1 - int(b * min(2 * steps, len(values)))]
            if op == "matmul":
                weight = leaf("weight", tensor_type((3, 3), "f32"), name=f"h.{i}.w{n}" if b > 0.1 else f"v{n}.{i * i}")
                values.append(apply("matmul", [recent, weight.result]).result)
            elif op == "relu" or (odd and n == 0):
                values.append(apply("relu", [recent]).result)
            elif op == "split":
                left, right = apply("split", [recent], {"dim": 1, "sizes": (1, 2)}).results
                values.append(apply("concat", [right, left], {"dim": 1}).result)
            else:
                values.append(apply(op, [recent, other]).result)
    total = values[-1]
    for v in random.sample(values, min(len(values), random.choice([0, 0, 0, 1]))):
        total = apply("add", [total, v]).result
    rows = apply("reduce_mean", [total], {"dim": 1}).result
    return Graph("f", (x,), (apply("reduce_mean", [rows], {"dim": 0}).result,))


def run(graph: Graph) -> tuple[str, Any]:
    names = Names({"weights", "batch", "torch"})
    text = reference_text(graph, names.new, set())
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    generator = torch.Generator().manual_seed(0)

    def random(node: Node) -> torch.Tensor:
        return torch.randn(node.types[0].shape, generator=generator, dtype=torch.float64)

    weights = {n.name: random(n) for n in sorted(graph.weights(), key=lambda n: n.name)}
    return text, scope["reference"](weights, {"layer": random(graph.inputs[0])})


@given(st.integers(0, 10**6))
@settings(max_examples=examples(150))
def test_a_loop_computes_what_its_lines_do(seed: int):
    graph = layered(seed)
    _, found = run(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_module, "repeats", lambda keys, alike: iter(()))
        straight, want = run(graph)
    assert "for layer" not in straight
    assert torch.equal(found, want)


def test_layers_are_loops():
    loops = sum("for layer in range(" in run(layered(seed))[0] for seed in range(60))
    assert loops > 15
