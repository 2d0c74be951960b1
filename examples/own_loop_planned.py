"""
Train the small GPT of char_gpt.py in a loop of one's own, by a plan. own_loop.py is the same in plain PyTorch.

    torchrun --nproc-per-node 2 examples/own_loop_planned.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import torch
from char_gpt import BATCH, LENGTH, CharGPT, text
from torch import Tensor

import unity_ir as ui

RATE, WARM_UP, EVERY = 3e-3, 5, 5
MASTER = int(os.environ.get("RANK", "0")) == 0


def batches(ids: Tensor, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of rows from anywhere in a text, with their next characters as labels."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = [ids[i : i + LENGTH + 1] for i in torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)]
        yield {"tokens": torch.stack([row[:-1] for row in rows]), "labels": torch.stack([row[1:] for row in rows])}


def rate(t: int, steps: int) -> float:
    """Return the learning rate of step `t`: it rises, then falls along half a cosine."""
    return RATE * min((t + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * t / steps))


def train(steps: int, **how: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train for some steps; return the losses, those of evaluation among them, and the weights."""
    ids = torch.from_numpy(text())
    data, held_out = batches(ids[: len(ids) * 9 // 10], 1), batches(ids[len(ids) * 9 // 10 :], 2)
    torch.manual_seed(0)
    model = CharGPT()
    plan = ui.plan(model, next(batches(ids, 0)), optimizer="adamw", **how)
    step = plan.program(model, lr=RATE, weight_decay=0.1, clip=1.0)
    losses: list[float] = []
    for t in range(steps):
        batch = next(data)
        step.lr = rate(t, steps)
        loss = step(batch)
        losses.append(loss.item())
        if MASTER:
            print(f"step {t + 1}: loss {losses[-1]:.4f}")
        if (t + 1) % EVERY == 0:
            losses.append(step.evaluate(next(held_out)).item())
            if MASTER:
                print(f"step {t + 1}: held out {losses[-1]:.4f}")
    return losses, step.state_dict()


if __name__ == "__main__":
    weights = train(20, machine="box:2", search="fsdp")[1]
    if MASTER:
        torch.save(weights, "char_gpt.pt")
