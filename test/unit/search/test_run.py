"""The strategies, and what a search may not depend on."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from graphs import boxes, random_cnn, random_graph, with_memory

from unity_ir import models
from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
from unity_ir.search.choose.hidden_moves import plans_with_hidden_moves
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.joint.best_first import joint
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.run import run_in_time
from unity_ir.simulate.report import as_emitted


def mlp() -> Graph:
    """Unity's Figure 2: 784-512-10, 64 samples, its loss over samples."""
    x, t = (leaf("input", tensor_type(s, d), name=n) for s, d, n in [((64, 784), "f32", "x"), ((64,), "i64", "t")])
    w1, w2 = (leaf("weight", tensor_type(s, "f32"), name=n).result for s, n in [((784, 512), "w1"), ((512, 10), "w2")])
    h = apply("relu", [apply("matmul", [x.result, w1]).result]).result
    return Graph("mlp", (x, t), (apply("cross_entropy", [apply("matmul", [h, w2]).result, t.result]).result,))


def test_figure_2_of_unity():
    machine = load("2gpu")
    joint, data = (run(mlp(), machine, strategy) for strategy in ("joint", "data-parallel"))
    # Both gradients all-reduced: 2 (n - 1) elements of each weight.
    assert data.cost.elements == 2 * (784 * 512 + 512 * 10)
    assert joint.cost.elements == 1280
    assert joint.cost.time < data.cost.time
    assert joint.gap == pytest.approx(0, abs=1e-6)
    assert joint.bound is not None
    assert joint.bound <= joint.cost.time + 1e-9


@pytest.mark.parametrize("strategy", ["joint", "data-parallel", "random"])
def test_one_device_needs_no_communication(strategy: str):
    result = run(mlp(), load("box:1"), strategy)
    assert (result.cost.elements, result.cost.communication_time) == (0, 0)


@pytest.mark.slow
def test_joint_is_no_worse_than_any_other():
    for seed in range(12):
        graph, machine = random_graph(Random(seed), 5, dims=(4, 8)), boxes(2, 2, overhead=1e-6)
        joint = run(graph, machine)
        assert joint.bound is not None
        assert joint.bound <= joint.cost.time + 1e-9
        assert joint.cost.time <= run(graph, machine, "random", options={"seed": seed}).cost.time + 1e-9
        try:
            data = run(graph, machine, "data-parallel")
        except UnityError:
            continue
        assert joint.cost.time <= data.cost.time + 1e-9


def test_a_weight_that_several_operators_read_is_brought_to_them_once():
    """Its gradients are added before they are summed over the samples, as data parallelism does."""
    x, y = (leaf("input", tensor_type((65536, 512), "f32"), name=n) for n in "xy")
    w = leaf("weight", tensor_type((512, 512), "f32"), name="w").result
    h = apply("matmul", [apply("relu", [apply("matmul", [x.result, w]).result]).result, w]).result
    graph = Graph("tied", (x, y), (apply("mse", [h, y.result]).result,))
    for machine in (load("2gpu"), boxes(2, 2, overhead=1e-6)):
        joint, data = run(graph, machine), run(graph, machine, "data-parallel")
        assert joint.cost.time <= data.cost.time + 1e-9
        assert joint.bound is not None
        assert joint.cost.time == pytest.approx(joint.bound, rel=1e-6)


def test_search_of_a_plan_is_search_of_its_erasure():
    machine = boxes(2, 2, overhead=1e-6)
    once = run(mlp(), machine)
    assert run(once.graph, machine).graph == once.graph


def test_what_cannot_be_searched_is_refused():
    machine = load("2gpu")
    with pytest.raises(UnityError, match=r"^search: unknown strategy 'x'; known are joint, data-parallel, "):
        run(mlp(), machine, "x")
    with pytest.raises(UnityError, match=r"^func\.func @mlp: search before pcg-differentiate"):
        run(differentiate(mlp(), Optimizer()), machine)
    with pytest.raises(UnityError, match=r"^data-parallel: input x has batch 64, which 3 devices do not divide"):
        run(mlp(), boxes(3), "data-parallel")
    x = leaf("input", tensor_type((), "f32"), name="x")
    w = leaf("weight", tensor_type((2**16, 2**16), "f32"), name="w").result
    big = Graph(
        "big", (x,), (apply("mul", [apply("reduce_sum", [w], {"dim": 0, "count": 2}).result, x.result]).result,)
    )
    reserved = r"V100-SXM2-16GB has \(16.9 GB less 900.0 MB in reserve\)"
    with pytest.raises(
        UnityError, match=rf"^search: no plan fits: the smallest found needs .* GB per device, .* {reserved}"
    ):
        run(big, load("box:1"))


