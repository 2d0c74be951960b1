"""A rank that hangs ends the run within its limit of time, in one line that names it, with exit code 1."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from extent import sample
from forked import Forked
from models import mlp
from test_programs import program
from zoo_plans import program as zoo_program
from zoo_plans import sized

from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer

SECONDS = 8
DATA = """
import os, time, torch
def batch(step):
    if step == 3 and os.environ["RANK"] == "1":
        while True:
            time.sleep(0.01)
    return {"x": torch.ones(24, 16), "labels": torch.zeros(24, dtype=int)}
"""


STOPS = """
CALLS = 0


def stops():
    global CALLS
    CALLS += 1
    if CALLS == 11:  # the third of 4 micro-batches of step 3
        if os.environ["STOPS"] == "loop":
            while True:
                time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, os.environ["STOPS"]))
"""


@pytest.fixture(scope="module", params=sample(["1f1b", "2bw"], 2))
def staged_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A program in 2 stages, of which the second stops in the middle of a step."""
    name, keys = sized("mlp")
    text = zoo_program(build(name, **keys), f"{request.param},2:data-parallel/4", 2, Optimizer())
    head = re.search(r"def backward_1\(.*\n.*\n", text)
    assert head
    text = text.replace(head[0], f"{head[0]}    stops()\n")
    found = tmp_path_factory.mktemp(request.param) / "train.py"
    found.write_text(text.replace("\n# --- the step\n", f"{STOPS}\n# --- the step\n"))
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("program") / "train.py"
    found.write_text(program(mlp(), "ideal:2", "data-parallel", kernels="torch"))
    (found.parent / "endless.py").write_text(DATA)
    return found


def ranks(path: Path, folder: Path, *options: str) -> list[Forked]:
    """Two ranks, as another launcher than torchrun starts them: rank 0 keeps the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    given = ["--backend", "gloo", "--timeout", str(SECONDS), *options]
    found: list[Forked] = []
    for rank in range(2):
        own = folder / str(rank)
        own.mkdir()
        found.append(Forked(path, given, {**os.environ, **settings, "RANK": str(rank)}, own))
    return found


def ended(
    path: Path, folder: Path, disturb: Callable[[list[Forked]], None], *options: str, last: int = 0
) -> tuple[list[int], str]:
    """
    Exit codes, and what is written to stderr, of ranks disturbed after the first step. Once rank `last` has ended, the
    other has a few seconds.
    """
    processes = ranks(path, folder, *options)
    try:
        line = processes[0].first_line()
        disturb(processes)
        code = processes[last].wait(30 * SECONDS)
        assert code is not None, "it goes on"
        processes[1 - last].wait(5)
        codes = [process.wait(0) for process in processes]
    finally:
        for process in processes:
            process.signal(signal.SIGKILL)
            process.wait(SECONDS)
    written = [processes[rank].written for rank in (last, 1 - last)]
    assert line.startswith("step 1 "), written
    return [code if code is not None else 0 for code in codes], "".join(written)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_run(path: Path, tmp_path: Path, rank: int):
    processes: list[Forked] = []

    def stop(found: list[Forked]) -> None:
        processes.extend(found)
        found[rank].signal(signal.SIGSTOP)

    started = time.monotonic()
    codes, written = ended(path, tmp_path, stop, "--steps", "1000000", last=1 - rank)
    assert time.monotonic() - started < 10 * SECONDS
    assert codes[1 - rank] == 1
    if rank == 0:
        pattern = r"mlp: rank 0, which keeps the ranks' store, has not answered for \d+ s; .*\n"
    else:
        pattern = rf"mlp: rank 1 \(process {processes[1].pid} on .*\) has not answered for \d+ s; --timeout sets .*\n"
        # Killed, as torchrun would do only half a minute later.
        assert codes[rank] == -signal.SIGKILL
    assert re.fullmatch(pattern, written), written


@pytest.mark.zoo
@pytest.mark.slow
def test_a_rank_in_an_endless_loop_is_named(path: Path, tmp_path: Path):
    codes, written = ended(path, tmp_path, lambda _: None, "--steps", "10", "--data", "endless:batch")
    assert codes == [1, 1]
    assert re.fullmatch(r"mlp: rank 1 \(process \d+ on .*\) has come no further for \d+ s; .*\n", written), written


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_in_one_line(path: Path, tmp_path: Path):
    codes, written = ended(path, tmp_path, lambda found: found[1].signal(signal.SIGKILL), "--steps", "1000000")
    assert codes == [1, -signal.SIGKILL]
    assert re.fullmatch(r"mlp: another rank has ended: .*\n", written), written


@pytest.mark.zoo
@pytest.mark.slow
def test_a_pause_shorter_than_the_limit_changes_nothing(path: Path, tmp_path: Path):
    def pause(found: list[Forked]) -> None:
        for process in found:
            process.signal(signal.SIGSTOP)
        time.sleep(1)
        for process in found:
            process.signal(signal.SIGCONT)

    codes, written = ended(path, tmp_path, pause, "--steps", "300")
    assert (codes, written) == ([0, 0], "")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGSTOP", "loop", "SIGKILL"])
def test_a_stage_that_stops_in_a_step_ends_the_run_in_one_line(
    staged_path: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
):
    """Other ranks wait for what it sends; that it is the one is said, and not that they come no further."""
    monkeypatch.setenv("STOPS", how)
    codes, written = ended(staged_path, tmp_path, lambda _: None, "--steps", "1000000")
    said = {
        "loop": (r"rank 1 \(process \d+ on .*\) has come no further for \d+ s; --timeout sets .*", 1),
        "SIGSTOP": (r"rank 1 \(process \d+ on .*\) has not answered for \d+ s; --timeout sets .*", -signal.SIGKILL),
        "SIGKILL": (r"another rank has ended: .*", -signal.SIGKILL),
    }
    assert codes == [1, said[how][1]], written
    assert re.fullmatch(rf"mlp: {said[how][0]}\n", written), written
