# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""What training does around a step: learning rate, hyperparameters of groups, the gradient's norm, and the log."""

from __future__ import annotations

import fnmatch
import json
import math
import resource
import time

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.pieces import pins
from unity_ir.lowering.runtime.plan import (
    CLIP,
    COUNTED,
    FLOPS,
    LOSS,
    MESH,
    OPTIMIZER,
    PARAMETER_GROUPS,
    PEAK,
    WEIGHTS,
    flight,
)

# --- copied into the program from here on ---


# --- the recipe: learning rate, groups of weights, the gradient's norm, and what is said of each step


def hyperparameters(name, rate=1.0):
    """
    Return {hyperparameter: value} of the weight `name`: the values of OPTIMIZER, or those that the first of
    PARAMETER_GROUPS whose pattern fits the name sets instead. The learning rate, `lr`, is multiplied by `rate`.
    """
    dims = len(WEIGHTS[name].shape)
    mine = (s for p, s in PARAMETER_GROUPS if (dims < 2 if p == "@vectors" else fnmatch.fnmatchcase(name, p)))
    found = {**OPTIMIZER[1], **next(mine, {})}
    return {**found, "lr": found["lr"] * rate}


SCHEDULES = ("constant", "linear", "cosine")
"""How the learning rate goes on after the warm-up, from 1 times what is given."""


RECIPE = {"clip": CLIP, "groups": [[p, s] for p, s in PARAMETER_GROUPS], "schedule": ["constant", 0, 0, 1.0]}
RECIPE["gradient_delay"] = 0 if flight is None else 1
"""What changes training beside hyperparameters. Gradients are those of the weights `gradient_delay` steps before."""


def schedule_of(options, error):
    """
    Return the learning rate's schedule by `options`: [name, steps of warm-up, step at which it ends, part of the rate
    left then]. Call `error` with a message, which must end the run, if options contradict each other.
    """
    steps = options.steps if options.schedule_steps is None else options.schedule_steps
    if not 0 <= options.least_rate <= 1:
        error("--least-rate is a part of the learning rate, from 0 to 1")
    if options.warmup < 0 or steps < 0:
        error("--warmup and --schedule-steps count steps")
    if options.schedule == "constant":
        if options.schedule_steps is not None or options.least_rate:
            error("--schedule-steps and --least-rate are of --schedule linear or cosine")
        return ["constant", options.warmup, 0, 1.0]
    if steps <= options.warmup and not options.check:
        error(f"--schedule {options.schedule} has no steps: --warmup {options.warmup} takes all {steps}")
    return [options.schedule, options.warmup, steps, options.least_rate]


def rate_at(t, schedule):
    """
    Return the number that the learning rate is multiplied by in step `t` (from 0). `schedule` is (name, steps of
    warm-up, step at which it ends, number that is left then), of `schedule_of`.
    """
    name, warmup, steps, least = schedule
    if t < warmup:
        return (t + 1) / warmup
    done = min((t - warmup) / max(steps - warmup, 1), 1.0)
    falls = {"constant": 0.0, "linear": done, "cosine": (1.0 - math.cos(math.pi * done)) / 2}[name]
    return 1.0 - (1.0 - least) * falls


def gradient_norm(ctx, grads):
    """
    Return the 2-norm of all weights' gradients as one vector, an f64 scalar on the device. `grads` has this rank's
    pieces by name; a piece that several ranks hold counts once. All ranks call it.
    """
    alike = {}
    for name, grad in grads.items():
        if grad is not None and name in WEIGHTS:
            copies = math.prod(size for size, role in zip(MESH, WEIGHTS[name].roles) if role in ("copy", "repeat"))
            alike.setdefault((copies, grad.dtype), []).append(grad)
    square = torch.zeros((), dtype=torch.float64, device=ctx.device)
    for (copies, kind), parts in alike.items():
        # In 16 bits a norm would be rounded, or too large for float16.
        norms = torch._foreach_norm(parts, 2, dtype=torch.promote_types(kind, torch.float32))
        square += torch.stack(norms).double().square().sum() / copies
    dist.all_reduce(square)
    return square.sqrt()


def clip_scale(norm):
    """
    Return the factor, at most 1, by which a gradient of norm `norm` (a tensor) is multiplied so that its norm is at
    most CLIP.
    """
    return (CLIP / (norm + 1e-6)).clamp(max=1.0)


def loss_part(ctx, loss):
    """Return this rank's addend of the whole loss, a tensor: `loss`, its part; 0 if that copies another rank's part."""
    mine = torch.zeros(LOSS.shape, dtype=LOSS.dtype, device=ctx.device)
    copied = (axis for axis, role in enumerate(LOSS.roles) if role in ("copy", "repeat"))
    if ctx.at((*pins(LOSS), *((axis, 0) for axis in copied))):
        mine += loss
    return mine


class Log:
    """
    Prints a line about each step on rank 0, and appends it as JSON to the file `path` (None: to no file). `skipped` is
    the number of steps skipped so far; the caller keeps it up to date.
    """

    def __init__(self, ctx, path, skipped=0):
        self.file = open(path, "a", buffering=1) if path and ctx.rank == 0 else None
        self.ctx, self.before, self.skipped = ctx, None, skipped

    def step(self, t, loss, rate, norm=None):
        """
        Print and log step `t` (from 0): the whole loss `loss`, a float, the gradient's norm (None: without), samples or
        tokens per second since the last step, and peak memory. The learning rate that is logged is `rate` times --lr.
        """
        now, before = time.perf_counter(), self.before
        self.before = now
        if self.ctx.rank:
            return
        record = {"step": t + 1, "loss": loss, "learning_rate": OPTIMIZER[1]["lr"] * rate}
        said = [f"step {t + 1} loss {loss:.6f}"]
        if norm is not None:
            record.update(gradient_norm=norm, skipped=self.skipped)
            said.append(f"norm {norm:.4g}" if math.isfinite(norm) else f"norm {norm}: step skipped")
        if before is not None:
            seconds, (count, what) = now - before, COUNTED
            record.update({"seconds": seconds, f"{what}_per_second": count / seconds})
            said.append(f"{count / seconds:,.0f} {what}/s" if count >= seconds else f"{count / seconds:.3g} {what}/s")
            if PEAK and self.ctx.device.type == "cuda":
                record["mfu"] = FLOPS / seconds / PEAK
                said.append(f"MFU {100 * record['mfu']:.1f}%")
        record["peak_bytes"] = self._peak_bytes()
        said.append(f"{record['peak_bytes'] / 1e9:.2f} GB")
        print("  ".join(said), flush=True)
        self.write(record)

    def evaluated(self, t, loss):
        """
        Print and log, on rank 0, the loss on evaluation data after step `t` (from 0). The time up to now is not counted
        in the next step's samples or tokens per second.
        """
        if self.ctx.rank == 0:
            print(f"step {t + 1} eval loss {loss:.6f}", flush=True)
            self.write({"step": t + 1, "eval_loss": loss})
        self.before = self.before and time.perf_counter()

    def write(self, record):
        """Append `record`, {what: number}, to the log, if there is one: a line of JSON, with nan and inf as null."""
        if self.file:
            plain = {n: v if not isinstance(v, float) or math.isfinite(v) else None for n, v in record.items()}
            self.file.write(json.dumps(plain) + "\n")

    def _peak_bytes(self):
        """Return the most bytes held so far: on GPUs of allocated memory, else of this process."""
        if self.ctx.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
