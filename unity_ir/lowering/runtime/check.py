# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""Compare a program with plain PyTorch (`--check`)."""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from pathlib import Path

import torch

from unity_ir.lowering.runtime.pieces import Weights, init_moments, init_weights, piece, trained, whole, wholes
from unity_ir.lowering.runtime.plan import (
    CLIP,
    COARSEST,
    INPUTS,
    LOSS,
    OPTIMIZER,
    RUNNING,
    STATE,
    WEIGHTS,
    forward_backward,
    reference,
    update,
)
from unity_ir.lowering.runtime.ranks import everywhere, from_all
from unity_ir.lowering.runtime.recipe import clip_scale, gradient_norm, hyperparameters
from unity_ir.lowering.runtime.weights import read_weights

# --- copied into the program from here on ---


# --- the check against plain PyTorch: of every step by itself, from the same state


NORM_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""Relative tolerances of a tensor's norm, where any part is of half precision; otherwise every entry is compared."""

ROUNDING = 4
"""Most a gradient may be off, in multiples of PyTorch's error in float32: one may cancel, as a bias's before a norm."""

IN_DOUBLE = True
"""Whether to repeat in float64 a gradient that is off by more, which tells errors from rounding."""

FAR = 64
"""Most the norm of a gradient's error may be, in multiples of PyTorch's, even if it is right in float64."""


def rounding(plain, batch, wanted):
    """
    Return how far float32 puts PyTorch's gradients on `batch` off, as two dicts by weight: an entry's largest error at
    weights `plain` (`wanted`: float64's gradients), and the error's largest norm, there or at 3 weights an ulp off.
    """
    single = {n: b.float() if b.is_floating_point() else b for n, b in batch.items()}
    generator = torch.Generator().manual_seed(0)
    farthest, longest = {}, dict.fromkeys(wanted, 0.0)
    for draw in range(4):
        noise = {n: 0.0 if not draw else torch.randn(p.shape, generator=generator) * 2.0**-24 for n, p in plain.items()}
        near = {n: (p.detach().cpu().double() * (1.0 + noise[n])).to(p.device) for n, p in plain.items()}
        rounded = gradients({n: p.float() for n, p in near.items()}, single)[1]
        exact = wanted if not draw else gradients(near, {n: _double(b) for n, b in batch.items()})[1]
        for n in wanted:
            off = rounded[n].double() - exact[n]
            longest[n] = max(longest[n], float(off.norm()))
            farthest.setdefault(n, float(off.abs().max()) if off.numel() else 0.0)
    return farthest, longest


def gradients(weights, batch):
    """
    Return (loss, {name: gradient}) of `reference`, by autograd; `weights` and `batch` are whole tensors by name.
    Trained weights that the loss does not use get zeros. The dict has the next values of running statistics, too.
    """
    leaves = {n: w.detach().clone().requires_grad_() for n, w in trained(weights).items()}
    kept: dict = {}
    given = {**weights, **leaves}
    loss = reference(given, batch, kept) if RUNNING else reference(given, batch)
    if not loss.requires_grad:
        return loss.detach(), {n: torch.zeros_like(w) for n, w in leaves.items()} | kept
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(leaves, found)) | {n: value.detach() for n, value in kept.items()}


def _double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def in_double(ctx, weights, local):
    """
    Run a copy of this program in float64 on this rank's pieces of the weights and of the inputs (`local`, by name, None
    where it has none). Return {weight: whole gradient}, or None if it fails on any rank. All ranks call it.
    """
    try:
        types = "float32|bfloat16|float16|float8_e4m3fn"
        text = re.sub(rf"\b(torch|tl)\.({types})\b", r"\1.float64", Path(__file__).read_text())
        text = text.replace(".float()", ".double()")
        text = re.sub(r"(input_precision=\w+)\)", r"\1, out_dtype=tl.float64)", text)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "in_double.py")
            path.write_text(text)
            found_spec = importlib.util.spec_from_file_location("in_double", path)
            double = importlib.util.module_from_spec(found_spec)
            found_spec.loader.exec_module(double)
            weights = double.Weights({n: _double(w) for n, w in weights.items()}, getattr(weights, "casts", {}))
            local = {n: x if x is None else _double(x) for n, x in local.items()}
            grads = double.forward_backward(ctx.flight.apart(ctx, double) if ctx.flight else ctx, weights, local)[1]
        parts = {n: grads[n] for n in trained(double.WEIGHTS)}
        found = {n: g for n, (g, _) in double.wholes(ctx, parts, trained(double.WEIGHTS)).items()}
    except Exception:  # kernels may fail to compile or to run in many ways; then the check reports float32's errors
        found = None
    return found if everywhere(ctx, found is not None) else None


