# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false
"""The check against plain PyTorch."""

from __future__ import annotations

import torch

from unity_ir.lowering.runtime.pieces import init_moments, init_weights, initial, piece, whole
from unity_ir.lowering.runtime.plan import (
    COARSEST,
    INPUTS,
    LOSS,
    OPTIMIZER,
    WEIGHTS,
    forward_backward,
    reference,
    update,
)

# --- copied into the program from here on ---


# --- the check against plain PyTorch


NORM_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""
What a program computes in half precision, be it in parts only, is compared as whole tensors: how long the difference
from PyTorch in double precision may be, as a part of the tensor's length. Else every entry is compared.
"""


ROUNDING = 4
"""A gradient that cancels, as a bias's before a batch norm, may be so many times as far off as PyTorch's in float32."""


def rounding(plain, batch):
    """How far each gradient in `plain` is at most from what plain PyTorch makes in float32 of the same weights."""
    single = {n: p.detach().float().requires_grad_() for n, p in plain.items()}
    loss = reference(single, {n: b.float() if b.is_floating_point() else b for n, b in batch.items()})
    found = torch.autograd.grad(loss, list(single.values()), allow_unused=True)
    return {n: 0.0 if g is None else float((g.double() - plain[n].grad).abs().max()) for n, g in zip(single, found)}


def check(ctx, steps, seed, data):
    """
    Train `steps` steps and compare with plain PyTorch in double precision: the loss, every gradient by name, and at the
    end every weight. Returns what is wrong, a line each.
    """
    weights = init_weights(ctx, seed)
    moments = init_moments(weights)
    wrong: list[str] = []
    plain = {n: initial(n, s, seed).double().requires_grad_() for n, s in WEIGHTS.items()}
    name, settings = OPTIMIZER
    options: dict = {n: v for n, v in settings.items() if not n.startswith("beta")}
    if "beta1" in settings:
        options["betas"] = (settings["beta1"], settings["beta2"])
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    optimizer = kind(plain.values(), **options)
    # Where a gradient is rounding noise, Adam turns its sign into a whole step; such entries may differ by that much.
    noise = {n: torch.zeros(s.shape, dtype=torch.bool) for n, s in WEIGHTS.items()}
    drift = dict.fromkeys(WEIGHTS, 0.0)

    def compare(what, got, apart, want, slack=None, rounded=None):
        """Return what rounding excuses, of a difference that is more than that of other entries; 0 where none is."""
        loose = NORM_TOLERANCES.get(COARSEST)
        got, want = got.double().cpu(), want.detach()
        scale = float(want.abs().max()) if want.numel() else 0.0
        bound = torch.full_like(want, 1e-4 * scale + 1e-9)
        if slack is not None:
            bound = bound + slack
        off = (got - want).abs()
        if loose is not None:
            close = float(off.norm()) <= loose * float(want.norm()) + 1e-6
        else:
            close = bool((off <= bound).all())
        excused = 0.0
        if not close and rounded is not None:
            excused = ROUNDING * rounded()
            close = bool((off <= bound + excused).all())
        if not close:
            wrong.append(f"{what} differs from PyTorch's by {float(off.max()):.3g} (its largest entry is {scale:.3g})")
        if not apart <= 1e-5 * scale + 1e-12:
            wrong.append(f"{what} is not the same on devices that should hold the same: {apart:.3g} apart")
        return excused

    for t in range(steps):
        batch = data.batch(t)
        local = {n: piece(ctx, batch[n], s) for n, s in INPUTS.items()}
        loss, grads = forward_backward(ctx, weights, local)
        for tensor in plain.values():
            # Not None, which is what autograd leaves where a weight only decides something.
            tensor.grad = torch.zeros_like(tensor)
        want = reference(plain, {n: b.double() if b.is_floating_point() else b for n, b in batch.items()})
        if want.requires_grad:
            want.backward()
        compare(f"step {t}: loss", *whole(ctx, loss, LOSS), want)
        rounded = None  # of all gradients, once one is off
        for n, spec in WEIGHTS.items():

            def excuse(n=n, batch=batch):
                nonlocal rounded
                rounded = rounded or rounding(plain, batch)
                return rounded[n]

            excused = compare(f"step {t}: gradient of {n}", *whole(ctx, grads[n], spec), plain[n].grad, rounded=excuse)
            drift[n] += settings["lr"] * excused
            noise[n] |= plain[n].grad.abs() <= max(1e-3 * plain[n].grad.abs().max(), excused)
        update(weights, grads, moments, t + 1)
        optimizer.step()
    for n, spec in WEIGHTS.items():
        slack = noise[n].double() * 2 * settings["lr"] * steps if name != "sgd" else drift[n]
        compare(f"after {steps} steps: weight {n}", *whole(ctx, weights.get(n), spec), plain[n], slack)
    return wrong
