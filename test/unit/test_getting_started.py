"""docs/getting_started.md: every command works as it stands there, in order, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:e-?\d+)?(?![\w])")
SPEED = re.compile(r"  [\d,.e+]+ \w+/s|  [\d.]+ GB|, \"peak_bytes\": \d+")
WITHIN = 0.03
"""Part by which a number may be off: bf16 rounds otherwise on other processors."""


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


@pytest.mark.slow
def test_every_command_prints_what_the_document_says(tmp_path: Path):
    """But for speed and memory; numbers to a few parts in a hundred."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    found = commands((ROOT / "docs" / "getting_started.md").read_text())
    assert len(found) >= 7
    for command, said in found:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        printed = done.stdout.splitlines()
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        for here, there in zip(printed, said, strict=True):
            here, there = SPEED.sub("", here), SPEED.sub("", there)
            assert NUMBER.sub("N", here) == NUMBER.sub("N", there), command
            assert numbers(here) == pytest.approx(numbers(there), rel=WITHIN), command
