"""What devices hold, where operators are on parts of the machine."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
from devices import there
from extent import examples
from graphs import boxes
from hypothesis import given, settings
from hypothesis import strategies as st
from small import given as read
from small import op, weight, whole

from unity_ir.cost.memory import held
from unity_ir.cost.plan import cost
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Layout, Mesh, layout_type, pinned_at, pins_of
from unity_ir.pcg.types import tensor_type

OPTIMIZERS = (Optimizer(), Optimizer("adam"))


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from([(2,), (2, 3), (2, 2, 2)]), st.sampled_from(OPTIMIZERS))
@settings(max_examples=examples(60))
def test_what_counts_is_what_the_fullest_device_holds(seed: int, sizes: tuple[int, ...], optimizer: Optimizer):
    random, mesh = Random(seed), Mesh(sizes)

    def layout() -> Layout:
        return tuple(random.choice([0, REPEAT, pinned_at(random.randrange(size))]) for size in sizes)

    layouts = [layout() for _ in range(random.randint(1, 6))]
    nodes = [
        leaf(
            random.choice(["weight", "input"]),
            layout_type(tensor_type((24 * (i + 1), 5), "f32"), where, mesh),
            name=f"x{i}",
        )
        for i, where in enumerate(layouts)
    ]
    devices: list[int] = []
    for device in range(mesh.devices):
        total = 0
        for node, where in zip(nodes, layouts, strict=True):
            tensors = 1 if node.op == "input" else 2 if optimizer.name == "sgd" else 4
            total += there(device, pins_of(where), mesh) * prod(node.types[0].piece_shape) * 4 * tensors
        devices.append(total)
    weights = [n for n in nodes if n.op == "weight"]
    found = held([(n.result, where) for n, where in zip(nodes, layouts, strict=True)], weights, [], mesh, optimizer)
    assert sum(found.values()) == max(devices)


def two_towers(small: int, large: int) -> Graph:
    tops = [op("relu", op("matmul", read(f"x{n}", n, n), weight(f"w{n}", n, n))) for n in (small, large)]
    return whole(op("add", *(op("reduce_sum", x, dim=0, count=2) for x in tops)))


def test_towers_on_two_devices_hold_what_the_larger_does():
    machine, graph = boxes(2), two_towers(4, 12)
    places = [(pinned_at(int("12" in str(n.operands[0].shape))),) for n in graph.nodes() if n.is_compute]
    operators = [n for n in graph.nodes() if n.is_compute]
    plan = materialise(graph, dict(zip(operators, places, strict=True)), machine.mesh, {})
    memory = cost(plan, machine).memory
    assert memory["weights"] == memory["gradients"] == 12 * 12 * 8
    # Of the input, the sum and, for relu, what it made; scalars beside them.
    assert 2 * 12 * 12 * 8 <= memory["activations"] <= 3 * 12 * 12 * 8 + 4 * 8