def check(ctx, steps, seed, data, start=None, notes=None):
    """
    Train `steps` steps on batches of `data` (a Data) from the weights in the file `start`, or initial ones by `seed`,
    and compare each step's loss, gradients and update with plain PyTorch's in float64 from the same state; before that,
    the optimizer alone. Return a list of messages about differences; one about rounding alone goes to the list `notes`.
    """
    weights = init_weights(ctx, seed)
    if start:
        read_weights(ctx, weights, start)
    moments = init_moments(weights)
    wrong, updated = check_update(ctx, weights), trained(WEIGHTS)
    loose = NORM_TOLERANCES.get(COARSEST)

    def compare(what, got, want):
        """Return a line about the difference if it is more than rounding usually makes, else None."""
        got, want = got.double().to(want.device), want.detach()
        scale = float(want.abs().max()) if want.numel() else 0.0
        off = (got - want).abs()
        if loose is None and bool((off <= 1e-4 * scale + 1e-9).all()):
            return None
        if loose is not None and float(off.norm()) <= loose * float(want.norm()) + 1e-6:
            return None
        return f"{what} differs from PyTorch's by {float(off.max()):.3g} (its largest entry is {scale:.3g})"

    def same(what, value, apart):
        scale = float(value.abs().max()) if value.numel() else 0.0
        if not apart <= 1e-5 * scale + 1e-12:
            wrong.append(f"{what} is not the same on devices that should hold the same: {apart:.3g} apart")
        return value.detach().clone()

    def state():
        """Return the weights and each of the moments, whole, and how far copies of them are apart."""
        own = [(weights, WEIGHTS), *(({n: moments[n][k] for n in moments}, updated) for k in range(len(STATE)))]
        return [wholes(ctx, {n: part.get(n) for n in specs}, specs) for part, specs in own]

    after = state()
    wrong += wrong_casts(ctx, "before step 0:", weights)
    for t in range(steps):
        ctx.note_progress()
        batch = {n: b.to(ctx.device) for n, b in data.batch(t).items()}
        local = {n: piece(ctx, batch[n], s) for n, s in INPUTS.items()}
        before = [{n: _double(x) for n, (x, _) in values.items()} for values in after]
        plain, mine = before[0], weights
        if ctx.flight:  # gradients are at the weights of one step ago
            mine = {n: w.clone() for n, w in ctx.flight.older(weights).items()}
            found = wholes(ctx, {n: mine.get(n) for n in WEIGHTS}, WEIGHTS)
            plain = {n: _double(x) for n, (x, _) in found.items()}
            wrong += wrong_casts(ctx, f"step {t}: of one step ago,", ctx.flight.older(weights))
            ctx.flight.following = data.pieces(ctx, t + 1) if t + 1 < steps else None
        loss, grads = forward_backward(ctx, weights, local)
        want_loss, want = gradients(plain, {n: _double(b) for n, b in batch.items()})
        line = compare(f"step {t}: loss", same(f"step {t}: loss", *whole(ctx, loss, LOSS)), want_loss)
        wrong += [line] if line else []
        specs = {n: INPUTS[n] for n in RUNNING}
        for n, g in wholes(ctx, {n: grads[n] for n in specs}, specs).items():
            what = f"step {t}: running statistic {n}"
            line = compare(what, same(what, *g), want.pop(n))
            wrong += [line] if line else []
        parts = {n: grads[n] for n in updated}
        got = {n: same(f"step {t}: gradient of {n}", *g) for n, g in wholes(ctx, parts, updated).items()}
        off = {n: line for n in updated if (line := compare(f"step {t}: gradient of {n}", got[n], want[n]))}
        if not everywhere(ctx, not off):
            ctx.note_progress()
            wrong += unexplained_gradients(ctx, off, got, want, plain, batch, mine, local, notes)
        ctx.note_progress()
        scale = 1.0
        if CLIP:
            norm = gradient_norm(ctx, grads)
            want_norm = math.sqrt(sum(float(g.double().square().sum()) for g in got.values()))
            scale, norm, want_scale = float(clip_scale(norm)), float(norm), min(1.0, CLIP / (want_norm + 1e-6))
            if not (abs(norm - want_norm) <= 1e-5 * want_norm and abs(scale - want_scale) <= 1e-5 * want_scale):
                said = f"{norm:.9g} instead of {want_norm:.9g}, and gradients are scaled by {scale:.9g}"
                wrong.append(f"step {t}: the norm of the gradient is {said} instead of {want_scale:.9g}")
        update(weights, grads, moments, t + 1, 1.0, scale)
        wrong += wrong_casts(ctx, f"step {t}:", weights)
        after = state()
        for n in updated:
            kinds = ("weight", *(KEPT[s] for s in STATE))
            found = [same(f"step {t}: {what} {n}", *values[n]) for what, values in zip(kinds, after)]
            grad = got[n].double() * scale
            line = compare_update(f"step {t}: weight {n}", n, t + 1, [b[n] for b in before], grad, found)
            wrong += [line] if line else []
        for n in WEIGHTS.keys() - updated.keys():
            found = same(f"step {t}: frozen weight {n}", *after[0][n])
            wrong += [] if torch.equal(before[0][n], _double(found)) else [f"step {t}: frozen weight {n} has changed"]
    return wrong


