# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Train or check a program, as its command line says."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.check import check
from unity_ir.lowering.runtime.checkpoints import MOST_SEED, BackgroundWriter, Locked, load, newest, save
from unity_ir.lowering.runtime.data import Data
from unity_ir.lowering.runtime.evaluation import Evaluation
from unity_ir.lowering.runtime.files import why_not_written
from unity_ir.lowering.runtime.graph import StepGraph, why_on_host
from unity_ir.lowering.runtime.pieces import averaged, init_moments, init_weights, piece, whole
from unity_ir.lowering.runtime.plan import (
    CLIP,
    IMPORTED,
    INPUTS,
    LOSS,
    NAME,
    ON_HOST,
    OPTIMIZER,
    RUNNING,
    STATE,
    TABLES,
    WORLD,
    flight,
    forward,
    forward_backward,
    update,
)
from unity_ir.lowering.runtime.profile import Profile
from unity_ir.lowering.runtime.ranks import Context, build, fail, fail_alike, from_first, is_connection_lost
from unity_ir.lowering.runtime.recipe import (
    RECIPE,
    SCHEDULES,
    Log,
    clip_scale,
    gradient_norm,
    rate_at,
    schedule_of,
)
from unity_ir.lowering.runtime.watch import guard
from unity_ir.lowering.runtime.weights import (
    check_running,
    read_tables,
    read_weights,
    why_no_weights,
    write_weights,
)

# --- copied into the program from here on ---


# --- a step


def step(ctx, weights, moments, batch, t, rate=1.0, before_update=None, profile=None, following=None):
    """
    Do training step `t` (from 0) on a whole `batch` ({input: tensor}) at `rate` times the learning rate: update
    weights, moments, and running statistics in the batch in place, unless the gradient's norm is inf or nan. Before the
    update, call `before_update(pieces of the batch, loss, norm)` (norm: None without CLIP). If the pipeline never
    drains, begin `following`, the next batch. `profile`, a Profile, records it. Return this rank's part of the loss.
    """
    if ctx.flight and following:
        ctx.flight.following = {name: piece(ctx, following[name], spec) for name, spec in INPUTS.items()}
    local = {name: piece(ctx, batch[name], spec) for name, spec in INPUTS.items()}
    loss = step_on(ctx, weights, moments, local, t, rate, before_update, profile)
    for name in RUNNING:
        batch[name].copy_(whole(ctx, local[name], INPUTS[name])[0])
    return loss


def step_on(ctx, weights, moments, local, t, rate=1.0, before_update=None, profile=None):
    """
    Do what `step` does, given this rank's pieces `local` of a batch ({input: piece, or None}), in which running
    statistics are replaced in place. For a pipeline that never drains, set `ctx.flight.following` before the call.
    """
    run = profile.run if profile else lambda function: function
    loss, grads = run(forward_backward)(ctx, weights, local)
    norm, scale = None, 1.0
    if CLIP:
        found = gradient_norm(ctx, grads)
        norm, scale = float(found), float(clip_scale(found))
    if before_update:
        before_update(local, loss, norm)
    if norm is None or math.isfinite(norm):
        run(update)(weights, grads, moments, t + 1, rate, scale)
        for name in RUNNING:
            if local[name] is not None:
                local[name].copy_(grads[name])
    return loss


MOST_SKIPPED = 10
"""Steps in a row whose gradient is not finite, after which a run ends."""


