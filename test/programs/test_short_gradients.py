"""An update by gradients in bf16 is that by the same numbers in float32, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks import Ranks, check, trained
from zoo_plans import SIZES, of_type, planned

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan import plan
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program

OPTIONS = {"torch": PlanOptions(kernels="torch"), "triton": PlanOptions(matmul="torch")}


def same(program: Program) -> Program:
    return program


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "clip"), [("torch", 0.0), ("torch", 0.1), ("triton", 0.1)])
def test_updates_are_the_same(ranks: Ranks, kernels: str, clip: float, monkeypatch: pytest.MonkeyPatch):
    graph, optimizer = of_type(build("lenet", **SIZES["lenet"]), "mixed"), Optimizer("adamw", 1e-2, clip=clip)
    step = planned(graph, "data-parallel", 1, optimizer)
    short = emit(plan_step(step, OPTIONS[kernels]), graph).text
    monkeypatch.setattr(plan, "with_short_gradients", same)
    cast = emit(plan_step(step, OPTIONS[kernels]), graph).text
    assert short.count("# cast ") < cast.count("# cast ")
    found, wanted = (weights_of(ranks, text) for text in (short, cast))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert ranks.run(short, 1, check, 1) == [[]]


def weights_of(ranks: Ranks, text: str) -> dict[str, Any]:
    """Weights after 3 steps."""
    return ranks.run(text, 1, trained, 3, False)[0]["after"]
