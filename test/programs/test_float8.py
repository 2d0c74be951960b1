"""Products in 8 bits train as those in bf16 do, and are the same products where numbers have more bits."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Ranks, error_in_double, trained
from zoo_plans import planned

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import PlanOptions, plan_step

STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "world", "kernels", "how"),
    [
        ("degrees,zero=1", 2, "torch", "float8"),
        ("degrees,tp=2,sp=true/2", 2, "torch", "float8-all"),
        ("1f1b,2:degrees,tp=1/4", 2, "torch", "float8-all"),
        ("degrees,tp=1", 1, "triton", "float8-all"),
    ],
)
def test_losses_are_those_of_bf16(ranks: Ranks, plan: str, world: int, kernels: str, how: str):
    """
    Losses of 8 steps differ by less than 1%, and gradients of the first step by less than 15% of their norm; in float64
    gradients are PyTorch's.
    """
    steps = STEPS if kernels == "torch" else 2
    found = {}
    for products in ("", how):
        model = build("gpt2", layers=2, batch=4, sequence=16, hidden=64, heads=4, vocabulary=96)
        graph = mixed_precision(model, "bf16", products=products, smallest=32)
        step = planned(graph, plan, world, Optimizer("adamw", 3e-3))
        text = emit(plan_step(step, PlanOptions(kernels=kernels, matmul=kernels)), graph).text
        assert ("float8_matmul" in text) == bool(products)
        assert ("float8_matmul_tn" in text) == (products == "float8-all")
        found[products] = ranks.run(text, world, trained, steps, False)[0]
        if products:
            # In float64, in which the check computes once more, nothing is rounded.
            assert max(ranks.run(text, world, error_in_double)) < 1e-9
    losses = {products: np.array(one["losses"]) for products, one in found.items()}
    np.testing.assert_allclose(losses[how], losses[""], rtol=1e-2)
    assert np.any(losses[how] != losses[""])
    for name, wanted in found[""]["gradients"][0].items():
        assert found[how]["gradients"][0][name].dtype == wanted.dtype == np.float32
        apart = np.linalg.norm(found[how]["gradients"][0][name] - wanted) / np.linalg.norm(wanted)
        assert apart < 0.15, name
