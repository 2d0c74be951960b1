"""Mixed precision in search and cost: weights move in the type they are computed with, gradients in that of sums."""

from __future__ import annotations

import pytest

from unity_ir.cost.plan import cost
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search import run
from unity_ir.search.flexflow.mcmc import Settings, mcmc
from unity_ir.search.joint.best_first import joint

pytestmark = pytest.mark.slow

ADAMW = Optimizer("adamw")


def gpt2(reduce: str) -> Graph:
    graph = build("gpt2", layers=1, batch=64, sequence=256, hidden=512, heads=4, vocabulary=4096)
    return mixed_precision(graph, "bf16", reduce)


@pytest.mark.parametrize("reduce", ["f32", "bf16"])
@pytest.mark.parametrize("where", ["dgx-h100:1", "dgx-h100:2x2"])
def test_the_searched_seconds_are_those_of_the_plan(where: str, reduce: str):
    """The tables of the exact search price moves of gradients by their own element type, as the cost of a plan does."""
    machine = load(where)
    found = joint(gpt2(reduce), machine, (), ADAMW)
    assert cost(found.graph, machine, ADAMW).time == pytest.approx(found.plan.seconds, rel=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduce", ["f32", "bf16"])
@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "expert", "tofu", "joint", "unity", "mcmc"])
def test_a_forward_is_priced_as_its_explicit_step(strategy: str, reduce: str):
    """Bytes of all moves of a forward, counted by duality, are those of the step that is built from it."""
    machine = load("dgx-h100:1x4")
    graph = gpt2(reduce)
    few = Settings(budget=300)
    found = mcmc(graph, machine, ADAMW, few) if strategy == "mcmc" else run(graph, machine, strategy, ADAMW)
    plan = found.graph
    step = differentiate(plan, ADAMW, machine.mesh)
    assert cost(step, machine).bytes == cost(plan, machine, ADAMW).bytes
    assert {u.grad.dtype for u in step.updates} == {"f32"}


def test_fsdp_gathers_bf16_and_sums_f32():
    machine = load("dgx-h100:1")
    priced = {r: cost(run(gpt2(r), machine, "fsdp", ADAMW).graph, machine, ADAMW) for r in ("f32", "bf16")}
    elements = sum(n.types[0].elements for n in gpt2("f32").weights() if n.types[0].shape != ())
    gathered = 7 * elements
    assert priced["bf16"].bytes == gathered * (2 + 2)
    assert priced["f32"].bytes == gathered * (2 + 4)
