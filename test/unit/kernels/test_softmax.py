"""Rows that are read in loops: a softmax's maximum and sum are found in one pass."""

from typing import Any

import pytest
import torch

from unity_ir.kernels.launchers import Launcher, launcher
from unity_ir.kernels.triton import tiling
from unity_ir.ops import operator

ROWS, COLUMNS = 7, 301


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """A softmax over rows of ten tiles, by one program each."""
    monkeypatch.setattr(tiling, "LONGEST_ROW", 64)
    monkeypatch.setattr(tiling, "LOOPED", 32)
    monkeypatch.setattr(tiling, "AT_WORK", 1)
    softmax = operator("softmax")
    return launcher(softmax.bind(((ROWS, COLUMNS),), softmax.attributes({})).bound, ("f32",))


def test_it_reads_a_row_twice(one: Launcher) -> None:
    (work,) = one.work
    assert work.passes == 2  # for maximum and sum, and to divide by it


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_it_equals_pytorch(scale: float, one: Launcher, runner: Any) -> None:
    torch.manual_seed(0)
    x = scale * torch.randn(ROWS, COLUMNS)
    x[1, :64] = -torch.inf  # whole tiles
    x[2, 5:] = -torch.inf
    x[3] = x[3].sort().values
    x[4] = x[4].sort(descending=True).values
    x[5] = -torch.inf  # 0 / 0
    x[6, 100] = torch.nan
    (got,) = runner.run(one, [x])
    torch.testing.assert_close(got, x.softmax(1), equal_nan=True)
    assert got[5:].isnan().all()
