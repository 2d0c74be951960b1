"""
docs/getting_started.md: every command works as it stands there, in order, and prints what it says.

In this process and on the pool of ranks, which have PyTorch loaded; with ZOO=all in processes of their own.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from extent import ALL
from ranks import Ranks, run_main

from unity_ir.tools import unity_opt

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:e-?\d+)?(?![\w])")
SPEED = re.compile(r"  [\d,.e+]+ \w+/s|  [\d.]+ GB|, \"peak_bytes\": \d+")
WITHIN = 0.03
"""Part by which a number may be off: bf16 rounds otherwise on other processors."""

TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a document, `$ ..` in blocks of text, and the lines that each is said to print."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```\n(\$ .*?)^```$", text, re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def numbers(line: str) -> list[float]:
    return [float(n.replace(",", "")) for n in NUMBER.findall(line)]


def in_a_shell(command: str) -> list[str]:
    """Run a command in bash, in the current folder; return the lines it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout.splitlines()


def called(main: Callable[[], object], argv: Sequence[str], stderr: str | None) -> list[str]:
    """Call what a process does that is started with these arguments; return the lines it prints."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [*argv])
        patch.setattr(sys, "path", [*sys.path])
        code = main()
    assert not code, f"{argv}\n{err.getvalue()}"
    if stderr is not None:
        Path(stderr).write_text(err.getvalue())
    return out.getvalue().splitlines()


def without_a_process(command: str, ranks: Ranks) -> list[str]:
    """Do what a command does, `2> file` included, in the current folder; return the lines it prints."""
    words, stderr = shlex.split(command), None
    if words[-2] == "2>":
        *words, _, stderr = words
    if words[0] == "unity-opt":
        return called(lambda: unity_opt.main(words[1:]), words, stderr)
    if words[0] == "python":
        return called(lambda: runpy.run_path(words[1], run_name="__main__") and None, words[1:], stderr)
    if words[: len(TORCHRUN)] == TORCHRUN:
        program, *options = words[len(TORCHRUN) :]
        return ranks.run(Path(program).read_text(), 2, run_main, options, None, str(Path.cwd()))[0]
    return in_a_shell(command)


@pytest.mark.slow
def test_every_command_prints_what_the_document_says(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But for speed and memory; numbers to a few parts in a hundred."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    found = commands((ROOT / "docs" / "getting_started.md").read_text())
    assert len(found) >= 7
    for command, said in found:
        printed = in_a_shell(command) if ALL else without_a_process(command, ranks)
        for here, there in zip(printed, said, strict=True):
            here, there = SPEED.sub("", here), SPEED.sub("", there)
            assert NUMBER.sub("N", here) == NUMBER.sub("N", there), command
            assert numbers(here) == pytest.approx(numbers(there), rel=WITHIN), command
