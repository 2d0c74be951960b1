"""A data file that could only train something else than it says is refused, in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import mlp
from test_programs import program


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An emitted program, imported."""
    path = tmp_path_factory.mktemp("program") / "emitted.py"
    path.write_text(program(mlp(), "ideal:2", "joint"))
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


def arrays(emitted: Any) -> dict[str, Any]:
    """Twice a batch, with labels that are whole numbers of the classes there are."""
    made = {n: np.zeros((2 * s.shape[0], *s.shape[1:])) for n, s in emitted.INPUTS.items()}
    return {n: a if emitted.INPUTS[n].dtype.is_floating_point else a.astype(np.int32) for n, a in made.items()}


def integer(emitted: Any) -> str:
    return next(n for n, s in emitted.INPUTS.items() if s.below is not None)


def test_arrays_are_converted(emitted: Any, tmp_path: Path):
    np.savez(tmp_path / "good.npz", **arrays(emitted))
    batch = emitted.Data(tmp_path / "good.npz").batch(0)
    assert {n: (tuple(b.shape), b.dtype) for n, b in batch.items()} == {
        n: (s.shape, s.dtype) for n, s in emitted.INPUTS.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, below: a + below, "has values outside 0 to"),
        (lambda a, below: a - 1, "has values outside 0 to"),
        (lambda a, below: a + 0.5, "it must convert to torch.int64"),
        (lambda a, below: a.astype(complex), "it must convert to torch.int64"),
        (lambda a, below: a[:-1], "as many rows as each other"),
        (lambda a, below: a[:1], "a batch is"),
        (lambda a, below: a[0], "a batch is"),
        (lambda a, below: a.astype(str), "cannot read"),
        (lambda a, below: a.astype(object), "cannot read"),
    ],
)
def test_wrong_arrays_are_refused(
    emitted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
):
    made, name = arrays(emitted), integer(emitted)
    made[name] = change(made[name], emitted.INPUTS[name].below)
    np.savez(tmp_path / "bad.npz", **made)
    with pytest.raises(SystemExit) as raised:
        emitted.Data(tmp_path / "bad.npz")
    error = capsys.readouterr().err
    assert raised.value.code == 1
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\3\4 cut short"])
def test_what_is_no_archive_is_refused(
    emitted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        emitted.Data(path)
    assert capsys.readouterr().err.count("\n") == 1
