"""Training runs of models written by hand in PyTorch, and how far a program's are from those in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unity_ir.pcg.optimizer import Optimizer

Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]

TOLERANCES = {"f64": 1e-7, "f32": 2e-3, "bf16": 0.1, "mixed": 0.1}
"""How long the difference from double precision may be, as a part of the tensor's length."""

AS_PYTORCH = 4
"""How many times as far as PyTorch's own run in the program's element type it may be, where that is more."""

NEAR, DRAWS = 1e-7, 16
"""
Where ReLU or a maximum has a kink, rounding decides on which side a step is. A step in f32 may be that of weights which
are this part of themselves away, in one of so many random directions.
"""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.bfloat16}


def train(
    loss: Loss, optimizer: Optimizer, run: Mapping[str, Any], dtype: torch.dtype = torch.float64, delay: int = 0
) -> dict[str, Any]:
    """
    From the same weights and batches as `ranks.trained`, the same by torch.optim, which has done `first` steps before
    and has the moments `start`. With a `delay` of 1 gradients are those at the weights before the last update.
    """

    def tensor(array: Any) -> Tensor:
        made = torch.tensor(array)
        return made.to(dtype) if made.is_floating_point() else made

    def array(tensor: Tensor) -> Any:
        return tensor.detach().double().numpy().copy()

    weights = {n: tensor(a).requires_grad_() for n, a in run["weights"].items()}
    betas = (optimizer.beta1, optimizer.beta2)
    if optimizer.name == "sgd":
        steps: torch.optim.Optimizer = torch.optim.SGD(weights.values(), lr=optimizer.lr)
    elif optimizer.name == "momentum":
        momentum, decay = optimizer.momentum, optimizer.weight_decay
        steps = torch.optim.SGD(weights.values(), lr=optimizer.lr, momentum=momentum, weight_decay=decay)
    elif optimizer.name == "adam":
        steps = torch.optim.Adam(weights.values(), lr=optimizer.lr, betas=betas, eps=optimizer.eps)
    else:
        decay = optimizer.weight_decay
        steps = torch.optim.AdamW(weights.values(), lr=optimizer.lr, betas=betas, eps=optimizer.eps, weight_decay=decay)
    if run.get("first"):
        for n, w in weights.items():
            if optimizer.states:
                means = dict(zip(("exp_avg", "exp_avg_sq"), map(tensor, run["start"][n]), strict=True))
                steps.state[w] = {"step": torch.tensor(float(run["first"])), **means}
    losses: list[Any] = []
    gradients: list[dict[str, Any]] = []
    older = {n: w.detach().clone() for n, w in weights.items()}
    for batch in run["batches"]:
        steps.zero_grad()
        at = {n: w.requires_grad_() for n, w in older.items()} if delay else weights
        value = loss(at, {n: tensor(a) for n, a in batch.items()})
        value.backward()
        losses.append(array(value))
        gradients.append({n: array(w.grad) for n, w in at.items() if w.grad is not None})
        older = {n: w.detach().clone() for n, w in weights.items()}
        for n, w in weights.items():
            w.grad = at[n].grad
        steps.step()
    kept = {0: (), 1: ("momentum_buffer",), 2: ("exp_avg", "exp_avg_sq")}[optimizer.states]
    moments = {n: tuple(array(steps.state[w][each]) for each in kept) for n, w in weights.items() if kept}
    after = {n: array(w) for n, w in weights.items()}
    return {"losses": losses, "gradients": gradients, "after": after, "moments": moments}


def differences(run: Mapping[str, Any], loss: Loss, optimizer: Optimizer, dtype: str, delay: int = 0) -> list[str]:
    """
    What of a program's run is not as it has to be, a line each. In `f64` that is the whole run. In `f32`, in which
    steps add up what they round, and some make chaos of it, it is every step by itself, from the state the program had.
    `delay` is that of `train`, for the whole run.
    """
    if dtype != "f32":
        return _differences(run, loss, optimizer, dtype, delay)
    wrong: list[str] = list(run["apart"])
    states = [*run["states"], {"after": run["after"], "moments": run["moments"]}]
    for t, (before, made) in enumerate(pairwise(states)):
        step = {
            "weights": before["after"],
            "start": before["moments"],
            "first": t,
            "batches": run["batches"][t : t + 1],
            "losses": run["losses"][t : t + 1],
            "gradients": run["gradients"][t : t + 1],
            **made,
            "apart": [],
        }
        wrong += [f"step {t}: {line}" for line in _differences(step, loss, optimizer, dtype)]
    return wrong


def _differences(run: Mapping[str, Any], loss: Loss, optimizer: Optimizer, dtype: str, delay: int = 0) -> list[str]:
    """
    What of a program's run in `f64`, `f32`, `bf16` or `mixed` (bf16, weights f32) is not as it has to be, a line each.

    Steps may make more of rounding errors than `TOLERANCES`, as PyTorch's own do, or cancel all but them; a single step
    in f32 may be on the other side of a kink (`NEAR`).
    """
    want = train(loss, optimizer, run, delay=delay)
    try:
        rounded = train(loss, optimizer, run, DTYPES[dtype], delay) if dtype in DTYPES else want
    except RuntimeError:
        # PyTorch cannot: complex numbers, by which positions rotate, are not of bf16.
        rounded = want
    theirs = [float(np.linalg.norm(got - right)) for _, got, right in _pairs(rounded, want, "")]
    wrong = _beyond(run, want, theirs, dtype)
    if dtype == "f32" and wrong:
        for number in range(DRAWS):
            random = np.random.default_rng(number)
            near = {n: w * (1 + NEAR * random.standard_normal(w.shape)) for n, w in run["weights"].items()}
            if not _beyond(run, train(loss, optimizer, {**run, "weights": near}, delay=delay), theirs, dtype):
                wrong = []
                break
    return [*run["apart"], *wrong]


def _beyond(run: Mapping[str, Any], want: Any, theirs: list[float], dtype: str) -> list[str]:
    """
    List the tensors of a run, a line each, that lie further from `want` than the tolerance of their element type and
    `AS_PYTORCH` times the distances of PyTorch's own run, `theirs`.
    """
    wrong: list[str] = []
    for (what, got, right), other in zip(_pairs(run, want, ""), theirs, strict=True):
        off, length = float(np.linalg.norm(got - right)), float(np.linalg.norm(right))
        if not off <= max(TOLERANCES[dtype] * (length + 1e-6), AS_PYTORCH * other):
            wrong.append(f"{what}: {off:.3g} off, of {length:.3g}")
    return wrong


def _pairs(got: Any, want: Any, what: str) -> list[tuple[str, Any, Any]]:
    if isinstance(want, dict):
        if what and got.keys() != want.keys():
            raise AssertionError(f"{what}: {sorted(got)} instead of {sorted(want)}")
        return [pair for n in want for pair in _pairs(got[n], want[n], f"{what} {n}".strip())]
    if isinstance(want, list | tuple):
        assert len(got) == len(want), what
        return [pair for i, v in enumerate(want) for pair in _pairs(got[i], v, f"{what} {i}")]
    return [(what, np.asarray(got, np.float64), want)]
