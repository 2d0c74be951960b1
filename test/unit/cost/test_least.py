"""The lower bounds on emitted time hold for every placement, and are reached where nothing else takes time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from extent import examples
from extent import sample as extent_sample
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from pinned import pinned

from unity_ir.cost.least import emitted_bound
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Node, Value, apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pinned_at
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
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
    for on in (machine, replace(machine, device=device), with_launches(machine)):
        found = as_emitted(plan, on, Optimizer(name))[0]
        anywhere, everywhere = (emitted_bound(plan, on, Optimizer(name), every) for every in (False, True))
        assert 0 < anywhere <= found * (1 + 1e-9)
        assert anywhere <= everywhere * (1 + 1e-9)
        assert with_pins or everywhere <= found * (1 + 1e-9)


def with_launches(machine: Machine) -> Machine:
    """A machine on which every kernel takes a microsecond to start, and links take nothing."""
    levels = tuple(replace(level, bandwidth=1e30) for level in machine.levels)
    return replace(machine, device=replace(machine.device, launch=1e-6), levels=levels)


SMALL = (
    "gpt2,layers=1,batch=4,sequence=32,hidden=64,heads=4,vocabulary=128",
    "llama3_8b,layers=1,batch=4,sequence=32,hidden=64,heads=4,kv_heads=2,intermediate=128,vocabulary=128",
    "bert_large,layers=1,batch=4,sequence=32,hidden=64,heads=4,vocabulary=128",
    "moe,batch=4,sequence=16,layers=1,hidden=64,heads=4,kv_heads=2,intermediate=128,experts=4,vocabulary=128",
    "dlrm,batch=64,rows=1000",
    "lenet,batch=8",
    "nmt,batch=8,steps=3,layers=1,hidden=32,vocabulary=64",
)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", extent_sample(SMALL, 4))
@pytest.mark.parametrize("dtype", ["f32", "bf16", "float8-all"])
def test_no_plan_of_the_zoo_is_faster(model: str, dtype: str):
    """Nor is any by hand, nor a random one, with kernels that are measured in nothing but launches, bytes or FLOPs."""
    graph = from_text(model)
    if dtype != "f32":
        graph = mixed_precision(graph, "bf16", products="" if dtype == "bf16" else dtype, smallest=16)
    machine = load("dgx-h100:1")
    plans = [made for name in ("data-parallel", "fsdp", "zero3", "expert") if (made := by_hand(graph, machine, name))]
    plans += [sample(graph, machine, seed) for seed in range(2)]
    assert len(plans) > 2
    device = machine.device
    for kind in (device, replace(device, launch=0.0), replace(device, memory_bandwidth=1e30)):
        on = with_launches(replace(machine, device=kind)) if kind.launch else replace(machine, device=kind)
        for plan in plans:
            found = as_emitted(plan, on)[0]
            for everywhere in (False, True):
                assert 0 < emitted_bound(plan, on, everywhere=everywhere) <= found * (1 + 1e-9)


def by_hand(graph: Graph, machine: Machine, name: str) -> Graph | None:
    try:
        return run(graph, machine, name).graph
    except UnityError:
        return None


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


CHAIN = (64, 96, 160, 32) * 7
"""The sizes of the layers of `products`."""


def products(rows: int, norm: bool = False) -> Graph:
    """Products one after the other, with a norm before each."""
    x = leaf("input", tensor_type((rows, CHAIN[0]), "f32"), name="x")
    y = leaf("input", tensor_type((rows, CHAIN[-1]), "f32"), name="y")
    h: Value = x.result
    for number, (wide, out) in enumerate(pairwise(CHAIN)):
        if norm:
            gain = leaf("weight", tensor_type((wide,), "f32"), name=f"g{number}").result
            h = apply("rms_norm", [h, gain], {"eps": 1e-6}).result
        w = leaf("weight", tensor_type((wide, out), "f32"), name=f"w{number}").result
        h = apply("matmul", [h, w]).result
    return Graph("f", (x, y), (apply("mse", [h, y.result]).result,))


@pytest.mark.parametrize("rows", [16, 4096])
def test_one_device_does_what_is_counted(rows: int):
    """Launches, bytes of weights or of activations, and updates are nearly all: 5% more would be above the time."""
    graph = products(rows)
    for launch, bandwidth in ((1e-3, 1e12), (0.0, 1e6)):
        machine = replace(boxes(1), device=replace(boxes(1).device, launch=launch, memory_bandwidth=bandwidth))
        assert emitted_bound(graph, machine) <= as_emitted(graph, machine)[0] < 1.05 * emitted_bound(graph, machine)


def test_norms_between_products_are_kernels():
    """
    Each is one forward, one for the gradients of its input and its gain, which read the same rows, and an update. The
    first one's gain needs the gradient of a product's operand.
    """
    machine = boxes(1)
    machine = replace(machine, device=replace(machine.device, launch=1e-3))
    plain, normed = products(64), products(64, norm=True)
    more = emitted_bound(normed, machine) - emitted_bound(plain, machine)
    assert more == pytest.approx(1e-3 * (3 * (len(CHAIN) - 1) + 1), rel=0.001)
    assert as_emitted(normed, machine)[0] - as_emitted(plain, machine)[0] >= more * 0.99


def test_what_is_fused_counts_once():
    """A cast and softmaxes are one kernel, which reads 16 bits and stores 32; the rest is little."""
    x, y = (leaf("input", tensor_type((512, wide), t), name=n) for n, wide, t in (("x", 512, "bf16"), ("y", 4, "f32")))
    h = apply("cast", [x.result], {"to": "f32"}).result
    for _ in range(4):
        h = apply("softmax", [h]).result
    h = apply("matmul", [h, leaf("weight", tensor_type((512, 4), "f32"), name="w").result]).result
    graph = Graph("f", (x, y), (apply("mse", [h, y.result]).result,))
    h100 = load("dgx-h100:1").device
    for launch, bandwidth in ((1e-3, 1e12), (0.0, 1e6)):
        machine = replace(boxes(1), device=replace(h100, launch=launch, memory_bandwidth=bandwidth))
        assert emitted_bound(graph, machine) <= as_emitted(graph, machine)[0] < 1.25 * emitted_bound(graph, machine)


def test_operators_that_cannot_be_divided_take_as_long_as_on_fewer_devices():
    """Of a batch of 6, two of four devices have work: a prime factor of 2 is in it once."""
    on = replace(boxes(2, 2).device, launch=0.0, memory_bandwidth=1e30)
    machine = replace(boxes(2, 2), device=on)

    def bound(rows: int, columns: int) -> float:
        x = leaf("input", tensor_type((rows, 35), "f32"), name="x")
        w = leaf("weight", tensor_type((35, columns), "f32"), name="w")
        h = apply("matmul", [x.result, w.result]).result
        y = leaf("input", tensor_type((rows, columns), "f32"), name="y")
        graph = Graph("f", (x, y), (apply("mse", [h, y.result]).result,))
        return emitted_bound(graph, machine, everywhere=True)

    assert bound(6, 15) == pytest.approx(bound(12, 15), rel=0.02)
    assert bound(6, 30) == pytest.approx(bound(12, 15), rel=0.02)


def test_a_path_is_no_faster_on_more_devices_than_it_has_work_for():
    """A hundred small products one after the other, whose launches no number of devices shares."""
    x = leaf("input", tensor_type((64, 64), "f32"), name="x")
    h = x.result
    for number in range(20):
        h = apply("matmul", [h, leaf("weight", tensor_type((64, 64), "f32"), name=f"w{number}").result]).result
    graph = Graph("f", (x,), (apply("mse", [h, x.result]).result,))
    for machine in (boxes(4), boxes(2, 2), boxes(4, 4)):
        on = replace(machine, device=replace(machine.device, launch=1e-3))
        # Forward, and the gradients of the layers' inputs; those of weights wait for nothing but are shared by devices.
        assert emitted_bound(graph, on) > 39e-3
        assert emitted_bound(graph, on, everywhere=True) > 79e-3


def test_towers_on_devices_of_their_own_take_what_is_counted():
    """Half of the work on each of two devices: less than any placement with everything on both, as launches count."""
    machine = boxes(2)
    machine = replace(machine, device=replace(machine.device, launch=1e-3))

    at: dict[Node, int] = {}

    def tower(device: int) -> Value:
        x = leaf("input", tensor_type((8, 8), "f32"), name=f"x{device}")
        h = x.result
        for number in range(20):
            w = leaf("weight", tensor_type((8, 8), "f32"), name=f"w{device}_{number}")
            h = apply("matmul", [h, w.result]).result
            at[h.node] = device
        loss = apply("mse", [h, x.result]).result
        at[loss.node] = device
        return loss

    loss = apply("add", [tower(0), tower(1)]).result
    at[loss.node] = 0
    graph = materialise(Graph("f", (), (loss,)), {n: (pinned_at(c),) for n, c in at.items()}, machine.mesh)
    found = as_emitted(graph, machine)[0]
    assert emitted_bound(graph, machine) <= found < 1.05 * emitted_bound(graph, machine)
    assert emitted_bound(graph, machine, everywhere=True) > 1.5 * found
