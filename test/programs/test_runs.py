"""The options of a program, in processes of this pool: data, weights, checkpoints, the NaN guard, profiles."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
from extent import examples
from models import mlp
from ranks import Ranks, damaged, full_disk, refused, run_main
from safetensors.numpy import load_file, save_file
from test_programs import program

from unity_ir.lowering import runtime


@pytest.fixture(scope="module")
def text() -> str:
    return program(mlp(), "ideal:2", "data-parallel", "adam")


Main = Callable[..., list[str]]


@pytest.fixture
def main(ranks: Ranks, text: str) -> Main:
    """Runs the program on two ranks with options; what rank 0 has printed."""
    return lambda *options, folder=Path(): ranks.run(text, 2, run_main, list(options), {}, str(folder))[0]


@pytest.fixture
def refusal(ranks: Ranks, text: str) -> Callable[..., str]:
    """The line with which all ranks refuse to run."""

    def run(*options: str, environment: dict[str, str] | None = None) -> str:
        found = ranks.run(text, 2, refused, list(options), environment or {})
        assert [code for code, _ in found] == [1, 1]
        lines = {line for _, written in found for line in written.splitlines() if line.startswith("mlp: ")}
        assert len(lines) == 1, lines
        return lines.pop()

    return run


@pytest.mark.slow
def test_a_profile_has_the_tracks_and_names_of_the_simulator(main: Main, tmp_path: Path):
    main("--steps", "2", "--profile", str(tmp_path / "p.json"))
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"device 0", "device 1"}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"compute", "network link"}
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in spans)
    names = {(e["tid"], e["name"], e["cat"]) for e in spans}
    assert {
        (0, "matmul", "forward"),
        (0, "cross_entropy_saved_grad", "backward"),
        (0, "adam of all weights", "update"),
        (1, "all_reduce of 5 gradients", "gradient sync"),
    } <= names
    mine = [e for e in spans if e["pid"] == 0 and e["tid"] == 0]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine))
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(held) > min(held) > 0


@pytest.mark.slow
@pytest.mark.parametrize("always", [True, False])
def test_nan_is_blamed_on_the_operator_that_made_it(
    refusal: Callable[..., str], text: str, tmp_path: Path, always: bool
):
    arrays = {"x": np.zeros((24, 16), np.float32), "labels": np.zeros(24, np.int64)}
    arrays["x"][3] = 3e38  # whose products are infinite
    np.savez(tmp_path / "d.npz", **arrays)
    line = refusal("--data", str(tmp_path / "d.npz"), *(["--check-nan"] if always else []))
    assert line.startswith("mlp: step 1: loss nan; first the result of matmul + add + gelu [24, 48], dim 0 at line ")
    assert " is inf, on rank " in line or " is nan, on rank " in line
    number = int(line.split(" at line ")[1].split()[0])
    assert " = matmul_" in text.splitlines()[number - 1]


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_named(refusal: Callable[..., str], main: Main, tmp_path: Path):
    path = str(tmp_path / "w.safetensors")
    main("--steps", "0", "--weights-out", path)
    weights = load_file(path)
    weights["fc3.bias"] = np.full_like(weights["fc3.bias"], np.nan)
    save_file(weights, path)
    assert refusal("--weights", path).endswith(
        "weight 'fc3.bias' is nan, on rank 0; --check-nan finds the step that made it"
    )


def test_weights_go_out_and_in(main: Main, tmp_path: Path):
    path, other = str(tmp_path / "w.safetensors"), str(tmp_path / "v.safetensors")
    main("--steps", "2", "--seed", "3", "--weights-out", path)
    main("--steps", "0", "--weights", path, "--weights-out", other)
    weights, again = load_file(path), load_file(other)
    assert weights["fc2.weight"].shape == (48, 24)
    assert weights.keys() == again.keys()
    assert all(np.array_equal(weights[n], again[n]) for n in weights)


def test_weights_that_are_not_its_own_are_refused(refusal: Callable[..., str], main: Main, tmp_path: Path):
    path = str(tmp_path / "w.safetensors")
    main("--steps", "0", "--weights-out", path)
    weights = load_file(path)
    save_file({**weights, "fc1.bias": np.zeros(3, np.float32)}, path)
    assert "fc1.bias is [3], torch.float32; it must be [48], torch.float32" in refusal("--weights", path)
    del weights["fc1.bias"]
    save_file(weights, path)
    assert refusal("--weights", path) == f"mlp: {path}: it has no weight 'fc1.bias'"
    Path(path).write_bytes(b"no such thing")
    assert refusal("--weights", path).startswith(f"mlp: cannot read {path}: ")


@pytest.mark.slow
def test_data_of_a_file_or_a_function_is_the_same(main: Main, tmp_path: Path):
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(24, 16)).astype(np.float32), "labels": random.integers(0, 12, 24)}
    save_file(arrays, str(tmp_path / "d.safetensors"))
    np.savez(tmp_path / "d.npz", **arrays)
    module = f"rows_{os.getpid()}"
    (tmp_path / f"{module}.py").write_text(
        "from pathlib import Path; import numpy, torch\n"
        "def batch(step):\n"
        "    rows = dict(numpy.load(Path(__file__).parent / 'd.npz'))\n"
        "    order = torch.randperm(24, generator=torch.Generator().manual_seed(step)).numpy()\n"
        "    return {name: array[order] for name, array in rows.items()}\n"
    )
    found = [main("--steps", "2", "--data", str(tmp_path / name)) for name in ("d.npz", "d.safetensors")]
    assert found[0] == found[1]
    by_function = main("--steps", "2", "--data", f"{module}:batch", folder=tmp_path)
    # The same rows in another order.
    assert float(by_function[0].split()[-1]) == pytest.approx(float(found[0][0].split()[-1]), rel=1e-5)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("json:dumps", "json:dumps(0): TypeError: string indices must be integers"),
        ("json:nothing", "cannot import nothing of json: AttributeError"),
        ("no_such_module:f", "cannot import f of no_such_module: ModuleNotFoundError"),
        ("sys:exit", "sys:exit(0): SystemExit: 0; it must return arrays by name"),
    ],
)
def test_a_function_that_gives_no_batch_is_refused(refusal: Callable[..., str], source: str, message: str):
    assert message in refusal("--data", source)


def test_a_function_may_give_what_has_a_gradient_but_not_what_is_sparse(
    refusal: Callable[..., str], main: Main, tmp_path: Path
):
    (tmp_path / "given_tensors.py").write_text(
        "import torch\n"
        "def gradient(step):\n"
        "    return {'x': torch.ones(24, 16, requires_grad=True), 'labels': torch.zeros(24, dtype=int)}\n"
        "def sparse(step):\n"
        "    return {'x': torch.ones(24, 16).to_sparse(), 'labels': torch.zeros(24, dtype=int)}\n"
    )
    assert main("--steps", "1", "--data", "given_tensors:gradient", folder=tmp_path)
    assert "x is torch.sparse_coo; it must be dense" in refusal("--data", "given_tensors:sparse")


# --- checkpoints


@pytest.mark.slow
def test_a_run_in_parts_is_the_whole_run(main: Main, tmp_path: Path):
    folder = str(tmp_path / "c")
    whole = main("--steps", "5", "--seed", "4", "--weights-out", str(tmp_path / "whole"))
    main("--steps", "2", "--seed", "4", "--save", folder)
    # The seed is the checkpoint's.
    rest = main("--steps", "5", "--load", folder, "--save", folder, "--weights-out", str(tmp_path / "parts"))
    assert rest == whole[2:]
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


@pytest.mark.slow
def test_torchrun_goes_on_where_it_was(main: Main, ranks: Ranks, text: str, tmp_path: Path):
    folder = str(tmp_path / "c")
    whole = main("--steps", "5")
    started_again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    options = ["--steps", "5", "--save", folder, "--save-every", "2"]
    # Nothing was saved before the first kill.
    assert ranks.run(text, 2, run_main, options, started_again)[0] == whole
    (tmp_path / "c" / "step_00000005").rename(tmp_path / "c" / "partial_step_00000005")
    assert ranks.run(text, 2, run_main, options, started_again)[0] == whole[4:]


Spoil = Callable[[Path], Any]


sealed = runtime.load(("checkpoints",))._sealed
"""What a `complete.json` of its content is, so that what else is wrong with it is seen."""


def record(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(path: Path) -> None:
        found = json.loads((path / "complete.json").read_text())
        del found["sha256"]
        change(found)
        (path / "complete.json").write_bytes(sealed(found))

    return spoil


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/unity_evil",)


def unpickled(thing: object) -> Spoil:
    """Metadata that does something when it is unpickled, with the right checksum."""

    def spoil(path: Path) -> None:
        content = pickle.dumps(thing)
        (path / ".metadata").write_bytes(content)
        record(lambda r: r["files"].update({".metadata": [len(content), zlib.crc32(content)]}))(path)

    return spoil


def imported(module: str, name: str) -> Spoil:
    """Metadata that names something of another module, with the right checksum."""

    def spoil(path: Path) -> None:
        content = f"c{module}\n{name}\n0".encode() + (path / ".metadata").read_bytes()
        (path / ".metadata").write_bytes(content)
        record(lambda r: r["files"].update({".metadata": [len(content), zlib.crc32(content)]}))(path)

    return spoil


class Sly:
    """Versions of Python before 3.11.4 pickle members of enums so."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (PosixPath, "cwd")


