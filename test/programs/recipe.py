"""Train a program on a rank, and the same model by plain PyTorch with `clip_grad_norm_`, `lr_scheduler` and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def against_torch(
    program: Any, steps: int, schedule: list[Any], own: Mapping[str, Mapping[str, float]], spoiled: int
) -> tuple[list[str], list[float]]:
    """
    What differs from plain PyTorch after training: losses, the gradient's norm in each step, and weights. Weights have
    the settings `own`; the batch of the step `spoiled` has a nan.
    """
    import torch
    from torch.optim import lr_scheduler

    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    plain = {n: program.initial(n, s, 0).double().requires_grad_() for n, s in program.WEIGHTS.items()}
    kind = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD}[program.OPTIMIZER[0]]
    groups = []
    for n, w in plain.items():
        given = {**program.OPTIMIZER[1], **own.get(n, {})}
        betas = {"betas": (given.pop("beta1"), given.pop("beta2"))} if "beta1" in given else {}
        groups.append({"params": [w], **given, **betas})
    optimizer = kind(groups)
    name, warmup, last, least = schedule
    rises = lr_scheduler.LinearLR(optimizer, 1 / max(warmup, 1), 1.0, max(warmup - 1, 1))
    falls: Any = lr_scheduler.LinearLR(optimizer, 1.0, least, max(last - warmup, 1))
    if name == "cosine":
        # eta_min is one number for all groups, so the part of the rate that is left has to be 0.
        assert least == 0
        falls = lr_scheduler.CosineAnnealingLR(optimizer, last - warmup)
    rates = lr_scheduler.SequentialLR(optimizer, [rises, falls], [warmup]) if warmup else falls
    wrong, norms, skipped = [], [], 0
    found: list[float] = []

    def keep(pieces: Any, loss: Any, norm: float) -> None:
        """Keep a step's norm of the gradient."""
        found.append(norm)

    for t in range(steps):
        batch = program.Data().batch(t)
        if t == spoiled:
            batch = {n: torch.full_like(b, torch.nan) if b.is_floating_point() else b for n, b in batch.items()}
        found.clear()
        rate = program.rate_at(t, schedule)
        program.step(ctx, weights, moments, batch, t - skipped, rate, keep)
        optimizer.zero_grad()
        program.reference(plain, {n: b.double() if b.is_floating_point() else b for n, b in batch.items()}).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(list(plain.values()), program.CLIP))
        if t == spoiled:
            skipped += 1
            wrong += [] if found[0] != found[0] and norm != norm else [f"step {t}: a norm of {found[0]}"]
        else:
            optimizer.step()
            wrong += [] if abs(norm - found[0]) <= 1e-4 * norm else [f"step {t}: norm {found[0]}, not {norm}"]
        rates.step()
        norms.append(norm)
    whole = program.wholes(ctx, {n: weights.get(n) for n in program.WEIGHTS}, program.WEIGHTS)
    for n, (value, _) in whole.items():
        off = float((value.double() - plain[n]).norm() / plain[n].norm())
        wrong += [] if off <= 1e-5 else [f"weight {n}: {off:.2g} of it off"]
    return wrong, norms