def wrong_casts(ctx, when, weights):
    """
    Return a message, which begins with `when`, for each weight whose kept cast differs from its cast on some rank.
    """
    if not any(spec.cast for spec in WEIGHTS.values()):
        return []
    off = [n for n, cast in weights.casts.items() if not _is_cast(cast, weights[n])]
    found = {n for names in from_all(off) for n in names}
    return [f"{when} the kept cast of {n} is not that of it" for n in WEIGHTS if n in found]


def _is_cast(cast, weight):
    wanted = weight.to(cast.device, cast.dtype)
    return bool(((cast == wanted) | (cast.isnan() & wanted.isnan())).all())


def unexplained_gradients(ctx, off, got, want, plain, batch, weights, local, notes):
    """
    Return the messages of `off` ({weight: message about its gradient}) that rounding does not explain, and one for each
    other gradient that is off even where the program runs in float64 (`in_double`). Dicts by name: `got` has the whole
    gradients of the program, `want` PyTorch's in float64 at `plain` on `batch` (whole); `weights` and `local` are this
    rank's pieces of these. If rounding explains all, say so in the list `notes` (None: nowhere). All ranks call it.
    """
    is_half = COARSEST in NORM_TOLERANCES
    farthest, longest = (dict.fromkeys(want, 0.0), {}) if is_half else rounding(plain, batch, want)
    apart = {n: float((got[n].double() - want[n]).abs().max()) for n in off}
    off = {n: line for n, line in off.items() if not apart[n] <= ROUNDING * farthest[n]}
    if everywhere(ctx, not off) or not IN_DOUBLE:
        return list(off.values())
    double = in_double(ctx, weights, local)
    if double is None:
        return list(off.values())
    wrong, updated = [], trained(WEIGHTS)
    for n in updated:
        error = (double[n] - want[n]).abs()
        scale = float(want[n].abs().max()) if want[n].numel() else 0.0
        # In half precision a token may go to another expert: no size of the error is too much.
        far = not math.isfinite(apart.get(n, 0.0))
        if not is_half:
            far = float((got[n].double() - want[n]).norm()) > FAR * longest[n] + 1e-4 * float(want[n].norm())
        # All gradients are compared, as an error in one may be hidden in another.
        if not bool((error <= 1e-7 * scale + 1e-6 * farthest[n] + 1e-12).all()):
            line = f"gradient of {n} differs from PyTorch's in float64, too, by {float(error.max()):.3g}"
            wrong.append(off.get(n, f"{line} (its largest entry is {scale:.3g})"))
        elif n in off and far:
            wrong.append(off[n])
    if not wrong and notes is not None:
        notes.append(
            f"{len(off)} of {len(updated)} gradients differ in {str(COARSEST)[6:]} from PyTorch's in float64, such as: "
            f"{next(iter(off.values()), 'on another rank')}; the same program in float64 equals it, so this is rounding"
        )
    return wrong


# --- the optimizer's arithmetic


KEPT = {"m": "mean of gradients of", "v": "mean of squared gradients of", "average": "average of"}
"""What the optimizer's state is, by name."""


