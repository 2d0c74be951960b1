"""
A pool of ranks that run emitted programs in this machine's cores: forked once, used by every test.

A worker imports a program from its file, joins a fresh process group, and calls one of the functions below.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from queue import Empty
from time import sleep
from typing import Any

import loading
from extent import ALL

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "triton",
    "safetensors.torch",
    "torch.distributed.tensor.debug",
    "unity_ir.interop.dtensor.module",
]
"""
Modules that programs and tests import, most of them late; imported once per pool instead of once per rank.
(torch.optim imports torch._dynamo.)
"""

NAME = re.compile(r"^NAME = .*", re.MULTILINE)
SUMS = re.compile(r"^def ((?:all_reduce|all_gather|reduce_scatter)\w*)\(ctx", re.MULTILINE)
"""The model of a program, and the kinds of sums and gathers that it has."""


MOST_THREADS = 32
"""
Threads that a worker may be left with after a program. PyTorch's caches keep the process groups of DTensor's meshes,
and the idle threads of each wake a hundred times a second: hundreds of them take a core for themselves.
"""


TRIES = 4
"""Times that ranks look for each other, at most, with a pause of a second more before each."""


def _worker(jobs: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist
    from quick_collectives import quick_collectives
    from quick_interpreter import quicken

    quicken()
    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        path, rank, world, store, function, arguments, quick = job
        try:
            with quick_collectives() if quick else nullcontext():
                program = loading.module(path, path.with_suffix(".code").read_bytes())
                try:
                    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
                except RuntimeError:
                    # The next group would have another name here than where this one was made.
                    answers.put((rank, "lost", traceback.format_exc(), True))
                    return
                try:
                    state, answer = "ok", function(program, *arguments)
                finally:
                    if dist.is_initialized():
                        dist.destroy_process_group()
        except BaseException:
            state, answer = "failed", traceback.format_exc()
        ends = len(os.listdir("/proc/self/task")) > MOST_THREADS
        answers.put((rank, state, answer, ends))
        del answer
        if ends:
            return


class Ranks:
    """
    Up to `size` workers, each started when a program first needs it; `run` gives each of the first `world` the same
    program and function.
    """

    def __init__(self, size: int):
        # Read when a worker imports triton; CPU ranks interpret.
        os.environ["TRITON_INTERPRET"] = "1"
        self._size = size
        self._by_gloo: set[tuple[str, str]] = set()
        """Models, or functions that bring their own, and kinds of collectives that gloo itself has done for them."""
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._answers = context.Queue()
        self._jobs = [context.Queue() for _ in range(self._size)]
        self._processes = [self._process(rank) for rank in range(self._size)]
        self._started = 0

    def _begin_anew(self) -> None:
        for process in self._processes[: self._started]:
            process.kill()
        self.close()
        self._begin()

    def _process(self, rank: int) -> multiprocessing.process.BaseProcess:
        context = multiprocessing.get_context("forkserver")
        return context.Process(target=_worker, args=(self._jobs[rank], self._answers), daemon=True)

    def run(
        self, text: str, world: int, function: Callable[..., Any], *arguments: Any, quick: bool = True
    ) -> list[Any]:
        """
        What the function returned on each rank. Raises `AssertionError` with the traceback if one failed. Where ranks
        do not find each other, as happens on a busy machine, new ones try again (`TRIES`); where one died, the next
        program has new ones, too. Sums and gathers are one exchange each if `quick`, and gloo's own otherwise; in `make
        zoo` they are gloo's, too, in the first program of a model that has one of a kind.
        """
        if ALL:
            named = NAME.search(text)
            name = named[0] if named else function.__qualname__
            kinds = {(name, kind) for kind in SUMS.findall(text) or [""]}
            quick &= kinds <= self._by_gloo
            self._by_gloo |= set() if quick else kinds
        for left in reversed(range(TRIES)):
            try:
                return self._run(text, world, function, *arguments, quick=quick)
            except ChildProcessError as died:
                self._begin_anew()
                raise AssertionError(str(died)) from None
            except ConnectionError as lost:
                self._begin_anew()
                if not left:
                    raise AssertionError(str(lost)) from None
                sleep(TRIES - left)
        raise AssertionError("no try was made")

    def _run(self, text: str, world: int, function: Callable[..., Any], *arguments: Any, quick: bool) -> list[Any]:
        self._count += 1
        path = Path(self._folder.name, f"p{self._count}.py")
        path.write_text(text)
        path.with_suffix(".code").write_bytes(loading.compiled(text, path))
        store = Path(self._folder.name, f"store{self._count}")
        for process in self._processes[self._started : world]:
            process.start()
        self._started = max(self._started, world)
        for rank in range(world):
            self._jobs[rank].put((path, rank, world, str(store), function, arguments, quick))
        found: dict[int, Any] = {}
        failures: list[str] = []
        ended: list[int] = []
        for _ in range(world):
            rank, state, answer, ends = self._answer(ended)
            found[rank] = answer
            if ends:
                ended.append(rank)
            if state == "lost":
                raise ConnectionError(answer)
            if state != "ok":
                failures.append(f"rank {rank}: {answer}")
        for rank in ended:
            self._processes[rank].join()
            self._processes[rank] = self._process(rank)
            self._processes[rank].start()
        assert not failures, "\n".join(failures)
        return [found[rank] for rank in range(world)]

    def _answer(self, ended: list[int]) -> tuple[int, str, Any, bool]:
        """The next rank's. That it takes long says nothing; that a process has died, other than `ended`, ends it."""
        while True:
            try:
                return self._answers.get(timeout=1)
            except Empty:
                started = enumerate(self._processes[: self._started])
                dead = [i for i, process in started if i not in ended and not process.is_alive()]
                if dead:
                    raise ChildProcessError(f"rank {dead[0]} died") from None

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes[: self._started]:
            process.join(5)
        self._folder.cleanup()


def check(program: Any, steps: int = 3, seed: int = 0) -> list[str]:
    """What the program's own `--check` finds wrong."""
    return program.check(program.build("gloo"), steps, seed, program.Data(None, seed))


def error_in_double(program: Any) -> float:
    """How far the gradients that `--check` makes in float64 are from PyTorch's, of the largest entry of each weight."""
    ctx = program.build("gloo")
    weights, batch = program.init_weights(ctx, 0), program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    found = program.in_double(ctx, weights, local)
    whole = program.wholes(ctx, {n: weights.get(n) for n in program.WEIGHTS}, program.WEIGHTS)
    plain = {n: x.double() for n, (x, _) in whole.items()}
    want = program.gradients(plain, batch)[1]
    return max(float((found[n] - want[n]).abs().max() / want[n].abs().max()) for n in want)


def checked(program: Any, folder: str, weights: str, source: str) -> list[str]:
    """Return what `--check` reports of one step, with weights and data read from files in `folder`."""
    os.chdir(folder)
    data = program.Data(source, 0, program.read_tables(weights))
    return program.check(program.build("gloo"), 1, 0, data, weights)


def gradients(program: Any, seed: int = 0) -> tuple[Any, ...]:
    """Weights, batch, loss and gradients of one step, whole, as numpy arrays by name."""
    ctx = program.build("gloo")
    weights = program.init_weights(ctx, seed)
    batch = program.Data(None, seed).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    loss, grads = program.forward_backward(ctx, weights, local)
    initial = {n: program.initial(n, s, seed).numpy() for n, s in program.WEIGHTS.items()}
    found = program.whole(ctx, loss, program.LOSS)[0].numpy()
    return initial, {n: b.numpy() for n, b in batch.items()}, found, whole(program, ctx, grads)


def trained(program: Any, steps: int, each_step: bool, seed: int = 0) -> dict[str, Any]:
    """
    A training run, whole: initial `weights`, `batches`, the `losses`, the `gradients` of every step, the weights
    `after` them, Adam's `moments`, of `each_step` both before it as well, its `states`, and which of these is not the
    same on all ranks that should hold the same.
    """
    ctx = program.build("gloo")
    if ctx.rank:
        # All take part in gathering, and rank 0 alone looks at what that brings.
        program.assemble = lambda parts, spec: (parts[0], 0.0)
    apart: list[str] = []

    def whole(what: str, parts: Any, specs: Any) -> Any:
        """These parts, by name, whole."""
        made = {}
        for n, (value, off) in program.wholes(ctx, {n: parts.get(n) for n in specs}, specs).items():
            if not off <= 1e-5 * float(value.abs().max() if value.numel() else 0):
                apart.append(f"{what} {n}: {off}")
            made[n] = value.clone()
        return made

    weights = program.init_weights(ctx, seed)
    moments = program.init_moments(weights)
    data = program.Data(None, seed)
    batches, losses, gradients, states = [], [], [], []

    def state() -> dict[str, Any]:
        """Weights and moments, whole."""
        each = range(len(program.STATE))
        own = ({n: pair[k] for n, pair in moments.items()} for k in each)
        found = [whole("moment", part, program.WEIGHTS) for part in own]
        return {
            "after": whole("weight", weights, program.WEIGHTS),
            "moments": {n: tuple(part[n] for part in found) for n in program.WEIGHTS if found},
        }

    for t in range(steps):
        if each_step:
            states.append(state())
        batches.append(data.batch(t))
        local = {n: program.piece(ctx, batches[-1][n], s) for n, s in program.INPUTS.items()}
        if ctx.flight and t + 1 < steps:
            ctx.flight.following = data.pieces(ctx, t + 1)
        loss, grads = program.forward_backward(ctx, weights, local)
        losses.append(whole(f"step {t}:", {"loss": loss}, {"loss": program.LOSS})["loss"])
        gradients.append(whole(f"step {t}: gradient of", grads, program.WEIGHTS))
        program.update(weights, grads, moments, t + 1)
    found = {
        "weights": {n: program.initial(n, s, seed) for n, s in program.WEIGHTS.items()},
        "batches": batches,
        "losses": losses,
        "gradients": gradients,
        **state(),
        "states": states,
        "apart": apart,
    }
    return _arrays(found) if ctx.rank == 0 else {}


def _arrays(found: Any) -> Any:
    """Tensors as numpy arrays of at least single precision, wherever they are."""
    if isinstance(found, dict):
        return {n: _arrays(v) for n, v in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(_arrays, found))
    if hasattr(found, "numpy"):
        return (found.float() if found.is_floating_point() and found.element_size() < 4 else found).numpy()
    return found


def held_of_micro_batches(program: Any) -> dict[str, int]:
    """By how many bytes each part that this rank runs changes what is kept of a micro-batch, and the most live."""
    ctx = program.build("gloo")
    found: dict[str, int] = {}
    live: dict[int, dict[str, Any]] = {}
    most = 0

    def wrapped(word: str, part: Any) -> Any:
        def call(ctx: Any, weights: Any, batch: Any, once: Any, sums: Any, kept: dict[str, Any]) -> Any:
            nonlocal most
            received = {name for name, *_ in program.RECEIVES.get(f"{word[:-1]}{'F' if word[-1] == 'F' else 'B'}", ())}
            before = sum(x.nbytes for name, x in kept.items() if name not in received)
            made = part(ctx, weights, batch, once, sums, kept)
            live[ctx.micro_batch] = kept
            found[word] = sum(x.nbytes for x in kept.values()) - before
            most = max(most, sum(x.nbytes for each in live.values() for x in each.values()))
            return made

        return call

    program.PARTS.update({word: wrapped(word, part) for word, part in list(program.PARTS.items())})
    weights = program.init_weights(ctx, 0)
    batch = program.Data(None, 0).batch(0)
    program.forward_backward(ctx, weights, {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()})
    return {**found, "most": most}


def held_in_step(program: Any) -> int:
    """The most bytes that this rank holds between the lines of a step, the optimizer's state included."""
    ctx = program.build("gloo")
    weights, batch = program.init_weights(ctx, 0), program.Data(None, 0).batch(0)
    moments = program.init_moments(weights)
    found: list[int] = []
    step = program.watched(
        program.forward_backward, lambda _, variables: found.append(program.held_bytes({**variables, "": moments}))
    )
    step(ctx, weights, {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()})
    return max(found)


def wrong_casts(program: Any, folder: str) -> dict[str, list[str]]:
    """
    The weights whose kept casts are not those of them bit for bit: when all begins, after steps, one that is skipped,
    and weights were read from a checkpoint and from a file; and `kept`, those that have any, on this rank.
    """
    import torch

    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    batch = program.Data(None, 0).batch(0)

    def wrong(of: Any) -> list[str]:
        return [n for n, cast in of.casts.items() if not torch.equal(cast, of[n].to(cast.dtype))]

    found = {"kept": list(weights.casts), "at first": wrong(weights)}
    for t in range(3):
        program.step(ctx, weights, moments, batch, t)
    found["after 3 steps"] = wrong(weights)
    before = {n: cast.clone() for n, cast in weights.casts.items()}
    spoiled = {n: x * float("nan") if x.is_floating_point() else x for n, x in batch.items()}
    program.step(ctx, weights, moments, spoiled, 3)
    found["after a skipped step"] = [n for n, cast in before.items() if not torch.equal(cast, weights.casts[n])]
    program.save(ctx, weights, moments, 3, folder)
    program.write_weights(ctx, weights, f"{folder}/weights.safetensors")
    loaded, read = program.init_weights(ctx, 7), program.init_weights(ctx, 7)
    program.load(ctx, loaded, program.init_moments(loaded), folder)
    program.read_weights(ctx, read, f"{folder}/weights.safetensors")
    for what, other in (("loaded", loaded), ("read", read)):
        found[what] = wrong(other) + [n for n, cast in before.items() if not torch.equal(cast, other.casts[n])]
    return found


def bytes_of_versions(program: Any) -> int:
    """
    The most bytes that a rank of a pipeline which never drains holds, but of micro-batches, in a step that begins the
    next: both versions of the weights, the optimizer's state, batches, what is made once, and sums of gradients.
    """
    import torch

    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    most = 0

    def wrapped(part: Any) -> Any:
        def call(ctx: Any, used: Any, batch: Any, once: Any, sums: Any, kept: dict[str, Any]) -> Any:
            nonlocal most
            made = part(ctx, used, batch, once, sums, kept)
            flight = ctx.flight
            ahead = (flight._ahead.batch, flight._ahead.once or {}) if flight._ahead else ()
            held = [x for part in (weights, flight.older(weights), batch, once, sums, *ahead) for x in part.values()]
            held += [m for pair in moments.values() for m in pair]
            there = {x.untyped_storage().data_ptr(): x.nbytes for x in held if isinstance(x, torch.Tensor)}
            most = max(most, sum(there.values()))
            return made

        return call

    program.PARTS.update({w: wrapped(part) for w, part in list(program.PARTS.items()) if w.endswith("B")})
    batches = [program.Data(None, 0).batch(t) for t in range(3)]
    for t in range(2):
        program.step(ctx, weights, moments, batches[t], t, following=batches[t + 1])
    program.step(ctx, weights, moments, batches[2], 2)
    return most


def order_of_second_step(program: Any) -> str:
    """What a rank computes in the second step of four, with ' for the micro-batches of the next one."""
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    batches = [program.Data(None, 0).batch(t) for t in range(4)]
    for t in range(2):
        program.DONE.clear()
        program.step(ctx, weights, moments, batches[t], t, following=batches[t + 1])
    done = list(program.DONE)
    for t in range(2, 4):
        program.step(ctx, weights, moments, batches[t], t, following=batches[t + 1] if t < 3 else None)
    return " ".join(each.replace(" of the next", "'") for each in done if not each.startswith("RECV"))


def run_main(
    program: Any, options: list[str], environment: dict[str, str] | None = None, folder: str = "."
) -> list[str]:
    """The lines a rank prints when the program runs with these options, without its speed and memory."""
    import torch

    written = io.StringIO()
    sys.argv = ["train.py", "--backend", "gloo", *options]
    # What of the process the program may change, as it should when it has it for itself.
    deterministic, before = torch.are_deterministic_algorithms_enabled(), dict(os.environ)
    os.environ.update(environment or {})
    os.chdir(folder)
    try:
        with redirect_stdout(written):
            program.main()
    finally:
        torch.use_deterministic_algorithms(deterministic)
        os.environ.clear()
        os.environ.update(before)
    return re.sub(r"  [\d,.e+]+ \w+/s|  [\d.]+ GB", "", written.getvalue()).splitlines()


def refused(program: Any, options: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """With which code a rank ends, and what it writes to stderr."""
    written = io.StringIO()
    try:
        with redirect_stderr(written):
            run_main(program, options, environment)
    except SystemExit as error:
        return int(error.code or 0), written.getvalue()
    return 0, written.getvalue()


def _train_and_save(program: Any, steps: int, folder: str) -> tuple[Any, Any, Any]:
    """Context, weights and moments after a checkpoint of so many steps from the initial weights."""
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    for t in range(steps):
        program.step(ctx, weights, moments, program.Data().batch(t), t)
    program.save(ctx, weights, moments, steps, folder)
    return ctx, weights, moments


def train_and_save(program: Any, steps: int, folder: str) -> dict[str, Any]:
    """Train from the initial weights, write a checkpoint, and return the whole weights."""
    ctx, weights, _ = _train_and_save(program, steps, folder)
    return whole(program, ctx, weights)


def load_and_train(program: Any, steps: int, folder: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Go on from a checkpoint: the steps it had done, the weights it had, and those `steps` later."""
    ctx = program.build("gloo")
    weights = program.init_weights(ctx, 7)
    moments = program.init_moments(weights)
    first = program.load(ctx, weights, moments, folder)
    loaded = whole(program, ctx, weights)
    for t in range(first, first + steps):
        program.step(ctx, weights, moments, program.Data().batch(t), t)
    return first, loaded, whole(program, ctx, weights)


def saved(program: Any, steps: int, folder: str) -> dict[str, dict[str, Any]]:
    """Train from the initial weights, write a checkpoint, train on: what was saved, and the weights later."""
    return _state_and_later(program, *_train_and_save(program, steps, folder), steps)


def loaded(program: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Load the checkpoint, and train on as `saved` does: what was loaded, and the weights later."""
    ctx = program.build("gloo")
    weights = program.init_weights(ctx, 7)
    moments = program.init_moments(weights)
    return _state_and_later(program, ctx, weights, moments, program.load(ctx, weights, moments, folder))


def _state_and_later(program: Any, ctx: Any, weights: Any, moments: Any, steps: int) -> dict[str, dict[str, Any]]:
    found = {"weights": whole(program, ctx, weights)}
    for k in range(2):
        found[f"moments {k}"] = whole(program, ctx, {n: pair[k] for n, pair in moments.items()})
    for t in range(steps, steps + 2):
        program.step(ctx, weights, moments, program.Data().batch(t), t)
    return {**found, "later": whole(program, ctx, weights)}


def whole(program: Any, ctx: Any, weights: Any) -> dict[str, Any]:
    """Whole weights by name, as numpy arrays."""
    parts = {n: weights.get(n) for n in program.WEIGHTS}
    return {n: found.numpy().copy() for n, (found, _) in program.wholes(ctx, parts, program.WEIGHTS).items()}


class Refused(Exception):
    """Why a program would have ended."""


def _raises(message: str) -> None:
    raise Refused(message)


def damaged(program: Any, folder: str, seed: int, flips: int) -> tuple[list[str], list[str]]:
    """
    Damage every file of the newest checkpoint in a folder in many ways, one at a time, and load it: which of them were
    refused, each with the message, and which were not. The files are whole again after it.
    """
    import random

    import torch.distributed as dist

    program.fail = program.fail_alike = _raises
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    moments = program.init_moments(weights)
    path = sorted(Path(folder).glob("step_*"))[-1]
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}
    dist.barrier()
    ways: list[tuple[Path, str, bytes]] = []

    def flip(file: Path, bit: int) -> None:
        content = bytearray(files[file])
        content[bit // 8] ^= 1 << bit % 8
        ways.append((file, f"{file.name}: bit {bit} flipped", bytes(content)))

    for file, content in files.items():
        for bit in random.Random(f"{seed} {file.name}").sample(range(8 * len(content)), flips):
            flip(file, bit)
        for bit in (0, 7, 4 * len(content), 8 * len(content) - 8, 8 * len(content) - 1):
            flip(file, bit)
        for end in (0, 1, len(content) // 2, len(content) - 1):
            ways.append((file, f"{file.name}: cut to {end} bytes", content[:end]))
        for more in (b"\0", b"\n", b" ", content):
            ways.append((file, f"{file.name}: {len(more)} bytes more", content + more))
    record = path / "complete.json"
    for key in (b'"seed": ', b'"step": ', b'"lr": ', b'"files": ', b'"sha256": "', b'"shape', b'"name": "'):
        start = files[record].find(key) + len(key)
        for bit in range(8 * (start - 2), 8 * (start + 1)):
            flip(record, bit)
    refused, passed = list[str](), list[str]()
    for file, what, content in ways:
        if ctx.rank == 0:
            file.write_bytes(content)
        dist.barrier()
        try:
            program.load(ctx, weights, moments, folder)
            passed.append(what)
        except Refused as error:
            refused.append(f"{what}: {error}")
        dist.barrier()
        if ctx.rank == 0:
            file.write_bytes(files[file])
        dist.barrier()
    assert program.load(ctx, weights, moments, folder) > 0
    return refused, passed


def full_disk(program: Any, folder: str) -> str:
    """What a program says of a checkpoint that it cannot write, since the disk is full after a part of it."""
    import errno
    import tempfile

    import torch.distributed.checkpoint as dcp

    def no_space(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def half(state: Any, checkpoint_id: str) -> None:
        Path(checkpoint_id, "__0_0.distcp").write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    program.fail_alike = _raises
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    before = dcp.save, tempfile.TemporaryFile
    dcp.save, tempfile.TemporaryFile = half, no_space
    try:
        program.save(ctx, weights, program.init_moments(weights), 1, folder)
    except Refused as error:
        return str(error)
    finally:
        dcp.save, tempfile.TemporaryFile = before
    return "written"


def checked_each(program: Any, texts: list[str]) -> list[list[str]]:
    """What `--check` finds wrong with a program, and with each of others; an error is told, too."""
    found = [check(program)]
    for number, text in enumerate(texts):
        path = Path(program.__file__).with_name(f"{Path(program.__file__).stem}_{number}.py")
        path.write_text(text)
        try:
            found.append(check(loading.module(path, loading.compiled(text, path))))
        except Exception as error:
            found.append([f"{type(error).__name__}: {error}"])
        path.unlink()
    return found


def kernel_bytes(program: Any, names: list[str]) -> tuple[list[int], int]:
    """
    The bytes of operands and results of each call of the functions `names` in one forward and backward, and those of
    the kept casts of weights, which updates write.
    """
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    batch = program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    made: list[int] = []

    def size(value: Any) -> int:
        if isinstance(value, tuple):
            return sum(map(size, value))
        return value.numel() * value.element_size() if hasattr(value, "numel") else 0

    def counting(function: Any) -> Any:
        def call(*operands: Any) -> Any:
            results = function(*operands)
            made.append(size(operands) + size(results))
            return results

        return call

    for name in names:
        setattr(program, name, counting(getattr(program, name)))
    program.forward_backward(ctx, weights, local)
    return made, size(tuple(weights.casts.values()))


def copies(program: Any, names: list[str]) -> list[tuple[int, int, int, int]]:
    """
    What each collective that copies something copies in one forward and backward, in the order of their starts: kernels
    and bytes before it is sent, kernels and bytes once it was waited for. `names` are the runtime's functions.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    def size(value: Any) -> int:
        return sum(map(size, value)) if isinstance(value, (list, tuple)) else value.numel() * value.element_size()

    touched = {"new_zeros": 1, "clone": 2, "cat": 2, "stack": 2, "copy_": 2, "split_with_sizes_copy": 2, "add_": 3}

    class Counting(TorchDispatchMode):
        kernels = moved = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name in touched and func.namespace == "aten":
                self.kernels += 1
                self.moved += touched[name] * size((kwargs or {}).get("out", result))
            return result

    started: list[list[int]] = []
    starting = program.Pending.__init__

    def start(pending: Any, axes: Any, work: Any, finish: Any, *holds: Any) -> None:
        number = len(started)
        started.append([0, 0, 0, 0])

        def finish_counted() -> Any:
            with Counting() as counted:
                result = finish()
            started[number][2:] = counted.kernels, counted.moved
            return result

        pending.number = number
        starting(pending, axes, work, finish_counted, *holds)

    def counting(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with Counting() as counted:
                pending = function(*arguments)
            if isinstance(pending, program.Pending):
                started[pending.number][:2] = counted.kernels, counted.moved
            return pending

        return call

    program.Pending.__init__ = start
    for name in names:
        if hasattr(program, name):
            setattr(program, name, counting(getattr(program, name)))
    ctx = program.build("gloo")
    weights = program.init_weights(ctx)
    batch = program.Data(None, 0).batch(0)
    local = {n: program.piece(ctx, batch[n], s) for n, s in program.INPUTS.items()}
    started.clear()
    program.forward_backward(ctx, weights, local)
    return [tuple(each) for each in started if any(each)]


def own_loop(program: Any, folder: str, model: Any, options: dict[str, Any], steps: int) -> tuple[list[float], Any]:
    """
    Train by examples/own_loop_planned.py, in `folder`; return its losses, and weights as arrays. `model`, whose program
    has been emitted with `options`, stands in for what the script plans, since every rank would import the compiler.
    """
    import importlib
    from types import SimpleNamespace

    from unity_ir.api.step import start

    del program
    sys.path.insert(0, folder)
    try:
        script = importlib.import_module("own_loop_planned")
    finally:
        sys.path.remove(folder)

    def made(weights: Any, **given: Any) -> Any:
        assert given == options
        return start(model, weights, 0, None)

    script.ui = SimpleNamespace(plan=lambda *arguments, **how: SimpleNamespace(program=made))
    losses, weights = script.train(steps)
    return losses, {name: x.numpy() for name, x in weights.items()}


def of_step(program: Any, model: Any, weights: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return what a step gives on several ranks, and the messages of refusals; the process group is another's."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from unity_ir.api.step import start
    from unity_ir.errors import UnityError

    del program
    rank, world = dist.get_rank(), dist.get_world_size()
    state = {name: torch.from_numpy(x) for name, x in weights.items()}
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 8, 4))).float()
    found: dict[str, Any] = {"said": []}

    def refused(call: Callable[[], Any]) -> None:
        try:
            call()
        except UnityError as error:
            found["said"].append(str(error))

    with start(model, state, 0, None) as step:
        refused(lambda: step(rows[0] + rank))
        found["losses"] = [float(step(x)) for x in rows]
        step.save(folder)
        found["state"] = {name: x.numpy() for name, x in step.state_dict().items()}
        found["next"] = float(step(rows[0]))
    with start(model, state, 0, None) as step:
        found["steps"] = step.load(folder), step.steps
        found["again"] = float(step(rows[0]))
    from dataclasses import replace

    refused(lambda: start(replace(model, text=model.text + f"# {rank}"), state, 0, None))
    refused(lambda: start(replace(model, text=model.text.replace(f"WORLD = {world}", "WORLD = 7")), state, 0, None))
    dist.barrier()  # the caller's process group is still there
    return found
