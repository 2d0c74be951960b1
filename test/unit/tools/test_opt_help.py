"""`unity-opt --help` is short, complete and quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unity_ir.passes import PASSES, TARGETS
from unity_ir.tools.opt_help import summary
from unity_ir.tools.unity_opt import main

IMPORTED = """
import sys
from unity_ir.tools.unity_opt import main
try:
    main(["--help"])
finally:
    print([name for name in ("numpy", "torch", "z3", "unity_ir.search", "unity_ir.ops") if name in sys.modules])
"""


@pytest.mark.parametrize("path", [*PASSES.values(), *TARGETS.values()])
def test_every_pass_and_target_has_a_line(path: str):
    assert 20 < len(summary(path)) < 90


def test_help_is_a_line_each(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert all(len(line) <= 130 for line in text.splitlines())
    for name in (*PASSES, *TARGETS, "--model", "--machine", "--stats", "--help-all"):
        assert sum(line.startswith(f"  {name} ") for line in text.splitlines()) == 1, name


def test_help_imports_neither_passes_nor_numpy():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]"