def train(ctx, options, data, seed, folder, skipped=0):
    """
    Train until `options.steps` steps are done in all, from the newest checkpoint in `folder` (None: from step 0), up to
    which `skipped` steps were skipped. Log, evaluate, and write checkpoints and weights as `options` say.
    """
    weights = init_weights(ctx, seed)
    moments = init_moments(weights)
    with ctx.unlimited():
        if options.weights:
            read_weights(ctx, weights, options.weights)
        first = load(ctx, weights, moments, folder, options.changed, data.tables) if folder else 0
    evaluation = Evaluation(ctx, options, data) if options.eval_data else None
    beside = BackgroundWriter(ctx) if options.save_async else None
    log, in_a_row, following = Log(ctx, options.log, skipped), 0, None
    graph, started = None, []  # steps of which the host decides nothing, and what is to be reported of the latest
    why = ON_HOST
    if ON_HOST is None:
        why = why_on_host(ctx, options)
    if why and ctx.device.type == "cuda" and ctx.rank == 0 and options.graph:
        sys.stderr.write(f"{NAME}: steps are no CUDA graph: {why}\n")

    def report(t, rate, batch, loss, norm):
        """Say what step `t` (from 0) made on pieces `batch`; end the run if it must not go on. `loss` is whole."""
        nonlocal in_a_row
        is_skipped = norm is not None and not math.isfinite(norm)
        in_a_row = in_a_row + 1 if is_skipped else 0
        log.skipped += is_skipped
        if not is_skipped:
            data.trained()
        if ctx.flight:
            ctx.flight.say_later(ctx, loss, t, lambda loss: log.step(t, loss, rate))
            return
        if not is_skipped or in_a_row == MOST_SKIPPED or options.check_nan:
            if ON_HOST is None and graph and not torch.isfinite(loss).all():
                graph.release()  # the step is done again, and needs the memory
            guard(ctx, weights, batch, t, loss, options.check_nan)
        log.step(t, float(loss), rate, norm)
        if in_a_row == MOST_SKIPPED:
            fail_alike(f"step {t + 1}: the gradient of {MOST_SKIPPED} steps in a row is not finite")

    def shown(steps):
        """Return the weights to evaluate and write after `steps` steps: with --average, their moving average."""
        if "average" in STATE and options.average:
            return averaged(weights, moments, steps - log.skipped)
        return weights

    for t in range(first, options.steps):
        ctx.note_progress()
        if beside:
            beside.poll()
        is_last = t + 1 == options.steps
        rate = rate_at(t, RECIPE["schedule"])
        local = data.pieces(ctx, t) if following is None else following
        saves = options.save and (is_last or (options.save_every and (t + 1) % options.save_every == 0))
        evaluates = evaluation and evaluation.is_due(t + 1, options.steps)
        if ctx.flight:  # nothing is under way where all ranks meet
            following = None if is_last or saves or evaluates else data.pieces(ctx, t + 1)
            ctx.flight.following = following
        ctx.note_progress()
        profile = Profile(ctx) if options.profile and is_last else None
        # Of a step that is skipped the optimizer knows nothing.
        count = t - log.skipped
        if ON_HOST is None and why is None:
            graph = graph or StepGraph(ctx, weights, moments, local, count, options.graph)
            started.append((t, rate, local, graph.step(local, rate)))
            # The device has the next step to do while the host reads what this one made.
            most = 0 if is_last or saves or evaluates or in_a_row else 1
            while len(started) > most:
                then, rate_then, batch, read = started.pop(0)
                loss, norm, _ = read()
                report(then, rate_then, batch, torch.tensor(loss, dtype=torch.float64), norm if CLIP else None)
        if why is not None:

            def told(batch, loss, norm, t=t, rate=rate):
                report(t, rate, batch, loss if ctx.flight else whole(ctx, loss, LOSS)[0], norm)

            step_on(ctx, weights, moments, local, count, rate, told, profile)
        if profile:
            with ctx.unlimited():
                profile.write(options.profile)
        if saves:
            with ctx.unlimited():
                tables = data.whole_tables(ctx)
                save(ctx, weights, moments, t + 1, options.save, seed, options.keep, tables, log.skipped, beside)
        if evaluates:
            log.evaluated(t, evaluation.loss(ctx, shown(t + 1)))
    if evaluation and first == options.steps:
        log.evaluated(first - 1, evaluation.loss(ctx, shown(first)))
    if beside:
        beside.wait()
    if options.weights_out:
        with ctx.unlimited():
            write_weights(ctx, shown(options.steps), options.weights_out, data.whole_tables(ctx))


# --- the command line


