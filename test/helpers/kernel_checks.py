"""A launcher's results compared with what its line says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from case import Case
from covered import operand_dtypes
from operator_cases import DTYPES

from unity_ir.kernels.launchers import Launcher, launcher
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.syntax import Bound

TOLERANCES = {"f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2}
"""The interpreter cuts bfloat16 off where it should round."""


def random_operands(bound: Bound, case: Case, number: int = 0) -> list[Any]:
    rng = np.random.default_rng(number)
    operands = zip(bound.operands, case.shapes, strict=True)
    return [case.array(i, p.kind, shape, rng) for i, (p, shape) in enumerate(operands)]


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """
    The same tensor with such strides of dims of size 1 as it has if channels are last.

    It is contiguous either way, but PyTorch's functions then choose the order in memory of what they make.
    """
    if x.dim() < 3 or any(size > 1 for size in x.shape[2:]):
        return x
    return x.as_strided(x.shape, (x.shape[1], 1, *[x.shape[1]] * (x.dim() - 2)))


def check(
    bound: Bound, arrays: list[Any], impl: str, runner: Any, dtype: str = "f32", made: Launcher | None = None
) -> None:
    """Run a line's launcher, or the one given in its place, on these operands, and compare its results."""
    dtypes = operand_dtypes(bound, dtype)
    tensors = [channels_last(torch.from_numpy(a).to(DTYPES[d])) for a, d in zip(arrays, dtypes, strict=True)]
    rounded = [t.double().numpy() if t.is_floating_point() else t.numpy() for t in tensors]
    expected = evaluate(bound, rounded)
    got = runner.run(made or launcher(bound, dtypes, impl), tensors)
    assert len(got) == len(expected)
    assert all(np.isfinite(e).all() for e in expected)
    tolerance = TOLERANCES[dtype]
    for one, reference, result in zip(got, expected, bound.results, strict=True):
        assert one.shape == reference.shape
        assert one.is_contiguous()
        assert one.dtype == DTYPES[result.dtype or dtype]
        scale = max(1.0, float(np.abs(reference).max(initial=0)))
        np.testing.assert_allclose(one.double().numpy(), reference, rtol=tolerance, atol=tolerance * scale)
