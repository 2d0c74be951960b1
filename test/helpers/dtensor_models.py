"""Small modules to run by plans in DTensors, in float64; sizes that 4 devices divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_recipes
from torch import nn
from torch.nn import functional as F
from torch_models import InDouble

BATCH = 8

Made = tuple[nn.Module, dict[str, torch.Tensor], Any]
"""A module, its inputs by name, those of the loss among them, and the loss, if the module does not return it."""


class Experts(nn.Module):
    """A layer of experts, of which the gate takes two for each token, between a table of tokens and a dense layer."""

    def __init__(self, hidden: int = 16, inner: int = 32, experts: int = 4):
        super().__init__()
        self.table, self.gate = nn.Embedding(24, hidden), nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / 4)
        self.head = nn.Linear(hidden, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        scores = torch.softmax(self.gate(x), -1)
        least = torch.topk(scores, 2, -1).values[..., -1:]
        gates = torch.where(scores >= least, scores, 0.0)
        hidden = F.relu(torch.einsum("bh,ehf->ebf", x, self.up))
        made = torch.einsum("ebf,efh->ebh", hidden, self.down)
        return self.head(x + torch.einsum("ebh,be->bh", made, gates))


def _classified(module: nn.Module, x: torch.Tensor, classes: int) -> Made:
    return module, {"input": x, "target": torch.randint(0, classes, (len(x),))}, nn.CrossEntropyLoss()


def perceptron() -> Made:
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, bias=False), nn.GELU(), nn.Linear(16, 8))
    return _classified(module, torch.randn(BATCH, 16), 8)


def moe() -> Made:
    module, inputs, loss = _classified(Experts(), torch.randint(0, 24, (BATCH,)), 8)
    return module, {"tokens": inputs["input"], "target": inputs["target"]}, loss


def resnet() -> Made:
    module, (image, target), loss = torch_recipes.network()
    return module, {"image": image, "target": target}, loss


MODELS: dict[str, Callable[[], Made]] = {
    "perceptron": perceptron,
    "gpt2": torch_recipes.gpt2,
    "llama": torch_recipes.llama,
    "moe": moe,
    "resnet": resnet,
}


def ignored_labels() -> Made:
    """A mean over the labels that count, of which micro-batches have different numbers."""
    module, inputs, loss = perceptron()
    inputs["target"][torch.tensor([0, 1, 5])] = -100
    return module, inputs, loss


class Masked(nn.Module):
    """A mean over what a mask leaves."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, input: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self.inner(input), target, reduction="none")
        return (losses * mask).sum() / mask.sum()


def masked_mean() -> Made:
    inputs = {"input": torch.randn(BATCH, 16), "mask": (torch.arange(BATCH) % 3 > 0).float()}
    return Masked(), {**inputs, "target": torch.randint(0, 8, (BATCH,))}, None


COUNTED: dict[str, Callable[[], Made]] = {"ignored labels": ignored_labels, "masked mean": masked_mean}
"""Models whose loss divides by a number of the whole batch, which each micro-batch needs before its backward."""


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, inside: int, outside: int, rank: int):
        super().__init__()
        self.inner = nn.Linear(inside, outside).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inside) / 4)
        self.b = nn.Parameter(torch.randn(outside, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


def adapters() -> Made:
    layers = nn.Linear(16, 32).requires_grad_(False), nn.GELU(), Adapted(32, 16, 4), nn.GELU()
    return _classified(nn.Sequential(*layers, nn.Linear(16, 8).requires_grad_(False)), torch.randn(BATCH, 16), 8)


FROZEN: dict[str, Callable[[], Made]] = {"adapters": adapters}
"""Models of which some parameters require no gradient."""


def built(name: str, seed: int = 0) -> Made:
    """A model in float64, with random weights and inputs by `seed`; use it `InDouble`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module, inputs, loss = {**MODELS, **COUNTED, **FROZEN}[name]()
    return module.double(), {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}, loss


def by_pytorch(module: nn.Module, inputs: dict[str, torch.Tensor], loss: Any) -> torch.Tensor:
    """The loss of a module that runs as it is."""
    with InDouble():
        if loss is None:
            found = module(**inputs)
            return found if isinstance(found, torch.Tensor) else found["loss"]
        return loss(module(*[x for n, x in inputs.items() if n != "target"]), inputs["target"])
