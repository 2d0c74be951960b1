"""Measurements are not run by tests, but they must not be left behind by what they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_every_script_can_be_started():
    names = sorted(p.stem for p in BENCH.glob("*.py"))
    assert len(names) > 10
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"], cwd=BENCH, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr.splitlines()[-1]
