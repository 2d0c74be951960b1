"""What is not said of an optimizer is as PyTorch has it."""

import inspect

import pytest
import torch

from unity_ir.ops.optimizers import OPTIMIZERS
from unity_ir.pcg.optimizer import Optimizer, optimizer_of

CLASSES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
"""Those that PyTorch has under a name of their own."""


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_those_of_pytorch(name: str):
    theirs = {key: p.default for key, p in inspect.signature(CLASSES[name]).parameters.items()}
    theirs |= dict(zip(("beta1", "beta2"), theirs.get("betas", ()), strict=False))
    expected = {key: float(theirs[key]) for key in OPTIMIZERS[name].defaults}
    assert dict(Optimizer(name).settings) == expected
    assert dict(optimizer_of("test", name, {}).settings) == expected
