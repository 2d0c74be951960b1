"""Prices of the lines of a plan where the device's profile has measured some kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unity_ir.cost.kernels import kernel_of_line, kernel_seconds
from unity_ir.machine import load
from unity_ir.machine.profile import Profile
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute
from unity_ir.plan.plan import plan_graph
from unity_ir.search import run


@pytest.mark.slow
@pytest.mark.parametrize("measured", ["attention_saving", "attention"])
def test_attention_that_saves_its_sums_is_priced_by_a_profile(measured: str):
    """In mixed precision the variant that saves has an attribute, `sums`, that attention itself lacks."""
    machine = load("dgx-a100:1x1")
    graph = from_text("gpt2,batch=2,sequence=64,layers=1,hidden=64,heads=2,vocabulary=128")
    optimizer = Optimizer("adam")
    plan = plan_graph(run(mixed_precision(graph, "bf16"), machine, "degrees", optimizer, {}).graph, machine, optimizer)
    (line,) = (i for i in plan.program.body if isinstance(i, Compute) and i.operator == "attention_saving")
    assert "sums" in dict(line.attributes)
    kernel = kernel_of_line(plan.program, line)
    name = kernel.operator.replace("attention_saving", measured)
    names = {kernel.operator, name.replace(", sums=f32", "")}
    profile = Profile("A100", {n: {kernel.sizes: 7.0} for n in names if n.startswith(f"{measured}{{")})
    device = replace(machine.device, profile=profile)
    assert kernel_seconds(plan.program, line, device) == 7.0
    assert kernel_seconds(plan.program, line, replace(device, profile=Profile("A100"))) < 1.0
