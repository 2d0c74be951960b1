"""Checkpoints that are written while training goes on: whole ones of the step they are of, one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from beside import failed, run_held, saved_while_training
from models import mlp
from ranks import Ranks, refused, run_main
from test_programs import program


@pytest.fixture(scope="module")
def text() -> str:
    return program(mlp(), "ideal:2", "fsdp", "adam", kernels="torch")


@pytest.mark.slow
def test_what_is_saved_is_what_was_before_the_next_update(ranks: Ranks, tmp_path: Path, text: str):
    for is_complete, at, later, loaded in ranks.run(text, 2, saved_while_training, str(tmp_path)):
        assert not is_complete
        for name, value in at.items():
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
            assert not np.array_equal(later[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


@pytest.mark.slow
def test_the_next_one_and_the_end_wait_for_the_one_before(ranks: Ranks, tmp_path: Path, text: str):
    options = ["--steps", "5", "--save", str(tmp_path / "saved"), "--save-every", "2", "--save-async", "--keep", "2"]
    for _, order in ranks.run(text, 2, run_held, options):
        assert [what for what in order if what != "begin"] == ["wait", "write"] * 3
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["step_00000004", "step_00000005"]
    assert all((tmp_path / "saved" / name / "complete.json").exists() for name in names)


@pytest.mark.slow
def test_a_run_goes_on_from_one_with_the_same_losses(ranks: Ranks, tmp_path: Path, text: str):
    want, folder = ranks.run(text, 2, run_main, ["--steps", "6"])[0], str(tmp_path / "saved")
    given = ["--steps", "4", "--save", folder, "--save-every", "1", "--save-async"]
    assert ranks.run(text, 2, run_main, given)[0] == want[:4]
    assert ranks.run(text, 2, run_main, ["--steps", "6", "--load", folder])[0] == want[4:]


@pytest.mark.slow
def test_one_that_cannot_be_written_is_said_at_the_next_step(ranks: Ranks, tmp_path: Path, text: str):
    for said, left in ranks.run(text, 2, failed, str(tmp_path)):
        assert said == f"cannot write {tmp_path / 'step_00000001'}: [Errno 28] No space left on device"
        assert left == []


@pytest.mark.slow
def test_it_is_refused_without_a_folder(ranks: Ranks, text: str):
    code, said = ranks.run(text, 2, refused, ["--save-async"], {})[0]
    assert (code, said) == (1, "mlp: --save-async is of --save, which has to be given\n")
