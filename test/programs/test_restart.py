"""Whole runs: a rank is killed under torchrun and nothing changes; real data trains as in plain PyTorch."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from models import mlp
from ranks import Ranks, run_main
from test_programs import program

from unity_ir.models import from_text

ROOT = Path(__file__).resolve().parents[2]


def bench(name: str) -> ModuleType:
    """A module of bench/, which has a `models` of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        patch.delitem(sys.modules, "models")
        return importlib.import_module(name)


def losses(lines: list[str]) -> list[str]:
    return re.findall(r"^step \d+ loss (\S+)", "\n".join(lines), re.M)


@pytest.mark.zoo
@pytest.mark.slow
def test_a_killed_rank_changes_nothing(ranks: Ranks, tmp_path: Path):
    restart = bench("restart")
    path = tmp_path / "train.py"
    path.write_text(program(mlp(), "ideal:2", "data-parallel", "adam", kernels="torch"))
    options = ["--steps", "40", "--deterministic", "--weights-out"]
    plain = ranks.run(path.read_text(), 2, run_main, [*options, str(tmp_path / "plain")])[0]
    saving = ("--save", str(tmp_path / "c"), "--save-every", "3", "--weights-out", str(tmp_path / "killed"))
    kills, found = restart.disturbed(path, 2, 40, 1, Random(1), *saving)
    assert kills == 1
    assert found == losses(plain)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "killed").read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "gpt", "mixture"])
def test_real_data_trains_as_in_pytorch(ranks: Ranks, tmp_path: Path, name: str):
    """bench/train.py, short, on four ranks."""
    if name == "digits":
        pytest.importorskip("sklearn")
    train = bench("train")
    case, steps = replace(train.CASES[name], recipe=""), 8
    text = program(from_text(case.model), "ideal:2x2", "data-parallel", case.optimizer, kernels="torch", lr=case.lr)
    path, weights = tmp_path / "p.py", tmp_path / "w.safetensors"
    path.write_text(text)
    data = train.write_data(case, tmp_path, "d")
    ranks.run(text, 4, run_main, ["--steps", "0", "--weights-out", str(weights)])
    lines = ranks.run(text, 4, run_main, ["--steps", str(steps), *train.data_options(case, data)])[0]
    found, plain = list(map(float, losses(lines))), train.plain_losses(case, path, weights, data, steps)
    assert found == pytest.approx(plain, rel=1e-5)
    assert found[-1] < found[0]


@pytest.mark.zoo
@pytest.mark.slow
def test_a_mixture_of_which_a_rank_is_killed_trains_as_in_pytorch(tmp_path: Path):
    """bench/train.py, short: packed text, experts that drop tokens, a balance loss, micro-batches, one rank killed."""
    found = bench("train").run("mixture", 20, tmp_path)
    assert found["largest relative difference"] < 1e-5
    assert found["last loss"] < found["first loss"]
