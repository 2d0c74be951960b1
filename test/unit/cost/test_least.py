"""The lower bound on emitted time holds for every placement, and is reached where arithmetic is all there is."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from extent import examples
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned import pinned

from unity_ir.cost.least import emitted_bound
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph, Optimizer, apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.random_plan import sample
from unity_ir.simulate.report import as_emitted


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(["sgd", "adamw"]))
@settings(max_examples=examples(60))
def test_no_placement_is_faster(seed: int, with_pins: bool, name: str):
    graph = random_graph(Random(seed), Random(seed).randint(1, 8), dims=(2, 4, 6, 12))
    machine = boxes(2, 2)
    plan, machine = pinned(graph, seed) if with_pins else (sample(graph, machine, seed), machine)
    # Without launches and with fast memory, arithmetic is a large part of the time.
    device = replace(machine.device, launch=0.0, memory_bandwidth=1e3 * machine.device.memory_bandwidth)
    for on in (machine, replace(machine, device=device)):
        found = as_emitted(plan, on, Optimizer(name))[0]
        assert 0 < emitted_bound(plan, on, Optimizer(name)) <= found * (1 + 1e-9)


def test_a_product_alone_is_its_arithmetic():
    x, y = (leaf("input", tensor_type((512, 512), "f32"), name=n) for n in "xy")
    h = apply("matmul", [x.result, leaf("weight", tensor_type((512, 512), "f32"), name="w").result]).result
    graph = Graph("f", (x, y), (apply("mse", [h, y.result]).result,))
    machine = boxes(1)
    device = replace(machine.device, launch=0.0, memory_bandwidth=1e30)
    machine = replace(machine, device=device)
    # Forward and the weight's gradient; the input needs none.
    products = 2 * 2 * 512**3 / device.peak("f32") / device.efficiency
    assert emitted_bound(graph, machine) == pytest.approx(products, rel=0.01)
    # A whole step has the same bound as the forward that it is made of.
    step = training_step(graph, Optimizer())
    assert emitted_bound(step, machine) == pytest.approx(emitted_bound(graph, machine), rel=1e-9)
