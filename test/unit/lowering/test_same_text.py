"""A program's text does not depend on the process that prints it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from extent import sample

EMITTED = """
import sys
from zoo_plans import program, sized
from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer
for model in ("resnext50", "gpt2"):
    name, keys = sized(model)
    sys.stdout.write(program(build(name, **keys), "fsdp", 8, Optimizer(), kernels="triton"))
"""
"""ResNeXt-50 has gradients of convolutions that are fused, with windows of one tap; GPT-2 has attention."""


@pytest.mark.slow
def test_programs_are_the_same_whatever_the_order_of_sets():
    def emitted(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", EMITTED], capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout

    first, *others = map(emitted, sample((1, 2, 3), 2))
    assert "def forward_backward" in first
    assert all(other == first for other in others)