def flipped(path: Path) -> None:
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (flipped, "__1_0.distcp is corrupt"),
        (lambda p: (p / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b""), "__0_0.distcp is corrupt"),
        (lambda p: (p / "complete.json").write_text("{"), "its complete.json is not one of a checkpoint"),
        (lambda p: (p / "complete.json").write_text('{"step": "2"}'), "its complete.json is not one of a checkpoint"),
        (record(lambda r: r.update(seed=10**30)), "its complete.json is not one of a checkpoint"),
        (record(lambda r: r.update(weights=[])), "its complete.json is not one of a checkpoint"),
        (record(lambda r: r.update(optimizer="sgd")), "it was trained with sgd, and this program has adam"),
        (record(lambda r: r["weights"].pop("fc1.bias")), "it is of another model: weight 'fc1.bias' is missing there"),
        (record(lambda r: r["weights"].update(w=[[3], "torch.float32"])), "weight 'w' is [[3], 'torch.float32'] there"),
        (unpickled(Evil()), "its metadata cannot be read: it names posix.system, which describes no tensor"),
        (
            record(lambda r: r["hyperparameters"].update(lr=0.5)),
            "it was trained with lr=0.5, and this program has lr=0.001",
        ),
        (record(lambda r: r.update(hyperparameters=None)), "its complete.json is not one of a checkpoint"),
        (record(lambda r: r.update(step=True)), "its complete.json is not one of a checkpoint"),
        (record(lambda r: r.update(step=2)), "its complete.json is not one of a checkpoint"),
        (lambda p: (p / "complete.json").write_text("[]"), "its complete.json is not one of a checkpoint"),
        (lambda p: (p / "complete.json").write_text("[" * 5000), "its complete.json is not one of a checkpoint"),
        (lambda p: os.truncate(p / "complete.json", 0), "its complete.json is not one of a checkpoint"),
        (imported("torch_evil", "int64"), "its metadata cannot be read: it names torch_evil.int64, which"),
        (imported("pathlib_evil", "uint8"), "its metadata cannot be read: it names pathlib_evil.uint8, which"),
        (imported("torchgen.utils", "int64"), "its metadata cannot be read: it names torchgen.utils.int64, which"),
        (unpickled(Sly()), "its metadata cannot be read: it names builtins.getattr, which describes no tensor"),
    ],
)
def test_a_checkpoint_that_is_not_right_is_refused(
    refusal: Callable[..., str], main: Main, tmp_path: Path, spoil: Spoil, message: str
):
    main("--steps", "1", "--save", str(tmp_path))
    spoil(tmp_path / "step_00000001")
    assert message in refusal("--load", str(tmp_path))
    assert not Path("/tmp/unity_evil").exists()


