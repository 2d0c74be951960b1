"""Weights come from and go to folders as Hugging Face has them, from any plan and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_recipes
from ranks import Ranks, refused, run_main
from safetensors import safe_open
from safetensors.torch import load_file
from small_files import run_with_small_files
from torch import nn

import unity_ir as ui

FILE_BYTES = 20_000


@pytest.fixture(scope="module")
def model() -> tuple[nn.Module, Any]:
    """GPT-2, whose head is its table of embeddings."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, inputs, _ = torch_recipes.gpt2()
    return module, inputs


@pytest.fixture(scope="module")
def text(model: tuple[nn.Module, Any]) -> str:
    plan = ui.plan(*model, machine="box:2", search="fsdp")
    return plan.program_text(kernels="torch", optimizer="sgd", lr=0.1)


@pytest.fixture
def given(model: tuple[nn.Module, Any], tmp_path: Path) -> Path:
    """A folder of several files, with an index."""
    module: Any = model[0]
    module.save_pretrained(tmp_path / "given", max_shard_size=FILE_BYTES)
    assert (tmp_path / "given" / "model.safetensors.index.json").exists()
    return tmp_path / "given"


@pytest.mark.slow
def test_a_folder_comes_and_goes(ranks: Ranks, model: tuple[nn.Module, Any], text: str, given: Path, tmp_path: Path):
    out = tmp_path / "deep" / "out"
    start = ["--weights", str(given), "--steps", "2"]
    lines = ranks.run(text, 2, run_with_small_files, [*start, "--weights-out", f"{out}/"], FILE_BYTES)[0]
    assert lines == ranks.run(text, 2, run_main, [*start, "--weights-out", str(tmp_path / "one.safetensors")])[0]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(f.name for f in out.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    assert sorted({*index["weight_map"].values()}) == files
    found: dict[str, torch.Tensor] = {}
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    whole = load_file(tmp_path / "one.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[n], whole[n]) for n in whole)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    largest = 2 * max(x.nbytes for x in found.values())
    for name in files:
        assert sum(found[n].nbytes for n, file in index["weight_map"].items() if file == name) < FILE_BYTES + largest
    # transformers reads it, as its own.
    (out / "config.json").write_text((given / "config.json").read_text())
    again, loading = type(model[0]).from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    state = again.state_dict()
    assert all(torch.equal(state[n], whole[n]) for n in state)
    # What was written is what is read.
    read = ["--weights", str(out), "--steps", "0", "--weights-out", str(tmp_path / "read.safetensors")]
    ranks.run(text, 2, run_main, read)
    last = load_file(tmp_path / "read.safetensors")
    assert all(torch.equal(last[n], whole[n]) for n in whole)


@pytest.mark.slow
def test_a_folder_of_one_file_has_no_index(ranks: Ranks, text: str, given: Path, tmp_path: Path):
    (out := tmp_path / "out").mkdir()
    (out / "config.json").write_text("{}")
    ranks.run(text, 2, run_main, ["--weights", str(given), "--steps", "0", "--weights-out", str(out)])
    assert sorted(f.name for f in out.iterdir()) == ["config.json", "model.safetensors"]
    ranks.run(text, 2, run_main, ["--weights", str(out), "--steps", "0", "--weights-out", f"{tmp_path}/again/"])
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "again"))
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.slow
def test_wrong_folders_are_refused_in_a_line(ranks: Ranks, text: str, given: Path, tmp_path: Path):
    def said(*options: str) -> str:
        found = ranks.run(text, 2, refused, ["--steps", "1", *options], {})
        (written,) = {text for code, text in found if code == 1 and text}
        assert written.count("\n") == 1, written
        return written

    index = given / "model.safetensors.index.json"
    assert f"cannot write {given}: it has weights already, model-00001" in said("--weights-out", str(given))
    (empty := tmp_path / "empty").mkdir()
    assert f"cannot read {empty}: " in said("--weights", str(empty))
    whole = json.loads(index.read_text())
    for map in ({}, {**whole["weight_map"], "transformer.wte.weight": "other.safetensors"}, 3):
        index.write_text(json.dumps({"weight_map": map}))
        assert said("--weights", str(given))
    index.write_text("{")
    assert f"cannot read {given}: " in said("--weights", str(given))