ONLY_TRAINING = (
    *("save", "save_every", "save_async", "keep", "load", "changed", "weights_out", "profile", "check_nan", "log"),
    *("eval_data", "eval_every", "eval_batches", "average"),
)
"""Options that cannot be given together with `--check`."""


def arguments():
    """
    Parse the command line; return its options by name (a Namespace), and store --lr in OPTIMIZER and the learning
    rate's schedule in RECIPE. End the run if options contradict each other.
    """
    parser = argparse.ArgumentParser(description=f"{NAME}: training step for {WORLD} ranks", prog=NAME)
    parser.error = fail_alike
    add = parser.add_argument
    add("--steps", type=int, default=3, help="steps to train in all, those before --load counted (default 3)")
    files = "an .npz or .safetensors file of arrays by input name, a .npy or .bin file of token ids"
    data = f"{files}, or a function from the step to a batch of arrays"
    add("--data", metavar="FILE|MODULE:FUNCTION", help=f"{data}; random numbers if left out")
    other = "the same of other data, for evaluation: the loss of all its whole batches, in order"
    add("--eval-data", metavar="FILE|MODULE:FUNCTION", help=other)
    packed = "the last id of each document of token files: samples begin with documents, of which none that fits is cut"
    add("--document-end", type=int, metavar="ID", help=packed)
    add("--eval-every", type=int, default=0, metavar="N", help="evaluate every N steps, beside after the last")
    add("--eval-batches", type=int, default=0, metavar="N", help="evaluate on the first N batches of --eval-data")
    add("--seed", type=int, help="of initial weights and data order (default 0; a checkpoint knows its own)")
    add("--backend", choices=("gloo", "nccl"), help="nccl on GPUs, gloo and Triton's interpreter on CPUs")
    add("--check", action="store_true", help="compare with plain PyTorch instead of training")
    add("--save", metavar="DIR", help="write checkpoints to DIR; torchrun --max-restarts goes on from there")
    add("--save-every", type=int, default=0, metavar="N", help="every N steps, beside the last")
    add("--save-async", action="store_true", help="write checkpoints while training goes on")
    add("--keep", type=int, default=0, metavar="N", help="keep the N newest checkpoints of --save; all if left out")
    add("--load", metavar="DIR", help="go on from the newest complete checkpoint in DIR")
    changed = f"settings that may differ from the checkpoint's: of {', '.join((*OPTIMIZER[1], *RECIPE))}"
    add("--changed", type=lambda text: tuple(text.split(",")), default=(), metavar="NAME[,NAME..]", help=changed)
    add(
        "--weights", metavar="FILE|DIR", help="start from these weights, by full name: safetensors, or a folder of them"
    )
    anew = "of an imported model: start from initial weights, not from its own"
    add("--random-weights", action="store_true", help=anew)
    add("--tables", metavar="FILE.safetensors", help="tables of an imported model, where --weights does not hold them")
    add("--weights-out", metavar="FILE|DIR/", help="write the weights after the last step")
    mean = "evaluate, and write --weights-out, by the moving average of the weights, of a program with ema"
    add("--average", action="store_true", help=mean)
    add("--lr", type=float, metavar="RATE", help=f"the learning rate (default {OPTIMIZER[1]['lr']:g})")
    after = "how the learning rate goes on after the warm-up (default constant)"
    add("--schedule", choices=SCHEDULES, default="constant", help=after)
    add("--warmup", type=int, default=0, metavar="N", help="steps in which the learning rate rises to its full value")
    until = "the step at which the schedule ends (default --steps)"
    add("--schedule-steps", type=int, metavar="N", help=until)
    least = "what part of the learning rate is left at the end of the schedule (default 0)"
    add("--least-rate", type=float, default=0.0, metavar="PART", help=least)
    # torchrun of Python 3.11 takes --log for an option of its own.
    add("--log", "--log-file", metavar="FILE.jsonl", help="add a line of JSON about every step to FILE")
    add("--profile", metavar="FILE.json", help="write what the last step did when, for Perfetto")
    limit = "end the run, and name the rank, when one does not answer or come further for so long (default 600)"
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help=limit)
    add("--graph", action="store_true", help="on GPUs, launch a step as one CUDA graph, not kernel by kernel")
    quick = "on GPUs, look up compiled kernels without Triton, which takes the host half the time"
    add("--quick-launches", action="store_true", help=quick)
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
    if options.eval_every < 0 or options.eval_batches < 0:
        parser.error("--eval-every counts steps, and --eval-batches batches")
    token_files = [f for f in (options.data, options.eval_data) if str(f).endswith((".npy", ".bin"))]
    if options.document_end is not None and not token_files:
        parser.error("--document-end is of token files, .npy or .bin, in --data or --eval-data")
    if not options.eval_data and (options.eval_every or options.eval_batches):
        parser.error("--eval-every and --eval-batches are of --eval-data, which has to be given")
    if options.eval_data and forward is None:
        parser.error("this program has no forward alone for --eval-data; emit it with evaluate among the options of -t")
    if options.average and "ema" not in OPTIMIZER[1]:
        parser.error("this program keeps no average of its weights; emit it with ema=0.999 among the options of -t")
    if flight is not None and options.check_nan:
        parser.error("--check-nan does a step again, which 2bw cannot; emit the model by another schedule")
    if options.save_async and not options.save:
        parser.error("--save-async is of --save, which has to be given")
    unknown = [n for n in options.changed if n not in (*OPTIMIZER[1], *RECIPE)]
    if unknown:
        parser.error(f"--changed {unknown[0]}: known are {', '.join((*OPTIMIZER[1], *RECIPE))}")
    if options.lr is not None:
        if not 0 <= options.lr < math.inf:
            parser.error("--lr is a number from 0")
        OPTIMIZER[1]["lr"] = options.lr
    RECIPE["schedule"] = schedule_of(options, parser.error)
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
    """
    Return the folder of checkpoints to start from: that of --save after a restart by torchrun, else of --load, or None.
    End the run if --save has checkpoints of another run. All ranks call it.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    there = newest(ctx, options.save) if options.save else None
    if again and there:
        return options.save
    if there and not (options.load and Path(options.load).resolve() == Path(options.save).resolve()):
        fail_alike(f"{options.save} holds checkpoints of another run; go on from them with --load, or save elsewhere")
    return options.load


def check_writable(ctx, options):
    """End the run, before training, if a file or folder that `options` names for output is not writable."""
    wrong = None
    if ctx.rank == 0:
        for path, folder in (
            (options.save, True),
            (options.profile, False),
            (options.log, False),
        ):
            wrong = wrong or (path and why_not_written(Path(path), folder))
        wrong = wrong or (options.weights_out and why_no_weights(options.weights_out))
    said = from_first(ctx, wrong)
    if said:
        fail_alike(said)


def main():
    """Parse the command line, join the ranks, and train, or compare with PyTorch (`--check`), as the options say."""
    options = arguments()
    torch.set_num_threads(1)
    if options.deterministic:
        deterministic()
    locked = None
    try:
        ctx = build(options.backend or ("nccl" if torch.cuda.is_available() else "gloo"), options.timeout)
        ctx.note_progress()
        check_writable(ctx, options)
        locked = Locked(ctx, options.save) if options.save else None
        run(ctx, options)
        if ctx.watchdog:
            dist.barrier()  # rank 0 may keep the store, and must not end before the others are done
    except RuntimeError as e:
        if not is_connection_lost(e):
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
    """Train or check as `options` say, after the ranks joined; a failed check prints lines, and exits with code 1."""
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
        tables: dict = {}
        for file in filter(None, (options.tables, options.weights)):
            tables.update(dict(read_tables(file) or {}) if TABLES else {})
        if options.weights:
            check_running(options.weights, tables)
        given = None if options.check and not tables else tables
        data = Data(options.data, seed, given, document_end=options.document_end)
        data.say_how_packed(ctx)
    if not options.check:
        return train(ctx, options, data, seed, folder, found[1].get("skipped", 0) if found else 0)
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
