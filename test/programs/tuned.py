"""A run of an emitted program with frozen weights, from given weights, on ranks (`ranks`)."""

from __future__ import annotations

from typing import Any

from ranks import whole


def tuned(program: Any, weights: dict[str, Any], batch: dict[str, Any], steps: int) -> dict[str, Any]:
    """
    Train `steps` steps from whole `weights` on one `batch` (with the tables), numpy arrays by name. Return the losses,
    norms and gradients of each, whole, the `weights` after them, their `averages` (with frozen ones as they are), and
    the names of those that have moments.
    """
    import torch

    ctx = program.build("gloo")
    own = program.init_weights(ctx)
    program.set_weights(ctx, own, {n: torch.from_numpy(w) for n, w in weights.items()}, "test")
    moments = program.init_moments(own)
    local = {n: program.piece(ctx, torch.from_numpy(batch[n]), s) for n, s in program.INPUTS.items()}
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "moments": [*moments]}
    for t in range(steps):
        loss, grads = program.forward_backward(ctx, own, local)
        norm = program.gradient_norm(ctx, grads)
        found["losses"].append(float(program.whole(ctx, loss, program.LOSS)[0]))
        found["norms"].append(float(norm))
        specs = program.trained(program.WEIGHTS)
        parts = program.wholes(ctx, {n: grads.get(n) for n in specs}, specs)
        found["gradients"].append({n: value.numpy().copy() for n, (value, _) in parts.items()})
        program.update(own, grads, moments, t + 1, 1.0, float(program.clip_scale(norm)))
    averages = whole(program, ctx, program.averaged(own, moments, steps))
    return {**found, "weights": whole(program, ctx, own), "averages": averages}