def torch_update(name, t, state, grad):
    """
    Return (new state, sizes) of step `t` (from 1) of PyTorch's optimizer on the weight `name`, in f64, from `state`
    [weight, *moments] and its gradient `grad`. `sizes` has a tensor for each of the state: the sum of the absolute
    values of the terms added, to which its rounding error is relative.
    """
    settings = hyperparameters(name)
    if "average" in STATE:
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        *own, average = state
        made, sizes = torch_moments(settings, t, own, grad)
        found = average.clone() if t > 1 else made[0].clone()  # as AveragedModel does
        get_ema_multi_avg_fn(settings["ema"])([found], made[:1], t)
        return [*made, found], [*sizes, sizes[0] + average.abs() * (t > 1)]
    return torch_moments(settings, t, state, grad)


def torch_moments(settings, t, state, grad):
    """Do what `torch_update` does with these `settings`, without the weight's average."""
    rate, decay, weight = settings["lr"], settings.get("weight_decay", 0.0), state[0]
    if OPTIMIZER[0] == "lion":  # PyTorch has none: Chen et al., 2023, algorithm 2
        beta1, beta2 = settings["beta1"], settings["beta2"]
        mean, size = torch.lerp(grad, state[1], beta1), beta1 * state[1].abs() + (1.0 - beta1) * grad.abs()
        new = weight * (1.0 - rate * decay) - rate * mean.sign()
        # The sign of what cancels is that of its rounding.
        unsure = torch.where((mean.abs() <= 1e-6 * size) & (size > 0), math.inf, 0.0)
        return [new, torch.lerp(grad, state[1], beta2)], [weight.abs() + rate + unsure, state[1].abs() + grad.abs()]
    options: dict = {n: v for n, v in settings.items() if not n.startswith("beta") and n != "ema"}
    if "beta1" in settings:
        options["betas"] = (settings["beta1"], settings["beta2"])
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    leaf = weight.clone().requires_grad_()
    leaf.grad = grad.clone()
    optimizer = kinds[OPTIMIZER[0]]([leaf], foreach=False, **options)
    keys = {"m": "momentum_buffer" if OPTIMIZER[0] == "momentum" else "exp_avg", "v": "exp_avg_sq"}
    own_state = [s for s in STATE if s in keys]
    if own_state:
        kept = {keys[s]: x.clone() for s, x in zip(own_state, state[1:])}
        optimizer.state[leaf] = {"step": torch.tensor(t - 1.0), **kept}
    optimizer.step()
    made = [leaf.detach(), *(optimizer.state[leaf][keys[s]] for s in own_state)]
    if OPTIMIZER[0] == "sgd":
        return made, [weight.abs() + rate * grad.abs()]
    if OPTIMIZER[0] == "momentum":
        size = settings["momentum"] * state[1].abs() + grad.abs() + decay * weight.abs()
        return made, [weight.abs() + rate * size, size]
    mean = settings["beta1"] * state[1].abs() + (1.0 - settings["beta1"]) * grad.abs()
    deviation = (made[2] / (1.0 - settings["beta2"] ** t)).sqrt() + settings["eps"]
    step = rate / (1.0 - settings["beta1"] ** t) * (mean / deviation).nan_to_num(0.0)
    return made, [weight.abs() + step, mean, made[2]]


def compare_update(what, name, t, before, grad, after):
    """
    Return a message, which begins with `what`, if the state `after` [weight, *moments] differs by more than rounding
    from what PyTorch makes in step `t` (from 1) of `before` (f64) and the gradient `grad` of weight `name`; else None.
    """
    want, sizes = torch_update(name, t, before, grad.double())
    for of, got, value, size in zip(("", *(f": {KEPT[s]} it" for s in STATE)), after, want, sizes):
        limits = torch.finfo(got.dtype)
        error = (got.double() - value).abs()
        bound = 16 * limits.eps * size + 4 * limits.smallest_normal
        if of == "":
            # A moment too small for its type has lost its digits, so the weight is not compared there.
            for moment in want[1:]:
                bound = torch.where((moment != 0) & (moment.abs() < limits.smallest_normal), math.inf, bound)
        if not bool(((error <= bound) | (got == value.to(got.dtype)) | (got.isnan() & value.isnan())).all()):
            worst = int((error - bound).nan_to_num(math.inf).argmax())
            values = f"{float(got.flatten()[worst]):.9g} instead of {float(value.flatten()[worst]):.9g}"
            return f"{what}{of} is not what PyTorch's {OPTIMIZER[0]} makes of this gradient: {values}"
    return None


