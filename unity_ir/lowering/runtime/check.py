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

    def compare(what, got, apart, want, slack=None):
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
        if not close:
            wrong.append(f"{what} differs from PyTorch's by {float(off.max()):.3g} (its largest entry is {scale:.3g})")
        if not apart <= 1e-5 * scale + 1e-12:
            wrong.append(f"{what} is not the same on devices that should hold the same: {apart:.3g} apart")

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
        for n, spec in WEIGHTS.items():
            compare(f"step {t}: gradient of {n}", *whole(ctx, grads[n], spec), plain[n].grad)
            noise[n] |= plain[n].grad.abs() <= 1e-3 * plain[n].grad.abs().max()
        update(weights, grads, moments, t + 1)
        optimizer.step()
    for n, spec in WEIGHTS.items():
        slack = noise[n].double() * 2 * settings["lr"] * steps if name != "sgd" else None
        compare(f"after {steps} steps: weight {n}", *whole(ctx, weights.get(n), spec), plain[n], slack)
    return wrong
