"""
Check that the kernels of programs suit a GPU: compile every distinct one, and report those that fail or spill.

Outcomes are cached in a file by text, specialisation and version, so that only new kernels take time.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from time import monotonic

from unity_ir.errors import UnityError
from unity_ir.kernels.triton.launch import Compiled
from unity_ir.lowering.emit.printer import Emitted
from unity_ir.lowering.measure.aot import SHARED_LIMITS, Job, Outcome, Resources, compile_each, read_outcome

CHECKS = (
    *("does not compile", "spills", "has a stack frame", "takes", "has no matrix instruction"),
    *("copies nothing asynchronously", "does not specialise", "multiplies by mma.sync", "has no wgmma", "selects"),
    "has a step of",
)
"""First words of the messages of `violations`, one for each check; `takes` is about shared memory."""

MOST_SELECTS = 3
"""
Most selects in a K step without masks: of buffers and their phase, where tiles are copied by descriptors. Masks took 17
to 21.
"""
MOST_INSTRUCTIONS = 57.5
"""
Most instructions in a step of 64 elements of K, of tiles of 128 x 128 or smaller ones; larger ones may have more by as
many times. The first kernels took twice as many, for tiles of 128 x 128.
"""

BATCH = 96
"""Kernels per process of the compiler, which takes a second to start."""


def jobs(emitted: Emitted) -> dict[str, Job]:
    """Return the distinct kernel compilations that an emitted program's launches need, by digest (`key`)."""
    found: dict[str, Job] = {}
    for one in emitted.compiled:
        job = Job(emitted.kernels[one.kernel], one)
        name = key(job)
        found[name] = merged(found[name], job) if name in found else job
    return found


def merged(one: Job, other: Job) -> Job:
    """
    Return one job for two jobs of equal `key`: `one`, with the instructions that either expects its code to contain.
    """
    expects = tuple(dict.fromkeys((*one.compiled.expects, *other.compiled.expects)))
    return replace(one, compiled=replace(one.compiled, expects=expects))


def key(job: Job) -> str:
    """
    Return a SHA-256 digest of a compilation, 64 hexadecimal digits. It is equal for kernels that differ only in their
    names and in the instructions that they are expected to contain.
    """
    one = asdict(job.compiled)
    # Neither the name nor the expected instructions change the code.
    name = one.pop("kernel")
    del one["expects"]
    text = re.sub(rf"\b{re.escape(name)}\b", "kernel", job.source)
    return sha256(json.dumps([text, one], sort_keys=True).encode()).hexdigest()


def violations(job: Job, outcome: Outcome, target: str) -> list[str]:
    """
    Return a message for each check that a compiled kernel fails on `target` (`cuda:80`, `cuda:90`, `hip:gfx942`); [] if
    it passes all. `outcome` is the result of compiling `job`.

    It must compile, keep everything in registers, fit shared memory (`SHARED_LIMITS`), contain the instructions that
    its launch expects, and have each argument that is always 1 as a `constexpr`. On Hopper a kernel with `wgmma` has no
    other matrix instruction, and a product without masks selects nothing in its loop (`MOST_SELECTS`), which is short
    (`MOST_INSTRUCTIONS`) if tiles are copied by descriptors, or the product is large. Kernels with sines or cosines may
    have a stack frame, for the table that reduces large angles.
    """
    if isinstance(outcome, str):
        return [f"does not compile: {outcome}"]
    wrong: list[str] = []
    if outcome.spills:
        wrong.append(f"spills {outcome.spills} {'registers' if target.startswith('hip') else 'bytes per thread'}")
    elif outcome.frame_bytes and not any(f in job.source for f in ("tl.sin(", "tl.cos(")):
        wrong.append(f"has a stack frame of {outcome.frame_bytes} bytes")
    if outcome.shared_bytes > SHARED_LIMITS[target]:
        wrong.append(f"takes {outcome.shared_bytes} bytes of shared memory, of {SHARED_LIMITS[target]}")
    if "mma" in job.compiled.expects and not outcome.mma:
        wrong.append("has no matrix instruction")
    # AMD's copies to shared memory go through registers; there the compiler pipelines loads.
    if "pipelined" in job.compiled.expects and target.startswith("cuda") and not outcome.pipelined:
        wrong.append("copies nothing asynchronously")
    if target == "cuda:90":
        wrong += _wrong_steps(job.compiled, outcome)
    loose = [n for n, t in job.compiled.signature.items() if t != "constexpr" and job.compiled.constants.get(n) == 1]
    if loose:
        wrong.append(f"does not specialise {', '.join(loose)}, which is 1")
    return wrong