def _trial(t, dtype, device):
    """
    Return a weight, its gradient and its moments, which combine every size of one with every size of the others, and a
    further one.
    """
    sizes = torch.logspace(-12, 3, 31, dtype=torch.float64)
    grad = torch.cat([-sizes, torch.zeros(1, dtype=torch.float64), sizes])
    # Weights of 0 show all digits of the step, others the decay.
    weight = torch.tensor([0.0, 1.0, -0.37, 3e-5, 41.0, -730.0], dtype=torch.float64)
    mean, deviation = torch.tensor([0.0, 1.0, -0.5, 20.0]), torch.tensor([0.0, 0.1, 1.0, 30.0])
    grid = torch.meshgrid(grad, weight, mean.double(), deviation.double(), indexing="ij")
    g, p, m, v = (x.flatten() for x in grid)
    smallest = float(torch.finfo(dtype).tiny) ** 0.5 * 1e3
    g = torch.where(g.abs() < smallest, 0.0, g)
    scale = torch.where(g == 0, 1e-3, g.abs())
    m, v = (m * scale, (v * scale) ** 2) if t > 1 else (0 * m, 0 * v)
    return [x.to(device, dtype) for x in (p, g, m, v, 0.5 * p + m)]


STEPS = (1, 2, 3, 100, 10000)
"""Numbers of the steps that are compared, whose bias corrections differ."""


def check_update(ctx, weights):
    """
    Compare `update` with torch.optim's on made-up weights, gradients and moments of all sizes, at steps 1 to 10000, and
    its weight decay with OPTIMIZER's; return up to 8 messages of all ranks. Changes no weight. All ranks call it.
    """
    wrong = []
    for number, (name, weight) in enumerate(trained(weights).items()):
        # float32 rounds least, so small errors show; the weight's own type is what the program uses.
        for dtype in dict.fromkeys((torch.float32, weight.dtype)):
            for t in STEPS if number < 2 else STEPS[number % len(STEPS) :][:1]:
                p, g, *moments = (x[number % 7 :: 1 if number < 2 else 31] for x in _trial(t, dtype, ctx.device))
                moments = moments[: len(STATE)]
                before = [x.double() for x in (p, *moments)]
                after = [x.clone().contiguous() for x in (p, *moments)]
                scale = 0.375 if CLIP and t % 2 else 1.0
                own = Weights({name: after[0]})
                update(own, {name: g.contiguous()}, {name: tuple(after[1:])}, t, 1.0, scale)
                if not all(_is_cast(cast, after[0]) for cast in own.casts.values()):
                    wrong.append(f"the update of {name} at step {t}: its kept cast is not that of it")
                wrong.append(compare_update(f"the update of {name} at step {t}", name, t, before, scale * g, after))
    wrong += [f"the decay of weight {n} is {d:.6g} of it instead of {w:.6g}" for n, d, w in _decays(ctx, weights)]
    said = from_all([line for line in wrong if line])
    return list(dict.fromkeys(line for lines in said for line in lines))[:8]


def _decays(ctx, weights):
    """
    Yield a weight's name, decay and lr * weight_decay if these differ, of a weight with each hyperparameters: on the
    mean of many elements, as one may round off.
    """
    if OPTIMIZER[0] == "sgd":
        return
    alike = {tuple(hyperparameters(name).items()): name for name in reversed(list(trained(weights)))}
    for name in alike.values():
        p = torch.linspace(1.0, 2.0, 2**16 + 1, dtype=torch.float64, device=ctx.device)[:-1]
        after, still, one = p.clone(), torch.zeros_like(p), torch.ones_like(p)
        update(Weights({name: after}), {name: still}, {name: (still.clone(), one, one.clone())[: len(STATE)]}, 2)
        settings = hyperparameters(name)
        wanted = settings["lr"] * settings.get("weight_decay", 0.0)
        right = p * (1.0 - wanted)
        if bool((after == after.float().double()).all()):
            right = right.float().double()  # kernels compute and round in float32
        found, expected = (float((1.0 - x / p).mean()) for x in (after, right))
        if not abs(found - expected) <= 1e-3 * expected:
            yield name, found, wanted
