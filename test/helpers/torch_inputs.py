"""What the FileCheck tests call `unity-opt --from-torch=torch_inputs:...` with: good input, and every bad one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

NUMBER = 3
LOSS = nn.CrossEntropyLoss()


class Step(nn.Module):
    """`forward` of its own as the loss: a function of an input and one weight."""

    def __init__(self, function: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x @ self.weight)


def step(function: Any, x: torch.Tensor | None = None) -> tuple[nn.Module, Any]:
    return Step(function), (torch.ones(2, 4) if x is None else x,)


def perceptron():
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return module, (torch.randn(2, 4), torch.tensor([0, 2])), LOSS


class Positions(nn.Module):
    """Positions in a buffer, and attention under a mask made by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("positions", torch.arange(16.0).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight + self.positions
        return F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4, dtype=torch.bool).tril()).sum()


def table():
    return Positions(), torch.ones(1, 1, 4, 4)


def fails():
    raise RuntimeError("no weights here\nsee elsewhere")


def returns_a_number():
    return 3


def returns_no_module():
    return 3, (torch.ones(2),)


def wrong_inputs():
    return nn.Linear(4, 3), (torch.ones(2, 4), 1, 2, 3), LOSS


def wrong_shape():
    return step(torch.sum, torch.ones(2, 5))


def no_scalar():
    return nn.Linear(4, 3), torch.ones(2, 4)


def no_weight():
    return nn.ReLU(), torch.ones(2, 4), lambda y: y.sum()


def operators():
    def function(x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.fft(x).abs() + torch.special.bessel_j0(x)
        return torch.special.bessel_j0(x).sum()

    return step(function)


def dynamic():
    return step(lambda x: x[x > 0].sum())


def branch():
    return step(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).sum())


def python_branch():
    return step(lambda x: x.sum() if x.sum() > 0 else -x.sum())


def in_place():
    def function(x: torch.Tensor) -> torch.Tensor:
        row = x.detach()[0]
        row.add_(1)
        return x.sum()

    return step(function)


def small_floats():
    return step(lambda x: x.to(torch.float8_e4m3fn).float().sum())


def complex_input():
    return step(lambda x: x.real.sum(), torch.ones(2, 4, dtype=torch.complex64))


def random():
    return step(lambda x: (x * torch.randperm(4)).sum())
