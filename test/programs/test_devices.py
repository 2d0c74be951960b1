"""Programs make all tensors where weights and batches are: PyTorch's "meta" device refuses others, as a GPU does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extent import ALL
from loading import compiled, module
from torch.fx.experimental import _config
from zoo import SMALL

from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step

META = torch.device("meta")
LARGE = ("inception_v3", "resnext50", "wresnet")
"""Models of operators that others have."""


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", SMALL if ALL else [m for m in SMALL if m not in LARGE])
def test_all_tensors_are_on_the_device_of_the_weights(model: str, tmp_path: Path):
    # A constant of the reference was made on the CPU, so that `--check` of recurrent models failed on GPUs.
    machine, serial = load("box:1"), build(model, **SMALL[model])
    step = differentiate(serial, Optimizer("adamw"), machine.mesh)
    text = emit(plan_step(lower(step, machine), PlanOptions(kernels="torch")), serial).text
    program: Any = module(tmp_path / f"{model}.py", compiled(text, tmp_path / f"{model}.py"))
    ctx = SimpleNamespace(device=META, index=lambda axes, position=0: position, at=lambda pins: True)
    weights = {n: torch.empty(s.shape, dtype=s.dtype, device=META) for n, s in program.WEIGHTS.items()}
    batch = {n: torch.empty(s.shape, dtype=s.dtype, device=META) for n, s in program.INPUTS.items()}
    wide, inputs = ({n: x.double() if x.is_floating_point() else x for n, x in d.items()} for d in (weights, batch))
    # How many rows an expert has is data, which no meta tensor holds; here all have all.
    with _config.patch(meta_nonzero_assume_all_nonzero=True):
        assert program.reference(wide, inputs).device == META
        loss, grads = program.forward_backward(ctx, weights, batch)
    assert {loss.device, *(g.device for g in grads.values())} == {META}
    program.update(weights, grads, program.init_moments(weights), 1)