PROGRAM = """
from random import Random
from graphs import boxes, random_cnn, random_graph, with_memory
from small import fanned, given, op, weight, whole
from dataclasses import replace
from unity_ir.errors import UnityError
from unity_ir.search import all_strategies, run
def results():
    machine, found = boxes(2, 2, overhead=1e-6, bandwidth=1e12), []
    tower = lambda i: op("matmul", given(f"x{i}", 511, 511), weight(f"w{i}", 511, 511))
    towers = whole(op("concat", tower(0), tower(1), dim=0))
    for graph in (random_graph(Random(0), 6, dims=(4, 8)), fanned(Random(4), 5), towers):
        found.append(run(graph, machine))
        short = with_memory(machine, 0.8 * found[-1].cost.memory_bytes)
        for strategy, on in [("joint", short), *((s, machine) for s in all_strategies())]:
            try:
                found.append(run(graph, on, strategy, options={"budget": 60} if strategy == "mcmc" else None))
            except UnityError as error:
                print(error)
    assert any(f.proved is not None for f in found)
    return found
for result in results():
    names = {node: i for i, node in enumerate(result.graph.nodes())}
    for node in names:
        operands = [(names[v.node], v.index) for v in node.operands]
        print(node.op, operands, node.attributes, *node.types, node.view)
    print(result.cost.time, result.bound, result.derivation)
"""


@pytest.mark.zoo
@pytest.mark.slow
def test_search_is_the_same_in_every_process():
    def output(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
        ).stdout

    first, second = output("0"), output("4242")
    assert len(first) > 1000
    assert first == second


@pytest.mark.slow
def test_start_up_needs_no_framework():
    """The core is imported by every command; torch, triton, xDSL and rich are for those who use them."""
    code = "import sys, unity_ir.search; print([m for m in ('torch', 'triton', 'xdsl', 'z3') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_rewrites_of_the_joint_search_keep_the_meaning():
    graph, machine = mlp(), boxes(2, overhead=1e-6)
    found = run(graph, machine)
    random = np.random.default_rng(0)
    inputs = {"x": random.standard_normal((64, 784)), "t": random.integers(0, 10, 64)}
    weights = {"w1": random.standard_normal((784, 512)) / 28, "w2": random.standard_normal((512, 10)) / 22}
    (value,), (expected,) = found.graph.outputs, graph.outputs
    np.testing.assert_allclose(
        interpret(found.graph, inputs, weights)[value], interpret(graph, inputs, weights)[expected], rtol=1e-10
    )
    assert cost(found.graph, machine).time == found.cost.time


@pytest.mark.zoo
@pytest.mark.slow
def test_a_graph_that_sequential_finds_is_divided_as_well_by_joint():
    """On machines of many axes, how these are cut into groups is looked for again for the rewritten graph."""
    graph, machine = models.build("mlp", batch=24576), load("summit:16")
    seconds = {s: as_emitted(f.graph, machine)[0] for s in ("joint", "sequential") for f in [run(graph, machine, s)]}
    assert seconds["joint"] <= seconds["sequential"] * (1 + 1e-9)


@pytest.mark.slow
def test_joint_is_no_worse_than_sequential():
    for seed in range(8):
        graph, machine = random_graph(Random(seed), 6, dims=(4, 8)), boxes(2, 2, overhead=1e-6)
        joint, sequential = run(graph, machine), run(graph, machine, "sequential")
        assert joint.cost.time <= sequential.cost.time * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_windows_are_searched_on_one_device_too(seed: int):
    graph = random_cnn(Random(seed), 3)
    assert run(graph, load("box:1")).cost.elements == 0


@pytest.mark.parametrize(("batch", "others"), [(128, 0), (512, 1)])
def test_plans_with_moves_hidden_are_those_of_every_part(batch: int, others: int):
    graph, machine = models.build("xdl", batch=batch), boxes(8)
    found = joint(graph, machine, (), Optimizer())
    plans = [
        realise(graph, s.solve(graph), s)
        for s in (found.solver.with_price(Price(hidden=part)) for part in limits().hidden_shares)
    ]
    every = [plan for plan in dict.fromkeys(plans) if plan != found.graph]
    plans = plans_with_hidden_moves(found, machine, Optimizer(), limits().hidden_shares)
    assert [plan for _, (plan, _) in plans] == every
    assert len(every) == others


@pytest.mark.slow
def test_the_error_of_stages_is_that_of_two_micro_batches():
    """One micro-batch is no pipeline: that is not why there is none."""
    graph = models.from_text("gpt2,batch=4,sequence=8,layers=2,hidden=8,heads=2,vocabulary=8")
    with pytest.raises(UnityError, match="the plan found needs"):
        run_in_time(graph, with_memory(boxes(2, 2), 10_000), "fsdp", stages=Stages(2))
