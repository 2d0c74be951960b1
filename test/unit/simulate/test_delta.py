"""Delta simulation is full simulation, to the tick."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from extent import examples
from graphs import boxes, data_for, random_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import from_text
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT
from unity_ir.pcg.types import tensor_type
from unity_ir.search import run
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.choices import fits, random_assignment
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.full import simulate

MODELS = [
    "lenet,batch=8",
    "mlp",
    "rnnlm,batch=4,steps=3,hidden=8,vocabulary=16",
    "nmt,batch=4,steps=3,hidden=8,vocabulary=16",
    "gpt2,batch=2,layers=1",
]
MACHINES = [boxes(2, overhead=1e-6), boxes(2, 2, overhead=1e-6), boxes(2, 3, overhead=1e-6), boxes(2, 2, 2, 2)]


def start(graph: Graph, machine: Machine, random: Random, **options: object) -> Simulation:
    nodes = [n for n in graph.nodes() if n.is_compute]
    first = {n: random_assignment(n, machine, random) for n in nodes}
    return Simulation(graph, machine, first, **options)  # pyright: ignore[reportArgumentType]


def written_out(state: Simulation) -> int:
    """The makespan of the plan as a parallel graph, through cost model, task graph, and full simulation."""
    machine, optimizer = state.streams.machine, state.costs.optimizer
    graph = state.realised()
    plan = cost(graph, machine, optimizer)
    return simulate(task_graph(graph, plan, optimizer, overlap=state.overlap)).makespan


@pytest.mark.slow
@pytest.mark.parametrize("text", MODELS)
@pytest.mark.parametrize("overlap", [True, False])
def test_random_changes_of_models(text: str, overlap: bool):
    graph = from_text(text)
    random = Random(text)
    state = start(graph, MACHINES[1], random, overlap=overlap)
    for i in range(60):
        node = random.choice(state.nodes)
        before = state.makespan
        found = state.propose(node, random_assignment(node, MACHINES[1], random))
        assert found == state.makespan == state.full_makespan()
        if i % 20 == 0:
            assert found == written_out(state)
        if random.random() < 0.5:
            state.accept()
        else:
            state.reject()
            assert state.makespan == before == state.full_makespan()
    assert erase(state.realised()) == graph


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(MACHINES), st.booleans())
@settings(max_examples=examples(60))
def test_random_changes_of_random_graphs(seed: int, machine: Machine, overlap: bool):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 7), dims=(2, 4, 6, 12))
    state = start(graph, machine, random, overlap=overlap, optimizer=random.choice([Optimizer(), Optimizer("adam")]))
    assert state.makespan == written_out(state)
    for _ in range(6):
        node = random.choice(state.nodes)
        assert state.propose(node, random_assignment(node, machine, random)) == written_out(state)
        state.accept() if random.random() < 0.7 else state.reject()
    assert state.makespan == state.full_makespan() == written_out(state)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("machine", MACHINES[:2])
def test_weights_that_no_operator_reads_are_updated(alone: bool, machine: Machine):
    weight = leaf("weight", tensor_type((12, 4), "f32"), name="v").result
    grown = random_graph(Random(3), 3, dims=(4, 12))
    outputs = (weight,) if alone else (*grown.outputs, weight)
    graph = Graph("f", () if alone else grown.inputs, outputs)
    state = start(graph, machine, Random(0))
    assert state.makespan == state.full_makespan() == written_out(state) > 0
    for strategy in ("joint", "mcmc", "unity", "sequential", "data-parallel", "tofu"):
        found = run(graph, machine, strategy, options={"budget": 4} if strategy == "mcmc" else None)
        assert simulate(task_graph(found.graph, found.cost)).makespan > 0


@given(st.integers(0, 10**6), st.sampled_from(MACHINES[:3]))
@settings(max_examples=examples(20))
def test_devices_told_apart_are_as_one_class(seed: int, machine: Machine):
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 7), dims=(2, 4, 6, 12))
    state = start(graph, machine, random)
    every = Simulation(graph, machine, state.assignments, axes=range(len(machine.mesh.sizes)))
    assert every.makespan == state.makespan
    for _ in range(5):
        node = random.choice(state.nodes)
        assignment = random_assignment(node, machine, random)
        assert every.propose(node, assignment) == state.propose(node, assignment) == every.full_makespan()
        for one in (every, state):
            one.accept()


@given(st.integers(0, 10**6), st.sampled_from(MACHINES[:3]))
@settings(max_examples=examples(20))
def test_operators_on_parts_of_the_machine(seed: int, machine: Machine):
    """Pinned on some axes: those tell devices apart, and all of them may."""
    random = Random(seed)
    graph = random_graph(random, random.randint(1, 5), dims=(2, 4, 6, 12))
    axes = tuple(range(len(machine.mesh.sizes)))
    nodes = [n for n in graph.nodes() if n.is_compute]
    first = {n: random_assignment(n, machine, random, pinned=0.3) for n in nodes}
    state = Simulation(graph, machine, first, axes=axes)
    for _ in range(5):
        assert state.makespan == state.full_makespan()
        try:
            plan = state.realised()
            said = cost(plan, machine)
        except UnityError as error:
            # A chain of parallel operators whose middle has no place of its own.
            if "give the operators around it views" not in str(error):
                raise
        else:
            for apart in (None, axes):
                assert simulate(task_graph(plan, said, axes=apart)).makespan == state.makespan
        node = random.choice(state.nodes)
        state.propose(node, random_assignment(node, machine, random, pinned=0.3))
        state.accept() if random.random() < 0.7 else state.reject()


def test_few_blocks_are_simulated_again(monkeypatch: pytest.MonkeyPatch):
    """Where communication does not queue up, a change is forgotten after a few operators."""
    from unity_ir.simulate import delta

    graph = from_text("nmt,batch=4,steps=12,hidden=8,vocabulary=16")
    machine = boxes(2, 2)
    nodes = [n for n in graph.nodes() if n.is_compute]
    state = Simulation(graph, machine, {n: (REPEAT, REPEAT) for n in nodes})
    done = 0
    run_tasks = delta.run_tasks

    def counted(*arguments: object) -> None:
        nonlocal done
        done += 1
        run_tasks(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(delta, "run_tasks", counted)
    random = Random(1)
    for _ in range(20):
        node = random.choice(nodes)
        state.propose(node, random_assignment(node, machine, random))
        state.reject()
    assert done < 20 * len(state.blocks) / 5


def test_what_does_not_fit_changes_nothing():
    graph = from_text("mlp")
    machine = boxes(2)
    nodes = [n for n in graph.nodes() if n.is_compute]
    state = Simulation(graph, machine, {n: (REPEAT,) for n in nodes})
    before = state.makespan
    for wrong in (("no such variable",), (REPEAT, REPEAT), (0,)):
        assert not fits(nodes[0], wrong, machine.mesh)
        with pytest.raises(UnityError, match="does not fit"):
            state.propose(nodes[0], wrong)
    assert state.makespan == before == state.full_makespan()
    assert state.propose(nodes[0], (REPEAT,)) == before
    state.accept()


@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(20))
def test_plans_with_pins_are_realised(random: Random):
    """Reshards between any parts of the machine are placed, and gradients piecewise are those of the serial graph."""
    graph, machine = random_graph(random, random.randint(1, 6)), boxes(2, 2, 2, overhead=1e-6)
    nodes = [n for n in graph.nodes() if n.is_compute]
    drawn = {n: random_assignment(n, machine, random, 0.5 if random.random() < 0.6 else 0.0) for n in nodes}
    state = Simulation(graph, machine, drawn, axes=(0, 1, 2))
    plan = state.realised()
    assert simulate(task_graph(plan, cost(plan, machine))).makespan == state.makespan
    inputs, weights = data_for(graph)
    serial, step = differentiate(graph, Optimizer()), differentiate(plan, Optimizer(), machine.mesh)
    expected = interpret(serial, inputs, weights)
    gradients = {u.weight.node.name: expected[u.grad] for u in serial.updates}
    pieces = interpret_pieces(step, inputs, weights)
    for update in step.updates:
        found = join(pieces[update.grad], update.grad.type)
        np.testing.assert_allclose(found, gradients[update.weight.node.name], rtol=1e-7, atol=1e-8)
