"""What plans of recipes compute, and the bytes that they move."""

from __future__ import annotations

import numpy as np

from unity_ir.cost.plan import cost
from unity_ir.machine import Machine
from unity_ir.pcg.differentiate import differentiate, training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.baselines.recipe import Degrees


def bytes_per_device(plan: Graph, machine: Machine) -> float:
    """Bytes that a device receives in a step, where every collective is a ring."""
    return cost(training_step(plan, Optimizer(), machine.mesh), machine).bytes / machine.devices


def check_gradients(serial: Graph, plan: Graph, machine: Machine) -> None:
    """Compare the gradients of all weights, on pieces, with those of the serial graph."""
    random = np.random.default_rng(0)
    inputs = {
        n.name: random.integers(0, 2, n.types[0].shape) if n.types[0].is_integer else random.random(n.types[0].shape)
        for n in serial.inputs
    }
    weights = {n.name: 0.5 * random.standard_normal(n.types[0].shape) for n in serial.weights()}
    whole_step = differentiate(serial, Optimizer())
    whole = interpret(whole_step, inputs, weights)
    expected = {u.weight.node.name: whole[u.grad] for u in whole_step.updates}
    step = differentiate(plan, Optimizer(), machine.mesh)
    pieces = interpret_pieces(step, inputs, weights)
    assert {u.weight.node.name for u in step.updates} == expected.keys()
    for u in step.updates:
        got = join(pieces[u.grad], u.grad.type)
        np.testing.assert_allclose(got, expected[u.weight.node.name], rtol=1e-4, atol=1e-6)


def parsed(text: str) -> Degrees:
    """Given `tp=2,sp=true` returns those degrees."""
    pairs = (setting.split("=") for setting in text.split(","))
    return Degrees(**{k: True if v == "true" else int(v) for k, v in pairs})
