# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Train or check a program, as its command line says."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.check import check
from unity_ir.lowering.runtime.checkpoints import MOST_SEED, Locked, load, newest, save
from unity_ir.lowering.runtime.data import Data
from unity_ir.lowering.runtime.files import why_not_written
from unity_ir.lowering.runtime.pieces import init_moments, init_weights, piece, whole
from unity_ir.lowering.runtime.plan import (
    IMPORTED,
    INPUTS,
    LOSS,
    NAME,
    OPTIMIZER,
    TABLES,
    WORLD,
    forward_backward,
    update,
)
from unity_ir.lowering.runtime.profile import Profile
from unity_ir.lowering.runtime.ranks import Context, build, fail, fail_alike, from_first, lost
from unity_ir.lowering.runtime.watch import guard
from unity_ir.lowering.runtime.weights import read_tables, read_weights, write_weights

# --- copied into the program from here on ---


# --- a step


def step(ctx, weights, moments, batch, t, before_update=None, profile=None):
    """Do step `t` (from 0) in place on a whole batch; call `before_update(pieces, loss)`; return this rank's loss."""
    local = {name: piece(ctx, batch[name], spec) for name, spec in INPUTS.items()}
    run = profile.run if profile else lambda function: function
    loss, grads = run(forward_backward)(ctx, weights, local)
    if before_update:
        before_update(local, loss)
    run(update)(weights, grads, moments, t + 1)
    return loss


def train(ctx, options, data, seed, folder):
    """Go on from the newest checkpoint in `folder` (None: step 0) to `options.steps`; save and write what they ask."""
    weights = init_weights(ctx, seed)
    moments = init_moments(weights)
    with ctx.unlimited():
        if options.weights:
            read_weights(ctx, weights, options.weights)
        first = load(ctx, weights, moments, folder, options.changed, data.tables) if folder else 0
    for t in range(first, options.steps):
        ctx.moved()
        is_last = t + 1 == options.steps

        def report(batch, loss, t=t):
            loss, _ = whole(ctx, loss, LOSS)
            guard(ctx, weights, batch, t, loss, options.check_nan)
            if ctx.rank == 0:
                print(f"step {t + 1} loss {float(loss):.6f}", flush=True)

        batch = data.batch(t)
        ctx.moved()
        profile = Profile(ctx) if options.profile and is_last else None
        step(ctx, weights, moments, batch, t, report, profile)
        if profile:
            with ctx.unlimited():
                profile.write(options.profile)
        if options.save and (is_last or (options.save_every and (t + 1) % options.save_every == 0)):
            with ctx.unlimited():
                save(ctx, weights, moments, t + 1, options.save, seed, options.keep, data.tables)
    if options.weights_out:
        with ctx.unlimited():
            write_weights(ctx, weights, options.weights_out, data.tables)


# --- the command line


ONLY_TRAINING = ("save", "save_every", "keep", "load", "changed", "weights_out", "profile", "check_nan")
"""Options that cannot be given together with `--check`."""


def arguments():
    """Parse the command line; return its options by name (a Namespace); end the run if they contradict each other."""
    parser = argparse.ArgumentParser(description=f"{NAME}: training step for {WORLD} ranks", prog=NAME)
    parser.error = fail_alike
    add = parser.add_argument
    add("--steps", type=int, default=3, help="steps to train in all, those before --load counted (default 3)")
    data = "an .npz or .safetensors file of arrays by input name, or a function from the step to a batch of them"
    add("--data", metavar="FILE|MODULE:FUNCTION", help=f"{data}; random numbers if left out")
    add("--seed", type=int, help="of initial weights and data order (default 0; a checkpoint knows its own)")
    add("--backend", choices=("gloo", "nccl"), help="nccl on GPUs, gloo and Triton's interpreter on CPUs")
    add("--check", action="store_true", help="compare with plain PyTorch instead of training")
    add("--save", metavar="DIR", help="write checkpoints to DIR; torchrun --max-restarts goes on from there")
    add("--save-every", type=int, default=0, metavar="N", help="every N steps, beside the last")
    add("--keep", type=int, default=0, metavar="N", help="keep the N newest checkpoints of --save; all if left out")
    add("--load", metavar="DIR", help="go on from the newest complete checkpoint in DIR")
    changed = f"hyperparameters that may differ from the checkpoint's: of {', '.join(OPTIMIZER[1])}"
    add("--changed", type=lambda text: tuple(text.split(",")), default=(), metavar="NAME[,NAME..]", help=changed)
    add("--weights", metavar="FILE.safetensors", help="start from these weights, by full name")
    anew = "of an imported model: start from initial weights, not from its own"
    add("--random-weights", action="store_true", help=anew)
    add("--tables", metavar="FILE.safetensors", help="tables of an imported model, where --weights does not hold them")
    add("--weights-out", metavar="FILE.safetensors", help="write the weights after the last step")
    add("--profile", metavar="FILE.json", help="write what the last step did when, for Perfetto")
    limit = "end the run, and name the rank, when one does not answer or come further for so long (default 600)"
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help=limit)
    add("--deterministic", action="store_true", help="the same bits in every run on the same devices")
    add("--check-nan", action="store_true", help="look at every result of every step, not only at the loss")
    options = parser.parse_args()
    if options.steps < (1 if options.check else 0) or options.save_every < 0:
        parser.error("--steps and --save-every count steps; --check takes at least one")
    trains = [f"--{n.replace('_', '-')}" for n in ONLY_TRAINING if options.check and getattr(options, n)]
    if trains:
        parser.error(f"--check trains nothing; leave out {', '.join(trains)}")
    empty = [n for n, value in vars(options).items() if value == ""]
    if empty:
        parser.error(f"--{empty[0].replace('_', '-')} is empty; leave it out")
    if not 1 <= options.timeout <= 10**7:
        parser.error("--timeout is a number of seconds, at least 1")
    if options.keep < 0 or (options.keep and not options.save):
        parser.error("--keep counts checkpoints of --save, which has to be given")
    unknown = [n for n in options.changed if n not in OPTIMIZER[1]]
    if unknown:
        parser.error(f"--changed {unknown[0]}: {OPTIMIZER[0]} has {', '.join(OPTIMIZER[1])}")
    if options.weights and options.load:
        parser.error("--weights starts from step 0, and --load goes on; one of them")
    if abs(options.seed or 0) > MOST_SEED:
        parser.error(f"--seed is from {-MOST_SEED} to {MOST_SEED}")
    return options


