"""Batch norm's kernels, forward and backward, on values whose mean is far larger than their standard deviation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from case import Case
from covered import bound_of
from torch import Tensor
from torch.nn import functional as F

from unity_ir.kernels.launchers import launcher

EPS = 1e-5


def off(got: Tensor, want: Tensor) -> float:
    """How long the difference is, as a part of the truth's length."""
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
def test_no_digits_are_lost(mean: float, impl: str, runner: Any) -> None:
    def run(name: str, *operands: Tensor, **attributes: Any) -> list[Tensor]:
        bound = bound_of(name, Case(tuple(tuple(t.shape) for t in operands), attributes))
        return runner.run(launcher(bound, ("f32",) * len(operands), impl), list(operands))

    rng = np.random.default_rng(0)
    x, y = (torch.from_numpy(rng.standard_normal((8, 6, 7, 7))).float() for _ in range(2))
    w, b = (torch.from_numpy(rng.standard_normal(6)).float() for _ in range(2))
    x = x + mean
    (center,) = run("batch_mean", x, groups=1)
    shift, square = run("batch_stats", x, center)
    (out,) = run("batch_norm", x, shift, square, center, w, b, eps=EPS)
    dx, dshift, dsquare, dw, db = run("batch_norm_grad", y, x, shift, square, center, w, eps=EPS)
    dx = dx + run("batch_stats_grad", dshift, dsquare, x, center)[0]

    operands = [t.double().requires_grad_() for t in (x, w, b)]
    truth = F.batch_norm(operands[0], None, None, operands[1], operands[2], training=True, eps=EPS)
    gradients = torch.autograd.grad(truth, operands, y.double())
    found = [off(got, want.detach()) for got, want in zip((out, dx, dw, db), (truth, *gradients), strict=True)]
    assert max(found) < 4e-7, found
