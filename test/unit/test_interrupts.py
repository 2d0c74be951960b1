"""Signals end a tool, and lose no plan that a search has found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unity_ir import interrupts, models
from unity_ir.search import SearchResult, run
from unity_ir.tools.command_line import outcome
from unity_ir.tools.unity_opt import main

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _not_ignored():
    """Signals as a terminal has them: `nohup` and a shell's background ignore some, and what they start goes on to."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def kill(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_ends_a_tool_with_130_and_one_line(number: int, capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(number)
    assert outcome("unity-x", lambda: kill(number) or 0) == 130
    assert capsys.readouterr().err == "unity-x: interrupted\n"
    assert signal.getsignal(number) is before


def test_a_search_is_interrupted_once_and_its_plan_kept(capsys: pytest.CaptureFixture[str]):
    found: list[str] = []
    with interrupts.handled():
        with interrupts.searching():
            try:
                kill(signal.SIGTERM)
                found.append("not interrupted")
            except KeyboardInterrupt:
                found.append("best so far")
            kill(*NUMBERS)
        kill(*NUMBERS)
        found.append("written")
        # The next search is interrupted again, and what it finds stands, too.
        with pytest.raises(KeyboardInterrupt), interrupts.searching():
            kill(signal.SIGINT)
        kill(signal.SIGHUP)
    assert found == ["best so far", "written"]
    assert capsys.readouterr().err.count("\n") == 1


def test_a_search_without_a_plan_can_be_left():
    with interrupts.handled():
        with pytest.raises(ValueError, match="no plan"), interrupts.searching():
            raise ValueError("no plan")
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)


@pytest.mark.parametrize("numbers", [[signal.SIGINT] * 5, [signal.SIGTERM], [signal.SIGHUP, signal.SIGINT]])
def test_signals_during_a_search_write_the_plan(numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(*arguments: object, **_: object) -> SearchResult:
        graph, machine, *_ = arguments
        first = True

        def progress(explored: int, best: float) -> None:
            nonlocal first
            if first:
                first = False
                kill(*numbers)

        return run(graph, machine, progress=progress)  # pyright: ignore

    monkeypatch.setattr("unity_ir.passes.search.run_with_stages", killed)
    plan = tmp_path / "plan.pcg"
    assert main(["--model=mlp,layers=2", "--search", "--machine=2gpu", "-o", str(plan)]) == 0
    assert main([str(plan), "-o", os.devnull]) == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_imports_are_interrupted_in_one_line(number: int):
    text = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'unity_ir.tools.unity_opt': os.kill(os.getpid(), {int(number)})\n"
        "from unity_ir.tools.start import unity_opt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "unity_opt()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "unity-opt: interrupted\n")


def test_a_forked_process_takes_signals_as_any(monkeypatch: pytest.MonkeyPatch):
    with interrupts.handled():
        process = os.fork()
        if process == 0:
            ends: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
            ends()
            os._exit(0)
        _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert models.names()
