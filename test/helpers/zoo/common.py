"""What models by hand share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Weights = Mapping[str, Tensor]
Keys = Mapping[str, int]
"""The keys of a model, defaults among them."""


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y
