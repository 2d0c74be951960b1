"""FlexFlow's search: never worse than where it starts, the optimum of small spaces, the same plan for the same seed."""

from __future__ import annotations

from itertools import product

import pytest
from graphs import boxes

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.models import build
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Assignment, pinned_at, pins_of
from unity_ir.pcg.types import tensor_type
from unity_ir.search.flexflow.mcmc import Settings, assignments_of, mcmc, pinnable_axes
from unity_ir.search.layouts.limits import limits
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.choices import fits, possible_roles, random_assignment
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.full import simulate
from unity_ir.simulate.streams import TICKS

SGD = Optimizer()


def chain(size: int = 256) -> Graph:
    """A dense layer, an activation and a loss."""
    x, y = (leaf("input", tensor_type((64, size), "f32"), name=n) for n in "xy")
    w = leaf("weight", tensor_type((size, size), "f32"), name="w").result
    h = apply("relu", [apply("matmul", [x.result, w]).result]).result
    return Graph("chain", (x, y), (apply("mse", [h, y.result]).result,))


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 1024])
def test_the_optimum_of_a_small_space(size: int):
    graph, machine = chain(size), boxes(2, overhead=1e-6)
    nodes = [n for n in graph.nodes() if n.is_compute]
    may: list[list[Assignment]] = [
        [(what,) for what in (*possible_roles(n), pinned_at(0), pinned_at(1)) if fits(n, (what,), machine.mesh)]
        for n in nodes
    ]
    assert all(len(m) > 3 for m in may)
    least = min(
        Simulation(graph, machine, dict(zip(nodes, plan, strict=True)), SGD, axes=(0,)).makespan
        for plan in product(*may)
    )
    found = mcmc(graph, machine, SGD, Settings(budget=3000))
    assert round(found.seconds * TICKS) == least
    assert all(c.first >= c.best >= found.seconds for c in found.chains)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rnnlm", "dlrm"])
def test_a_plan_is_of_its_model_and_takes_as_long_as_it_says(model: str):
    keys = {"rnnlm": {"batch": 8, "steps": 2, "hidden": 64, "vocabulary": 64}, "dlrm": {"batch": 64, "rows": 1000}}
    graph, machine = build(model, **keys[model]), boxes(2, 2, overhead=1e-6)
    found = mcmc(graph, machine, SGD, Settings(budget=600))
    again = mcmc(graph, machine, SGD, Settings(budget=600))
    assert found.graph == again.graph
    assert erase(found.graph).outputs == graph.outputs
    timeline = simulate(task_graph(found.graph, cost(found.graph, machine)))
    assert timeline.makespan == round(found.seconds * TICKS)
    assert {c.start for c in found.chains} == {"data-parallel", "expert", "serial", "random"}
    assert sum(c.proposed for c in found.chains) <= 600


def test_assignments_are_read_back_from_a_plan():
    from random import Random

    graph, machine, random = chain(64), boxes(2, 2), Random(3)
    for _ in range(20):
        nodes = [n for n in graph.nodes() if n.is_compute]
        drawn = {n: random_assignment(n, machine, random, 0.5, (1,)) for n in nodes}
        simulation = Simulation(graph, machine, drawn, SGD, axes=(1,))
        assert assignments_of(simulation.realised(), machine) == drawn


def test_operators_are_pinned_on_the_innermost_axes():
    assert pinnable_axes(boxes(2, 2)) == (0, 1)
    assert pinnable_axes(boxes(16, 2, 2)) == (4, 5)
    from random import Random

    machine, random = boxes(2, 2), Random(0)
    node = next(n for n in chain().nodes() if n.op == "relu")
    drawn = {random_assignment(node, machine, random, 0.5, (1,)) for _ in range(300)}
    assert {axis for a in drawn for axis, _ in pins_of(a)} == {1}


def test_settings_that_cannot_be_are_refused():
    for settings in (Settings(beta=0), Settings(beta=float("nan")), Settings(budget=-1), Settings(seconds=0.0)):
        with pytest.raises(UnityError, match=r"^mcmc: beta and seconds must be above 0, and the budget no less than 0"):
            mcmc(chain(), boxes(2), SGD, settings)
    with pytest.raises(UnityError, match=r"^mcmc: no start best; known are data-parallel, expert, serial, random"):
        mcmc(chain(), boxes(2), SGD, Settings(starts=("best",)))


@pytest.mark.slow
def test_a_walk_from_a_plan_slower_than_the_one_to_beat_ends_early():
    graph, machine = build("dlrm", batch=64, rows=1000), boxes(2, 2, overhead=1e-6)
    operators = sum(n.is_compute for n in graph.nodes())
    patient = mcmc(graph, machine, SGD, Settings(budget=2000, starts=("serial",)))
    hasty = mcmc(graph, machine, SGD, Settings(budget=2000, starts=("serial",), patience=1, beat=1e9))
    assert len(hasty.chains) == 1
    assert hasty.chains[0].proposed < sum(c.proposed for c in patient.chains)
    hopeless = mcmc(graph, machine, SGD, Settings(budget=2000, starts=("serial",), beat=patient.seconds / 100))
    (chain,) = hopeless.chains
    assert chain.proposed - chain.found_at <= 2 * (limits().mcmc_behind * operators + 1)
