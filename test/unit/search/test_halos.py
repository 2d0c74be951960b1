"""Plans that divide the rows and columns of images: they mean what the serial graph means, and cost what is said."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from graphs import boxes, data_for, random_cnn
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.machine import Machine
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.solver import Solver
from unity_ir.search.layouts.space import Spaces

SGD = Optimizer()
MACHINES = [boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6), boxes(2, 3, overhead=1e-6)]


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(MACHINES))
@settings(max_examples=40)
def test_a_random_plan_of_a_cnn_means_the_same(seed: int, machine: Machine):
    graph = random_cnn(Random(seed), Random(seed).randint(1, 5))
    plan = sample(graph, machine, seed)
    assert erase(plan) == graph
    step = differentiate(plan, SGD, machine.mesh)
    data = data_for(step, seed)
    whole, pieces = interpret(step, *data), interpret_pieces(step, *data)
    for value in (*step.outputs, *(u.grad for u in step.updates)):
        np.testing.assert_allclose(join(pieces[value], value.type), whole[value], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(MACHINES[:2]))
@settings(max_examples=20)
def test_no_random_plan_of_a_cnn_is_below_the_bound(seed: int, machine: Machine):
    graph = random_cnn(Random(seed), Random(seed).randint(1, 4))
    solver = Solver(Spaces(machine), SGD)
    found = solver.solve(graph)
    assert cost(realise(graph, found, solver), machine, SGD).time == pytest.approx(found.seconds, rel=1e-6)
    assert cost(sample(graph, machine, seed), machine, SGD).time >= found.seconds * (1 - 1e-9)


def spatial(rows: int = 1024, channels: int = 1) -> Graph:
    """One convolution of a large image by few weights, of one sample: only its rows and columns can be divided."""
    x = leaf("input", tensor_type((1, channels, rows, 6), "f64"), name="x")
    w = leaf("weight", tensor_type((1, channels, 3, 3), "f64"), name="w")
    attributes = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    y = apply("conv2d", [x.result, w.result], attributes).result
    target = leaf("input", tensor_type(y.shape, "f64"), name="target")
    return Graph("spatial", (x, target), (apply("mse", [y, target.result]).result,))


def test_large_images_are_divided_with_a_halo():
    machine = boxes(2)
    graph = spatial()
    solver = Solver(Spaces(machine), SGD)
    plan = realise(graph, solver.solve(graph), solver)
    (halo,) = (n for n in plan.nodes() if n.op == "halo")
    assert dict(halo.attributes) == {"dim": 2, "low": 1, "high": 1}
    said, done = cost(plan, machine, SGD), cost(differentiate(plan, SGD, machine.mesh), machine)
    # A row of 6 goes each way, and the input needs no gradient; the gradient of 9 weights is summed up.
    assert said.elements == done.elements == 2 * 6 + 2 * 9
    assert said.time == pytest.approx(done.time)
