"""Perceptrons and recommenders by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.common import Keys, Weights, linear

SMALL: dict[str, dict[str, int]] = {
    "candle_uno": {"batch": 3, "hidden": 6, "tower": 2, "layers": 2, "shrink": 500},
    "dlrm": {"batch": 4, "tables": 3, "rows": 11, "bag": 2, "features": 4, "dense": 5, "bottom": 6, "top": 7},
    "mlp": {"batch": 6, "hidden": 8, "layers": 3, "classes": 5},
    "xdl": {"batch": 4, "tables": 2, "rows": 11, "bag": 2, "features": 4, "hidden": 6},
}


def mlp(w: Weights, keys: Keys, x: Tensor, labels: Tensor) -> Tensor:
    for i in range(keys["layers"] - 1):
        x = F.relu(linear(w, f"dense{i}", x))
    return F.cross_entropy(linear(w, f"dense{keys['layers'] - 1}", x), labels)


def bags(w: Weights, ids: dict[str, Tensor]) -> list[Tensor]:
    """The sums of the rows that the ids of each table name."""
    return [w[name.replace("ids", "table")][k].sum(1) for name, k in ids.items()]


def dlrm(w: Weights, keys: Keys, x: Tensor, labels: Tensor, **ids: Tensor) -> Tensor:
    for i in range(3):
        x = F.relu(linear(w, f"bottom{i}", x))
    x = torch.cat([x, *bags(w, ids)], 1)
    for i in range(3):
        x = F.relu(linear(w, f"top{i}", x))
    return F.mse_loss(linear(w, "top3", x).sigmoid(), labels)


def xdl(w: Weights, keys: Keys, labels: Tensor, **ids: Tensor) -> Tensor:
    x = torch.cat(bags(w, ids), 1)
    x = F.relu(linear(w, "dense1", F.relu(linear(w, "dense0", x))))
    return F.mse_loss(linear(w, "dense2", x).sigmoid(), labels)


def candle_uno(w: Weights, keys: Keys, growth: Tensor, **features: Tensor) -> Tensor:
    def dense(x: Tensor, name: str, count: int) -> Tensor:
        for i in range(count):
            x = F.relu(x @ w[f"{name}dense{i}.weight"])
        return x

    doses = ("dose1", "dose2")
    encoded = [x if name in doses else dense(x, f"{name}.", keys["tower"]) for name, x in features.items()]
    x = dense(torch.cat(encoded, 1), "", keys["layers"])
    return F.mse_loss(linear(w, f"dense{keys['layers']}", x), growth)


BY_HAND: dict[str, Callable[..., Tensor]] = {"candle_uno": candle_uno, "dlrm": dlrm, "mlp": mlp, "xdl": xdl}
