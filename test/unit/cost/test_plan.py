"""What a forward graph is said to cost is what its whole training step, written out, costs."""

from __future__ import annotations

from random import Random

import pytest
from extent import examples
from graphs import boxes, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost, update_bytes
from unity_ir.cost.stats import head, table
from unity_ir.cost.work import kernel_of
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.pcg.differentiate import differentiate, needs_gradient
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.search.baselines.data_parallel import data_parallel
from unity_ir.search.baselines.random_plan import sample
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.solver import Solver
from unity_ir.search.layouts.space import Spaces

SGD, ADAM = Optimizer(), Optimizer("adam")
MACHINES = [boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6), boxes(2, 3, overhead=1e-6)]


def plans(graph: Graph, machine: Machine, seed: int) -> list[Graph]:
    """The best, a random one, and the data-parallel one if there is one."""
    solver = Solver(Spaces(machine), SGD)
    found = [realise(graph, solver.solve(graph), solver), sample(graph, machine, seed)]
    try:
        found.append(data_parallel(graph, machine))
    except UnityError:
        pass
    return found


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(MACHINES))
@settings(max_examples=examples(80))
def test_forward_costs_what_its_training_step_costs(seed: int, machine: Machine):
    graph = random_graph(Random(seed), Random(seed).randint(1, 7), dims=(2, 4, 6, 12))
    for plan in plans(graph, machine, seed):
        step = differentiate(plan, SGD, machine.mesh)
        said, done = cost(plan, machine, SGD), cost(step, machine)
        fused = cost(fuse_collectives(step), machine)
        assert (fused.elements, fused.time) == (done.elements, pytest.approx(done.time))
        forward = set(plan.nodes())
        backward = [n for n in step.nodes() if n.is_compute and n not in forward]
        # Gradients of a value with several users are added up, which is not said.
        sums = [n for n in backward if n.op == "add"]
        device = machine.device
        adding = sum(device.kernel_time(k.flops, k.bytes, k.dtype) for k in map(kernel_of, sums))
        kernels = sum(len(o.work.backward) for o in said.operators)
        assert len(backward) - len(sums) <= kernels
        assert done.elements <= said.elements
        assert done.compute_time - adding <= said.compute_time + 1e-12
        shared = any(
            n.op == "add" and all(v.node in needs_gradient(plan.nodes()) for v in n.operands) for n in plan.nodes()
        )
        if len(backward) - len(sums) == kernels and not shared:
            # No two gradients happen to be one and the same node.
            assert done.elements == said.elements
            assert done.compute_time - adding == pytest.approx(said.compute_time, rel=1e-9)
            assert done.communication_time == pytest.approx(said.communication_time, rel=1e-9)
        assert done.update == pytest.approx(said.update, rel=1e-12)  # summed in another order
        for what in ("weights", "gradients", "optimizer state"):
            assert done.memory[what] == said.memory[what]


def linear(machine: Machine) -> Graph:
    """Data-parallel x w, mean squared error: 8 samples, 6 features, 4 outputs."""
    x, y = (leaf("input", tensor_type(s, "f32"), name=n) for s, n in [((8, 6), "x"), ((8, 4), "y")])
    w = leaf("weight", tensor_type((6, 4), "f32"), name="w").result
    graph = Graph("f", (x, y), (apply("mse", [apply("matmul", [x.result, w]).result, y.result]).result,))
    return data_parallel(graph, machine)


def test_data_parallel_costs_an_all_reduce_of_the_gradients():
    machine = boxes(4, overhead=1e-6, bandwidth=1e9)
    found = cost(linear(machine), machine, ADAM)
    assert found.elements == 2 * (4 - 1) * 24
    assert found.bytes == 4 * found.elements
    assert found.communication_time == pytest.approx(1e-6 + min(6 * 1e-6, 4 * 1e-6 * 2) * 0 + 6e-6 * 0 + all_reduce())
    assert found.memory["weights"] == found.memory["gradients"] == 4 * 24
    assert found.memory["optimizer state"] == 2 * 4 * 24
    assert found.memory["activations"] == 4 * (2 * 6 + 2 * 4 + 2 * 4 + 1)


def all_reduce() -> float:
    """24 floats among 4 devices: a tree's two messages of 2 hops, a microsecond each, are fewer than a ring's 6."""
    return 2 * 2 * 1e-6 + 2 * 96 / 1e9


def test_work_of_a_product_is_counted():
    machine = boxes(4)
    plan = cost(linear(machine), machine)
    (product,) = [o.work for o in plan.operators if o.node.op == "matmul"]
    (forward,) = product.forward
    assert (forward.flops, forward.bytes) == (2 * 2 * 6 * 4, 4 * (2 * 6 + 6 * 4 + 2 * 4))
    # Of the input no gradient is wanted: the only kernel of the backward is the weight's.
    (backward,) = product.backward
    assert (backward.flops, backward.bytes) == (forward.flops, forward.bytes)


def test_update_counts_the_optimizer():
    assert (update_bytes(8, SGD), update_bytes(8, ADAM)) == (8 * 3, 8 * 7)
    machine = boxes(1, overhead=0.0)
    times = [cost(linear(machine), machine, o).update for o in (SGD, ADAM)]
    assert times == sorted(times)
    assert times[0] > 0


def test_branch_without_loss_costs_its_forward_only():
    machine = boxes(2, overhead=1e-6)
    x = leaf("input", tensor_type((4, 4), "f32"), name="x")
    w, v = (leaf("weight", tensor_type((4, 4), "f32"), name=n).result for n in "wv")
    h = apply("matmul", [x.result, w]).result
    loss = apply("mse", [h, x.result]).result
    graph = Graph("f", (x,), (loss, apply("relu", [apply("matmul", [h, v]).result]).result))
    found = cost(graph, machine)
    assert [bool(o.work.backward) for o in found.operators] == [True, True, False, False]
    assert found.memory["weights"] == 2 * found.memory["gradients"]
    assert found.time < cost(Graph("f", (x,), graph.outputs[1:]), machine).time + found.operators[1].backward + 1


def test_stats_say_what_was_computed():
    machine = boxes(4)
    plan = cost(linear(machine), machine)
    text = head("f", plan) + table(plan)
    assert "@f on boxes (4 x V100-SXM2-16GB), one iteration" in text
    assert "144 elements, 576 bytes, over all devices" in text
    assert "m0 by 4" in text


def test_graph_that_does_not_fit_the_machine_is_refused():
    with pytest.raises(UnityError, match=r"^pcg\.input: its view names device 3, but the machine has 2 devices"):
        cost(linear(boxes(4)), boxes(2))