def deterministic():
    """Make PyTorch use only algorithms that give the same bits in every run; call before the device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False


def goes_on_from(ctx, options):
    """Return the checkpoint folder to start from: --save's after a restart by torchrun, else --load's, or None."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    there = newest(ctx, options.save) if options.save else None
    if again and there:
        return options.save
    if there and not (options.load and Path(options.load).resolve() == Path(options.save).resolve()):
        fail_alike(f"{options.save} holds checkpoints of another run; go on from them with --load, or save elsewhere")
    return options.load


def check_writable(ctx, options):
    """End the run before training if a file or folder that its `options` have it write is not writable."""
    wrong = None
    if ctx.rank == 0:
        for path, folder in ((options.save, True), (options.weights_out, False), (options.profile, False)):
            wrong = wrong or (path and why_not_written(Path(path), folder))
    said = from_first(ctx, wrong)
    if said:
        fail_alike(said)


def main():
    """Run the program: join the ranks, then train or check as the options say."""
    options = arguments()
    torch.set_num_threads(1)
    if options.deterministic:
        deterministic()
    locked = None
    try:
        ctx = build(options.backend or ("nccl" if torch.cuda.is_available() else "gloo"), options.timeout)
        ctx.moved()
        check_writable(ctx, options)
        locked = Locked(ctx, options.save) if options.save else None
        run(ctx, options)
        if ctx.watchdog:
            dist.barrier()  # rank 0 may keep the store, and must not end before the others are done
    except RuntimeError as e:
        if not lost(e):
            raise
        time.sleep(1)  # let the rank that has ended, or the watchdog, say why first
        fail(f"another rank has ended: {str(e).strip().splitlines()[-1]}")
    finally:
        if Context.watchdog:
            Context.watchdog.stop()
        if locked:
            locked.release()
    dist.destroy_process_group()


def run(ctx, options):
    """Train or check, as `options` say, after the ranks joined; a failed check prints lines and exits with code 1."""
    folder = goes_on_from(ctx, options)
    found = newest(ctx, folder) if folder else None
    seed = found[1]["seed"] if found else options.seed or 0
    if options.seed not in (None, seed):
        fail_alike(f"the run in {folder} has seed {seed}, not {options.seed}; leave --seed out")
    if found and found[1]["step"] > options.steps:
        fail_alike(f"the run in {folder} has done {found[1]['step']} steps, more than the {options.steps} of --steps")
    torch.manual_seed(seed)
    if IMPORTED and not (options.check or folder or options.weights or options.random_weights):
        made = "as unity-opt --from-torch=.. --weights-out=FILE writes it, or from others by --random-weights"
        fail_alike(f"this model was imported with weights: start from them by --weights FILE, {made}")
    with ctx.unlimited():
        file = options.tables or options.weights
        tables = read_tables(file) if file and TABLES else {}
        data = Data(options.data, seed, None if options.check and not tables else tables)
    if not options.check:
        return train(ctx, options, data, seed, folder)
    notes: list[str] = []
    wrong = check(ctx, options.steps, seed, data, options.weights, notes)
    if ctx.rank == 0:
        print("\n".join(wrong) or f"check passed: {options.steps} steps, loss, gradients and weights equal PyTorch's")
        print("".join(f"note: {note}\n" for note in notes), end="")
    if wrong:
        dist.destroy_process_group()
        sys.exit(1)


if __name__ == "__main__":
    main()
