"""Whole runs under torchrun: a rank is killed and nothing changes; real data trains as in plain PyTorch."""

from __future__ import annotations

import importlib
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from models import mlp
from test_programs import program

ROOT = Path(__file__).resolve().parents[2]


def bench(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        return importlib.import_module(name)


@pytest.mark.slow
def test_a_killed_rank_changes_nothing(tmp_path: Path):
    restart = bench("restart")
    path = tmp_path / "train.py"
    path.write_text(program(mlp(), "ideal:2", "data-parallel", "adam", kernels="torch"))
    plain = restart.torchrun(path, 2, 0, "--steps", "40", "--weights-out", str(tmp_path / "plain"))
    text, _ = plain.communicate(timeout=60)
    assert plain.returncode == 0, text
    saving = ("--save", str(tmp_path / "c"), "--save-every", "3", "--weights-out", str(tmp_path / "killed"))
    kills, losses = restart.disturbed(path, 2, 40, 1, Random(1), *saving)
    assert kills == 1
    assert len(losses) == 40
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "killed").read_bytes()


@pytest.mark.slow
def test_text_trains_as_in_pytorch(tmp_path: Path):
    """bench/train.py, short."""
    found = bench("train").run("gpt", 6, tmp_path)
    assert len(found["losses"]) == 6
    assert found["largest relative difference"] < 1e-4
    assert found["last loss"] < found["first loss"]
