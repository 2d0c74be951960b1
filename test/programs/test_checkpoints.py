"""Checkpoints move between plans and into plain PyTorch; a run that is killed goes on where it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from extent import sample
from models import mlp
from ranks import Ranks, load_and_train, loaded, run_main, saved, train_and_save
from test_programs import program
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from zoo_plans import SIZES
from zoo_plans import program as zoo_program

from unity_ir.models import build
from unity_ir.pcg.optimizer import Optimizer


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_loads_on_two_and_in_plain_pytorch(ranks: Ranks, tmp_path: Path):
    folder = str(tmp_path / "checkpoints")
    four = program(mlp(), "ideal:2x2", "joint", "adam", kernels="torch")
    two = program(mlp(), "ideal:2", "data-parallel", "adam", kernels="torch")
    saved = ranks.run(four, 4, train_and_save, 2, folder)[0]
    first, loaded, after = ranks.run(two, 2, load_and_train, 2, folder)[0]
    assert first == 2
    for name, value in saved.items():
        np.testing.assert_array_equal(loaded[name], value)

    undisturbed = ranks.run(four, 4, train_and_save, 4, str(tmp_path / "other"))[0]
    for name, value in undisturbed.items():
        np.testing.assert_allclose(after[name], value, atol=2e-5, err_msg=name)

    dcp_to_torch_save(tmp_path / "checkpoints" / "step_00000002", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    for name, value in saved.items():
        np.testing.assert_array_equal(plain[f"weights.{name}"].numpy(), value)


@pytest.mark.slow
@pytest.mark.parametrize("model", sample(["mlp", "gpt2", "dlrm"], 3, 2))
def test_weights_and_moments_move_between_plans(ranks: Ranks, tmp_path: Path, model: str):
    """Of tables divided by rows and a weight with two users, too; training goes on as if nothing had happened."""
    folder, graph, adam = str(tmp_path), build(model, **SIZES[model]), Optimizer("adam", 1e-3)
    text = zoo_program(graph, "random-1", 4, adam, double=True)
    if model == "dlrm":
        assert re.search(r"'table\d': Spec\(.*, \((0, '|'\w+', 0\)|0, 0\))", text), "no table is divided by rows"
    want = ranks.run(text, 4, saved, 2, folder)[0]
    assert all(np.abs(m).max() > 0 for k in range(2) for m in want[f"moments {k}"].values())
    for plan, world in (("random-2", 8), ("data-parallel", 2), ("pinned-1", 4)):
        found = ranks.run(zoo_program(graph, plan, world, adam, double=True), world, loaded, folder)[0]
        for what, values in want.items():
            for name, value in values.items():
                if what == "later":
                    np.testing.assert_allclose(found[what][name], value, rtol=1e-7, atol=1e-10, err_msg=name)
                else:
                    np.testing.assert_array_equal(found[what][name], value, err_msg=f"{what} of {name}")


@pytest.mark.slow
def test_an_incomplete_checkpoint_is_never_loaded(ranks: Ranks, tmp_path: Path):
    text = program(mlp(), "ideal:2", "joint", kernels="torch")
    ranks.run(text, 2, train_and_save, 1, str(tmp_path))
    cut_short = tmp_path / "step_00000009"
    cut_short.mkdir()
    (cut_short / "__0_0.distcp").write_bytes(b"half")
    (cut_short / ".metadata").write_bytes(b"half")
    assert ranks.run(text, 2, load_and_train, 0, str(tmp_path))[0][0] == 1


def torchrun(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--backend", "gloo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def kill(path: Path) -> None:
    """Kill everything that runs a program: torchrun and its workers, which are in sessions of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(ranks: Ranks, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(program(mlp(), "ideal:2", "joint", "adam", kernels="torch"))
    folder = tmp_path / "checkpoints"
    run = torchrun(path, "--steps", "10000", "--save", str(folder), "--save-every", "3")
    try:
        while len(list(folder.glob("step_*/complete.json"))) < 2 and run.poll() is None:
            time.sleep(0.02)
    finally:
        kill(path)
        run.communicate()

    done = max(int(p.parent.name.removeprefix("step_")) for p in folder.glob("step_*/complete.json"))
    # However far it came before it was killed, which a busy machine decides.
    steps = str(done + 20)
    want = ranks.run(path.read_text(), 2, run_main, ["--steps", steps])[0]
    assert ranks.run(path.read_text(), 2, run_main, ["--steps", steps, "--load", str(folder)])[0] == want[done:]
