"""Steps whose batch is divided in time: types, the plan of the loop from that of a micro-batch, gradients in pieces."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import numpy as np
import pytest
from extent import examples
from graphs import boxes, data_for, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.context import Context
from xdsl.dialects.func import FuncOp
from xdsl.parser import Parser
from xdsl.universe import Universe

from unity_ir.dialects.convert import from_graph, to_graph
from unity_ir.errors import UnityError
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.micro_batches import in_micro_batches, micro_batch
from unity_ir.pcg.node import apply, leaf, parallel
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import InTime, tensor_type
from unity_ir.search.baselines.random_plan import sample

SGD = Optimizer()


CONTEXT = Context()
for _name, _factory in Universe.get_multiverse().all_dialects.items():
    CONTEXT.register_dialect(_name, _factory)


def parsed(text: str) -> Graph:
    """The graph of a function's text."""
    (func,) = Parser(CONTEXT, text).parse_module().ops
    assert isinstance(func, FuncOp)
    return to_graph(func)


def of_samples(random: Random, count: int) -> tuple[Graph, dict[str, int], Graph]:
    """A random graph that can be divided in time, the dims of its samples, and its graph of one micro-batch."""
    while True:
        graph = random_graph(random, random.randint(2, 8), dims=(4, 8, 16))
        dims = {n.name: random.randrange(len(n.result.shape)) for n in graph.inputs if n.result.shape}
        with suppress(UnityError):
            return graph, dims, micro_batch(graph, dims, count)


@given(st.integers(0, 10**6).map(Random))
@settings(max_examples=examples(40))
def test_a_step_in_micro_batches_is_the_step_of_the_whole_batch(random: Random):
    """Loss and gradients, of random plans, weights moved in the loop or before it; and the text says all of it."""
    count = random.choice((2, 4))
    graph, dims, small = of_samples(random, count)
    machine = boxes(2)
    plan = in_micro_batches(
        sample(small, machine, random.randrange(1000)), dims, count, lambda weight: random.random() < 0.5
    )
    assert erase(plan) == graph
    short = with_dtype(plan, "bf16")
    assert [n.result.type.time for n in short.inputs] == [n.result.type.time for n in plan.inputs]
    step = differentiate(plan, SGD, machine.mesh)
    assert parsed(str(from_graph(step))) == step
    inputs, weights = data_for(graph)
    whole = differentiate(graph, SGD)
    wanted = interpret(whole, inputs, weights)
    found = interpret_pieces(step, inputs, weights)
    gradients = {u.weight.node.name: wanted[u.grad] for u in whole.updates}
    for update in step.updates:
        got = join(found[update.grad], update.grad.type)
        np.testing.assert_allclose(got, gradients[update.weight.node.name], rtol=1e-9, atol=1e-9)
    for value, of in zip(step.outputs, whole.outputs, strict=True):
        np.testing.assert_allclose(join(found[value], value.type), wanted[of], rtol=1e-9, atol=1e-9)


def test_the_gradient_of_a_weight_is_accumulated_where_it_is_reused():
    x = leaf("input", tensor_type((8, 4), "f32", (4, 1), time=InTime(0, 2)), name="x").result
    w = leaf("weight", tensor_type((4, 6), "f32"), name="w").result
    loop = parallel("replicate", parallel("reuse", w, by=2).result, by=2).result
    y = apply("matmul", (x, loop)).result
    assert str(y.type) == "!pcg.tensor<[8:4:t2, 6], f32>"
    loss = apply("reduce_sum", (y,), {"dim": 0, "count": 2}).result
    assert str(loss.type) == "!pcg.tensor<[], f32, sum = 4:t2>"
    out = parallel("accumulate", loss, by=2).result
    (update,) = differentiate(Graph("f", (x.node,), (out,)), SGD).updates
    # Summed over devices in each micro-batch, as the weight is replicated in each; then over micro-batches.
    assert update.grad.node.op == "accumulate"
    assert update.grad.node.operands[0].node.op == "reduce"


def test_what_devices_add_up_and_micro_batches_average_has_a_gradient_in_time():
    """
    The gradient of the mean is in copies, 2 on devices and 2 in time. It is spread along the samples, which 2
    micro-batches divide; 2 devices could.
    """
    x = leaf("input", tensor_type((8, 4), "f32", (2, 2), time=InTime(0, 2)), name="x").result
    w = leaf("weight", tensor_type((4, 6), "f32", (2, 1)), name="w").result
    y = apply("matmul", (x, parallel("reuse", w, by=2).result)).result
    assert str(y.type) == "!pcg.tensor<[8:2:t2, 6], f32, sum = 2>"
    mean = apply("reduce_mean", (y,), {"dim": 0, "count": 2}).result
    assert str(mean.type) == "!pcg.tensor<[], f32, sum = 4:t2>"
    out = parallel("reduce", parallel("accumulate", mean, by=2).result, by=2).result
    step = differentiate(Graph("f", (x.node,), (out,)), SGD)
    (spread,) = (n for n in step.nodes() if n.op == "reduce_mean_grad")
    assert spread.types == (y.type.dual,)
    assert spread.configuration_in_time.degrees == {"k0": 2}
    assert parsed(str(from_graph(step))) == step


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("<[8:4:t3], f32>", "of a degree of 4, t3 cannot be in time; it must divide it"),
        ("<[8:4:t2], f32, sum = 2:t2>", "two of its degrees are divided in time; only one can be"),
        ("<[8:4:2], f32>", "t"),
        ("<[8:4:q2], f32>", "expected t and a number of micro-batches, such as t4, got q2"),
        ("<[8:4:t0], f32>", "t0 is not a number of micro-batches; it starts at 1"),
    ],
)
def test_types_in_time_that_are_none(type: str, message: str):
    with pytest.raises(Exception, match=message):
        parsed(f"func.func @f(%x: !pcg.tensor{type}) -> !pcg.tensor{type} {{ func.return %x : !pcg.tensor{type} }}")


def mean(x_type: str = "f32") -> tuple[Graph, dict[str, int]]:
    x = leaf("input", tensor_type((8, 4, 2, 2), x_type), name="x").result
    w = leaf("weight", tensor_type((8, 4, 2, 2), x_type), name="w").result
    return Graph("f", (x.node,), (apply("mse", (apply("mul", (x, w)).result, x)).result,)), {"x": 0}


def test_what_cannot_be_divided_in_time_is_refused():
    graph, dims = mean()
    with pytest.raises(UnityError, match="3 do not divide the 8 samples of input 'x'"):
        micro_batch(graph, dims, 3)
    with pytest.raises(UnityError, match="weight 'w' has one entry per sample; use 1 micro-batch"):
        micro_batch(graph, dims, 2)
    x = graph.inputs[0].result
    center = apply("batch_mean", (x,)).result
    late = Graph("f", graph.inputs, (apply("batch_stats", (x, center)).results[0],))
    with pytest.raises(UnityError, match=r"batch_mean of all samples, which is known only after all micro-batches"):
        micro_batch(late, dims, 2)
