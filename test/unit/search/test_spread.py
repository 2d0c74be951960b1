"""Operators side by side on parts of the machine: faster where it is said to be, and valid."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import boxes

from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of, place
from unity_ir.search import run
from unity_ir.search.baselines.expert import by_layer
from unity_ir.search.choose.parallel_siblings import place_siblings
from unity_ir.search.joint.best_first import joint
from unity_ir.search.layouts.limits import limited, limits
from unity_ir.simulate.report import as_emitted


def xdl(**keys: int) -> Graph:
    return build("xdl", **{"batch": 6144, **keys})


@pytest.mark.slow
def test_tables_side_by_side_are_faster_than_all_devices_alike():
    graph, machine = xdl(), load("summit:1")
    alike = joint(graph, machine, (), Optimizer())
    found = run(graph, machine)
    assert found.proved is not None
    times = [as_emitted(plan, machine)[0] for plan in (found.graph, alike.graph)]
    assert times[0] < 0.7 * times[1]
    placement = place(found.graph, machine.mesh)
    tables = {pins_of(placement.layouts[n.result]) for n in found.graph.weights() if n.name.startswith("table")}
    assert len([t for t in tables if t]) > 1
    for strategy in ("data-parallel", "expert", "tofu"):
        other = run(graph, machine, strategy)
        assert times[0] <= as_emitted(other.graph, machine)[0] * (1 + 1e-9)


@pytest.mark.slow
def test_what_is_side_by_side_computes_the_same():
    graph, machine = xdl(batch=8, rows=1009, features=3, hidden=8, bag=2), boxes(2, 2)
    alike = joint(graph, machine, (), Optimizer())
    found = place_siblings(graph, machine, Optimizer(), alike.graph)
    assert found is not None
    assert as_emitted(found[0], machine)[0] < as_emitted(alike.graph, machine)[0]
    plan, _ = found
    assert erase(plan).outputs == graph.outputs
    random = np.random.default_rng(0)
    inputs = {
        n.name: random.integers(0, 1009, n.types[0].shape)
        if n.types[0].dtype == "i64"
        else random.random(n.types[0].shape)
        for n in graph.inputs
    }
    weights = {n.name: random.standard_normal(n.types[0].shape) for n in graph.weights()}
    serial = differentiate(graph, Optimizer())
    whole = interpret(serial, inputs, weights)
    expected = {u.weight.node.name: whole[u.grad] for u in serial.updates}
    step = differentiate(plan, Optimizer(), machine.mesh)
    pieces = interpret_pieces(step, inputs, weights)
    for u in step.updates:
        got = join(pieces[u.grad], u.grad.type)
        np.testing.assert_allclose(got, expected[u.weight.node.name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph", [build("mlp", batch=64, hidden=64, layers=3), xdl(tables=1)])
def test_no_operators_side_by_side_in_a_chain(graph: Graph):
    alike = joint(graph, load("summit:1"), (), Optimizer())
    assert place_siblings(graph, load("summit:1"), Optimizer(), alike.graph) is None


@pytest.mark.slow
@pytest.mark.parametrize("operators", [limits().sibling_operators, 0])
def test_an_operator_unlike_all_others_is_tried_in_every_way(operators: int):
    """Of large graphs only the first, whose gradient is moved last."""
    graph, machine = build("bert_large", batch=64, sequence=512, hidden=1024, layers=1), load("dgx-h100:1")
    alike = joint(graph, machine, (), Optimizer()).graph
    with limited(sibling_operators=operators):
        found = place_siblings(graph, machine, Optimizer(), alike)
    assert found is not None
    assert as_emitted(found[0], machine)[0] < as_emitted(alike, machine)[0]
    assert erase(found[0]).outputs == graph.outputs


@pytest.mark.slow
def test_a_plan_that_is_on_parts_already_is_gone_on_from():
    """The expert's plan of a recurrent network pins its layers; it was refused as the start of a search for parts."""
    graph = build("lstm_stack", batch=8, steps=2, hidden=8, features=4, classes=8, layers=2)
    machine = load("dgx-h100:1")
    plans = (p for p in by_layer(graph, machine) if any(map(pins_of, place(p, machine.mesh).assignments.values())))
    plan = next(plans)
    found = place_siblings(graph, machine, Optimizer(), plan)
    assert found is None or as_emitted(found[0], machine)[0] <= as_emitted(plan, machine)[0] * (1 + 1e-9)