def _wrong_steps(compiled: Compiled, took: Resources) -> list[str]:
    """Return a message for each check that the innermost loop over matrix products fails, as compiled for sm_90."""
    wrong: list[str] = []
    if {"wgmma", "mma.sync"} <= {*took.instructions}:
        wrong.append("multiplies by mma.sync beside wgmma")
    loop, constants = took.loop, compiled.constants
    by_descriptors, is_large = "X_COLUMNS" in constants, "short" in compiled.expects
    if loop is None:
        return [*wrong, "has no wgmma in its loop"] if is_large or "wgmma" in compiled.expects else wrong
    if (by_descriptors or constants.get("FULL")) and loop.selects > MOST_SELECTS:
        wrong.append(f"selects {loop.selects} values in a step of K")
    if by_descriptors or is_large:
        m, n, k = (int(constants[f"BLOCK_{dim}"]) for dim in "MNK")
        most = int(MOST_INSTRUCTIONS * max(m * n / 128**2, 1) * k / 64)
        if loop.instructions > most:
            wrong.append(f"has a step of {loop.instructions} instructions, of {most}")
    return wrong


class Cache:
    """
    Cache of compilation outcomes by job and target, in an SQLite file, made if need be, that several runs may share.

    Each version of Triton has its own outcomes; those of the installed one are read and written. Raises `UnityError`
    for a file that is no cache.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        with self._open() as file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS outcomes"
                " (key TEXT, target TEXT, triton TEXT, outcome TEXT NOT NULL, PRIMARY KEY (key, target, triton))"
            )

    @contextmanager
    def _open(self) -> Generator[sqlite3.Connection]:
        """Open a connection that commits at the end. Raises `UnityError` for a file that is no cache."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as file, file:
                yield file
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise UnityError(f"{self.path}: no cache of compiled kernels, or damaged ({error}); remove it") from error

    def get(self, target: str) -> dict[str, Outcome]:
        """Return {key of the job: outcome} of all that is cached for `target`."""
        with self._open() as file:
            query = "SELECT key, outcome FROM outcomes WHERE target = ? AND triton = ?"
            rows = file.execute(query, (target, triton_version())).fetchall()
            return {name: read_outcome(json.loads(text)) for name, text in rows}

    def put(self, name: str, target: str, outcome: Outcome) -> None:
        """Store the outcome of compiling, for `target`, the job whose key (`key`) is `name`."""
        text = json.dumps(outcome if isinstance(outcome, str) else asdict(outcome))
        with self._open() as file:
            file.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?)", (name, target, triton_version(), text))


def triton_version() -> str:
    """Return the version of the Triton installed, without importing it; `none` if there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def compile_jobs(
    wanted: Mapping[str, Job], target: str, cache: Cache, processes: int = 2, seconds: float = inf
) -> Iterator[tuple[str, Outcome]]:
    """
    Yield (key, outcome) of the jobs in `wanted`, which has them by key (`key`), compiled for `target`, such as
    `cuda:90`. Outcomes that `cache` has come first. The others are compiled in the order of `wanted`, in batches of
    `BATCH`, by `processes` processes at a time, and stored in `cache`.

    No compilation begins after `seconds`; jobs that are left over are not yielded.
    """
    have = cache.get(target)
    yield from ((name, have[name]) for name in wanted if name in have)
    left = [name for name in wanted if name not in have]
    batches = [left[i : i + BATCH] for i in range(0, len(left), BATCH)]
    end = monotonic() + seconds

    def work(names: Sequence[str]) -> list[tuple[str, Outcome]]:
        if monotonic() > end:
            return []
        done: list[tuple[str, Outcome]] = []
        for name, outcome in zip(names, compile_each([wanted[n] for n in names], target), strict=False):
            cache.put(name, target, outcome)
            done.append((name, outcome))
            if monotonic() > end:
                break
        return done

    with ThreadPoolExecutor(processes) as pool:
        for done in pool.map(work, batches):
            yield from done