@pytest.mark.slow
def test_any_damage_to_any_file_is_refused(main: Main, ranks: Ranks, text: str, tmp_path: Path):
    flips = examples(60)
    main("--steps", "1", "--save", str(tmp_path))
    names = sorted(p.name for p in (tmp_path / "step_00000001").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "complete.json"]
    found = ranks.run(text, 2, damaged, str(tmp_path), 0, flips)
    assert [passed for _, passed in found] == [[], []]
    assert len(found[0][0]) > 4 * flips
    assert found[0] == found[1]
    assert not [line for line in found[0][0] if "\n" in line or "cannot load" not in line]


@pytest.mark.slow
def test_hyperparameters_are_the_checkpoint_s_unless_said(
    refusal: Callable[..., str], ranks: Ranks, text: str, main: Main, tmp_path: Path
):
    """A rate that is changed on purpose is named; the next checkpoint has the new one."""
    folder = str(tmp_path)
    main("--steps", "1", "--save", folder)
    other = text.replace("'lr': 0.001", "'lr': 0.5")
    assert other.count("0.5,") - text.count("0.5,") == 1
    options = ["--steps", "2", "--load", folder, "--save", folder]
    found = ranks.run(other, 2, refused, options, {})
    said = "trained with lr=0.001, and this program has lr=0.5; --changed lr goes on so\n"
    assert (found[0][1].endswith(said), found[1]) == (True, (1, ""))
    # Of another than the one that differs.
    assert ranks.run(other, 2, refused, [*options, "--changed", "eps"], {}) == found
    ranks.run(other, 2, run_main, [*options, "--changed", "lr"])
    assert "trained with lr=0.5, and this program has lr=0.001" in refusal("--load", folder)
    known = "--changed momentum: known are lr, beta1, beta2, eps, clip, groups, schedule"
    assert known in refusal("--load", folder, "--changed", "momentum")


