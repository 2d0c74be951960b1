"""Ctrl-C ends a search with the best plan so far."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from graphs import boxes, with_memory

from unity_ir import models
from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph, erase
from unity_ir.search import run
from unity_ir.search.flexflow import mcmc
from unity_ir.search.layouts.limits import limited
from unity_ir.tools.unity_opt import main

MACHINE = boxes(2, 2, overhead=1e-6)


def mlp() -> Graph:
    return models.build("mlp", layers=4)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2])
def test_the_joint_search_returns_the_best_so_far(after: int):
    seen: list[float] = []

    def progress(explored: int, best: float) -> None:
        seen.append(best)
        if len(seen) == after:
            raise KeyboardInterrupt

    found = run(mlp(), MACHINE, progress=progress)
    assert found.interrupted
    assert len(seen) == after
    assert found.cost.time == pytest.approx(min(seen), abs=1e-9)
    assert not run(mlp(), MACHINE).interrupted
    assert found.derivation or erase(found.graph) == mlp()


@pytest.mark.parametrize("at", [("joint.best_first", "solve"), ("strategies.joint", "selected")])
def test_before_there_is_a_plan_a_baseline_stands_in(at: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[f"unity_ir.search.{at[0]}"], at[1], interrupt)
    found = run(mlp(), MACHINE)
    assert found.interrupted
    assert found.bound is None
    assert erase(found.graph) == mlp()
    baselines = {"data-parallel": {}, "fsdp": {}, "expert": {"rewrite": False}}
    best = min(run(mlp(), MACHINE, s, options=options).cost.time for s, options in baselines.items())
    assert found.cost.time == best
    with pytest.raises(UnityError, match=r"^search: interrupted before joint found a plan, and no baseline fits"):
        run(mlp(), with_memory(MACHINE, 1))


def test_mcmc_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    calls = 0
    propose = mcmc.Simulation.propose

    def counted(self: mcmc.Simulation, *arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return propose(self, *arguments)  # pyright: ignore

    monkeypatch.setattr(mcmc.Simulation, "propose", counted)
    found = run(mlp(), MACHINE, "mcmc", options={"budget": 500})
    assert (found.interrupted, calls) == (True, 30)
    assert erase(found.graph) == mlp()


def test_the_tool_prints_the_plan_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mlp.pcg"
    assert main(["--model=mlp,layers=2", "-o", str(file)]) == 0
    monkeypatch.setattr("unity_ir.search.joint.best_first._rewrites", interrupt)
    assert main([str(file), "--search", "--machine=2gpu"]) == 0
    printed = capsys.readouterr()
    assert "#machine.view" in printed.out
    assert printed.err == "pcg-search: interrupted; the best plan so far stands for @mlp\n"
    monkeypatch.setattr("unity_ir.passes.search.run_with_stages", interrupt)
    assert main([str(file), "--search", "--machine=2gpu"]) == 130
    assert capsys.readouterr().err == "unity-opt: interrupted\n"


SIGNALLED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from unity_ir.search.joint import best_first
from unity_ir.tools.unity_opt import main
rewrites = best_first._rewrites
def interrupted(graph, rules):
    yield next(iter(rewrites(graph, rules)))
    os.kill(os.getpid(), signal.SIGINT)
    yield from rewrites(graph, rules)
best_first._rewrites = interrupted
sys.exit(main(["--model=mlp,layers=2", "--search", "--machine=2gpu"]))
"""


@pytest.mark.slow
def test_a_signal_ends_a_process_with_a_plan():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "pcg-search: interrupted; the best plan so far stands for @mlp\n")
    assert "#machine.view" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "late", ["faster_with_bound", "place_branches", "Chooser._with_rival", "Chooser.with_unrewritten"]
)
def test_what_comes_after_the_search_may_be_interrupted(late: str, monkeypatch: pytest.MonkeyPatch):
    """The bound of a large machine, branches on parts, what is compared: there is a plan by then."""
    machine = boxes(2, 2, 2, 2, overhead=1e-6) if late == "faster_with_bound" else MACHINE
    monkeypatch.setattr(f"unity_ir.search.choose.winner.{late}", interrupt)
    # Axes are grouped, and so there is a bound, as on larger machines, which take half a minute.
    with limited(group_rows=1000):
        found = run(mlp(), machine)
    assert found.interrupted
    assert found.derivation
    assert (found.bound is None) == (late == "faster_with_bound")
    assert found.cost.time <= run(mlp(), machine, "data-parallel").cost.time


def test_without_stderr_a_plan_is_printed_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["--model=mlp,layers=2", "--search", "--machine=2gpu"]) == 0
    assert "#machine.view" in capsys.readouterr().out
