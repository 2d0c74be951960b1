"""The imports of the modules that every program has."""

from __future__ import annotations

import ast
import re

import pytest

from unity_ir.lowering import runtime


def test_imports_of_the_standard_library_come_first():
    standard, of_torch = runtime.imports().split("\n\n")
    assert "import torch\n" in of_torch
    assert "torch" not in standard
    ast.parse(standard)


@pytest.mark.parametrize("parts", [(), ("none_of_torch",)])
def test_modules_without_torch(parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    def none_of_torch(part: str) -> str:
        return f"import os\n{runtime.MARK}\n"

    monkeypatch.setattr(runtime, "_file", none_of_torch)
    runtime.imports.cache_clear()
    assert runtime.imports(parts) == ("import os\n" if parts else "\n")
    runtime.imports.cache_clear()


def test_functions_for_an_average_are_in_programs_that_keep_one():
    with_it, without = (
        runtime.text(step="train()\ncheck()\nsave()\nload()", has_average=kept) for kept in (True, False)
    )
    for name in ("averaged", "_has_average", "get_ema_multi_avg_fn"):
        assert name in with_it
        assert name not in without


def test_no_heading_stands_over_nothing():
    text = runtime.text(step="")
    headings = re.findall(r"^# --- .*\n+(?=# ---|\Z)", text, re.MULTILINE)
    assert text.count("# --- ") > 10
    assert headings == []