def test_a_second_run_into_a_folder_is_refused(
    refusal: Callable[..., str], ranks: Ranks, text: str, main: Main, tmp_path: Path
):
    """Another process holds the lock; once it is killed, which leaves its file, the folder is free."""
    folder = tmp_path / "c"
    hold = (
        "import fcntl, pathlib, sys, time; path = pathlib.Path(sys.argv[1]); path.parent.mkdir(); "
        "file = open(path, 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('process 7 on elsewhere', file=file, flush=True); print(flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(folder / "lock")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        holder.stdout.readline()
        found = ranks.run(text, 2, refused, ["--steps", "1", "--save", str(folder)], {})
    finally:
        holder.kill()
        holder.communicate()
    said = "another run writes its checkpoints there (process 7 on elsewhere); wait for it, or save elsewhere"
    assert found == [(1, f"mlp: cannot save to {folder}: {said}\n"), (1, "")]
    (folder / "partial_step_00000009").mkdir()
    main("--steps", "1", "--save", str(folder))
    assert [p.name for p in folder.iterdir()] == ["step_00000001"]


def test_a_refused_run_leaves_no_folder(refusal: Callable[..., str], tmp_path: Path):
    refusal("--steps", "1", "--save", str(tmp_path / "c"), "--data", "no_such_module:f")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_newest_are_kept(main: Main, refusal: Callable[..., str], tmp_path: Path):
    main("--steps", "7", "--save", str(tmp_path), "--save-every", "2", "--keep", "2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000006", "step_00000007"]
    assert "--keep counts checkpoints of --save" in refusal("--steps", "1", "--keep", "2")


def test_a_full_disk_is_named_and_what_was_written_removed(ranks: Ranks, text: str, main: Main, tmp_path: Path):
    found = ranks.run(text, 2, full_disk, str(tmp_path))
    assert found == [f"cannot write {tmp_path / 'step_00000001'}: No space left on device"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_meant_is_refused(refusal: Callable[..., str], main: Main, tmp_path: Path):
    assert refusal("--load", str(tmp_path / "none")) == f"mlp: no complete checkpoint in {tmp_path / 'none'}"
    main("--steps", "1", "--save", str(tmp_path))
    assert "holds checkpoints of another run" in refusal("--steps", "1", "--save", str(tmp_path))
    assert "has seed 0, not 5; leave --seed out" in refusal("--load", str(tmp_path), "--seed", "5")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--weights-out", "--profile", "--save"])
def test_what_cannot_be_written_is_refused_before_the_training(ranks: Ranks, text: str, tmp_path: Path, option: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    if option == "--weights-out":
        # A folder takes weights, once.
        (tmp_path / "folder" / "model.safetensors").write_text("")
    wrong = tmp_path / ("file" if option == "--save" else "folder")
    for path in (wrong, tmp_path / "file" / "in" / "it", *([] if option == "--save" else [tmp_path / "no" / "f"])):
        # The data are looked at after it.
        options = ["--steps", "1", option, str(path), "--data", "no_such_module:f"]
        said, silent = ranks.run(text, 2, refused, options, {})
        assert (silent, said[0], said[1].count("\n")) == ((1, ""), 1, 1)
        assert said[1].startswith(f"mlp: cannot write {path}: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_seed_is_one_of_the_generators(ranks: Ranks, text: str):
    (code, written), *_ = ranks.run(text, 2, refused, ["--seed", str(10**20)], {})
    assert code == 1
    assert written.startswith("mlp: --seed is from")


@pytest.mark.slow
def test_what_has_done_more_steps_is_told(refusal: Callable[..., str], main: Main, tmp_path: Path):
    folder = str(tmp_path / "c")
    main("--steps", "2", "--save", folder)
    assert refusal("--load", folder, "--steps", "1") == (
        f"mlp: the run in {folder} has done 2 steps, more than the 1 of --steps"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--steps", "-1"], "--steps and --save-every count steps; --check takes at least one"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--check", "--load", "c", "--check-nan"], "--check trains nothing; leave out --load, --check-nan"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--backend", "mpi"], "argument --backend: invalid choice: 'mpi'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(ranks: Ranks, text: str, option: list[str], message: str):
    found = ranks.run(text, 2, refused, option, {})
    assert [code for code, _ in found] == [1, 1]
    assert found[1][1] == ""
    assert found[0][1].startswith(f"mlp: {message}")
    assert found[0][1].count("\n") == 1


def test_the_world_is_the_plan_s(ranks: Ranks, text: str):
    found = ranks.run(text, 3, refused, [], {})
    said = "mlp: this plan is for 2 ranks, not 3; run torchrun --nproc-per-node 2\n"
    assert found == [(1, said), (1, ""), (1, "")]


@pytest.mark.slow
def test_deterministic_runs_are_equal(main: Main, tmp_path: Path):
    for name in "ab":
        main("--steps", "2", "--deterministic", "--weights-out", str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--weights-out", "--profile"])
def test_what_is_written_into_stays_what_it_is(main: Main, tmp_path: Path, option: str):
    """A pipe is written into and a link followed; a new file has the mode of the umask, an old one keeps its own."""
    pipe, link, new, old = (tmp_path / name for name in ("pipe", "link", "new", "old"))
    os.mkfifo(pipe)
    old.write_text("before")
    old.chmod(0o640)
    link.symlink_to(old)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # What is written is less than the pipe holds.
        main("--steps", "1", option, str(pipe))
        through = os.read(reading, 1 << 20)
    finally:
        os.close(reading)
    main("--steps", "1", option, str(link))
    main("--steps", "1", option, str(new))
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert b"before" not in old.read_bytes()
    if option == "--weights-out":
        assert through == old.read_bytes() == new.read_bytes()
    mask = os.umask(0)
    os.umask(mask)
    assert [p.stat().st_mode & 0o777 for p in (old, new)] == [0o640, 0o666 & ~mask]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "new", "old", "pipe"]
