"""A program's text does not depend on the process that prints it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from extent import sample
from zoo_plans import SIZES

EMITTED = """
import sys
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run
machine = load("box:8")
for name, keys in {models}.items():
    graph = build(name, **keys)
    placed = run(graph, machine, "fsdp", Optimizer()).graph
    step = lower(fuse_collectives(differentiate(placed, Optimizer(), machine.mesh)), machine)
    sys.stdout.write(emit(plan_step(step, PlanOptions(kernels="triton")), graph).text)
"""
"""What `zoo_plans.program` does, without the models in PyTorch, whose import takes longer."""

MODELS = {name: SIZES[name] for name in ("resnext50", "gpt2")}
"""ResNeXt-50 has gradients of convolutions that are fused, with windows of one tap; GPT-2 has attention."""


@pytest.mark.slow
def test_programs_are_the_same_whatever_the_order_of_sets():
    def emitted(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", EMITTED.format(models=MODELS)],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        return done.stdout

    first, *others = map(emitted, sample((1, 2, 3), 2))
    assert "def forward_backward" in first
    assert all(other == first for other in others)
