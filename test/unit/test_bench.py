"""Measurements are not run by tests, but they must not be left behind by what they measure."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
def test_every_script_can_be_started(monkeypatch: pytest.MonkeyPatch):
    """In this process, where PyTorch and Transformers are loaded already; the scripts are forgotten again."""
    names = sorted(p.stem for p in BENCH.glob("*.py"))
    assert len(names) > 10
    monkeypatch.syspath_prepend(BENCH)
    for name in names:
        # Tests have modules of the same names. Setting an entry first lets it be undone if there is none.
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
    for name in names:
        found = importlib.import_module(name)
        assert Path(found.__file__ or "").parent == BENCH
