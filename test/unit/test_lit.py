"""
lit runs FileCheck tests as well: a few that are short, with real processes, with all that RUN lines are made of.

All of them run under pytest, in process (`test/conftest.py`); `lit -sv test` runs all with real processes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIT = str(Path(sys.executable).parent / "lit")
TESTS = {p for p in (ROOT / "test").rglob("*.*") if p.suffix in (".mlir", ".pcg") and "RUN:" in p.read_text()}
SAMPLE = [
    "dialects/subst/xdsl_opt.pcg",
    "tools/output.pcg",
    "tools/print_plan.pcg",
]
SYNTAX = re.compile(r"%[sSt]\b|2>&1|(?<!\d)>(?!&)|\||\bnot\b|\b(?:unity-\w+|xdsl-opt|filecheck)\b")


def parts(test: Path) -> set[str]:
    """Commands, substitutions and operators of a test's RUN lines."""
    return {part for line in re.findall(r"RUN:(.*)", test.read_text()) for part in SYNTAX.findall(line)}


def test_the_sample_has_all_that_run_lines_are_made_of():
    every = set[str]().union(*map(parts, TESTS))
    assert {"%s", "%S", "%t", "2>&1", ">", "|", "not", "unity-opt", "xdsl-opt", "filecheck"} == every
    assert set[str]().union(*(parts(ROOT / "test" / "filecheck" / name) for name in SAMPLE)) == every


@pytest.mark.slow
def test_lit_runs_them():
    done = subprocess.run(
        [LIT, "-v", *(f"test/filecheck/{name}" for name in SAMPLE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(rf"Passed\s*: {len(SAMPLE)} ", done.stdout), done.stdout


@pytest.mark.slow
def test_lit_finds_all_that_pytest_runs():
    done = subprocess.run(
        [LIT, "--show-tests", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {ROOT / line.split(" :: ")[1] for line in done.stdout.splitlines() if " :: " in line}
    assert found == TESTS
