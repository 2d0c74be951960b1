"""
Whether the kernels of programs suit a GPU: every distinct one is compiled once, and what is wrong with it is said.

What was compiled is kept in a file by text, specialisation and versions, so that only what is new takes time.
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
from unity_ir.lowering.emit.printer import Emitted
from unity_ir.lowering.measure.aot import SHARED_LIMITS, Job, Outcome, compile_each, read_outcome

CHECKS = (
    *("does not compile", "spills", "has a stack frame", "takes", "has no matrix instruction"),
    *("copies nothing asynchronously", "does not specialise"),
)
"""How what `violations` says begins, one for each check; `takes` is of shared memory."""

BATCH = 96
"""Kernels per process of the compiler, which takes a second to start."""


def jobs(emitted: Emitted) -> dict[str, Job]:
    """What a program's launches compile to, each once, by `key`."""
    found: dict[str, Job] = {}
    for one in emitted.compiled:
        job = Job(emitted.kernels[one.kernel], one)
        name = key(job)
        found[name] = merged(found[name], job) if name in found else job
    return found


def merged(one: Job, other: Job) -> Job:
    """One of two jobs of the same code, with what is expected of either."""
    expects = tuple(dict.fromkeys((*one.compiled.expects, *other.compiled.expects)))
    return replace(one, compiled=replace(one.compiled, expects=expects))


def key(job: Job) -> str:
    """The same for texts that are equal but for the kernel's name and are specialised alike."""
    one = asdict(job.compiled)
    # Neither the name nor what is expected of the code changes it.
    name = one.pop("kernel")
    del one["expects"]
    text = re.sub(rf"\b{re.escape(name)}\b", "kernel", job.source)
    return sha256(json.dumps([text, one], sort_keys=True).encode()).hexdigest()


def violations(job: Job, outcome: Outcome, target: str) -> list[str]:
    """
    What is wrong with a kernel on `target`, in words; nothing if it suits it.

    It must compile, keep everything in registers, fit shared memory, and hold the instructions that its launch expects.
    A stack frame without spills holds the table that large angles of sines are reduced with.
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
    loose = [n for n, t in job.compiled.signature.items() if t != "constexpr" and job.compiled.constants.get(n) == 1]
    if loose:
        wrong.append(f"does not specialise {', '.join(loose)}, which is 1")
    return wrong


class Cache:
    """Outcomes by job and target, in a file that several runs may share; those of another Triton are not found."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        with self._open() as file:
            file.execute(
                "CREATE TABLE IF NOT EXISTS compiled"
                " (key TEXT, target TEXT, triton TEXT, outcome TEXT NOT NULL, PRIMARY KEY (key, target, triton))"
            )

    @contextmanager
    def _open(self) -> Generator[sqlite3.Connection]:
        """A connection whose changes are kept. Raises `UnityError` for a file that is no cache."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as file, file:
                yield file
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise UnityError(f"{self.path}: no cache of compiled kernels, or damaged ({error}); remove it") from error

    def get(self, target: str) -> dict[str, Outcome]:
        """Everything that was compiled for a target, by job."""
        with self._open() as file:
            query = "SELECT key, outcome FROM compiled WHERE target = ? AND triton = ?"
            rows = file.execute(query, (target, triton_version())).fetchall()
            return {name: read_outcome(json.loads(text)) for name, text in rows}

    def put(self, name: str, target: str, outcome: Outcome) -> None:
        text = json.dumps(outcome if isinstance(outcome, str) else asdict(outcome))
        with self._open() as file:
            file.execute("INSERT OR REPLACE INTO compiled VALUES (?, ?, ?, ?)", (name, target, triton_version(), text))


def triton_version() -> str:
    """Of the compiler, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def compile_jobs(
    wanted: Mapping[str, Job], target: str, cache: Cache, processes: int = 2, seconds: float = inf
) -> Iterator[tuple[str, Outcome]]:
    """
    The outcome of every job, by name, as they come; those in the cache first. After so many `seconds` nothing more is
    begun, and the rest is left out.
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
