"""A script with a loop of its own trains by a plan as it does in plain PyTorch, on several ranks."""

from __future__ import annotations

import ast
import subprocess
import sys
from difflib import ndiff
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extent import ALL, sample
from ranks import Ranks, of_step, own_loop
from torch import nn

import unity_ir as ui
from unity_ir.api.step import Model

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"lr": 3e-3, "weight_decay": 0.1, "clip": 1.0}


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import own_loop as found

        return found


def model_of(plan: ui.Plan, **options: Any) -> Model:
    """Return the model that `Plan.program` hands to all ranks, without weights."""
    inputs = tuple(node.name for node in plan.graph.inputs)
    return Model(plan.name, inputs, plan.program_text(kernels="torch", evaluate=True, **options), None)


def code(file: str) -> list[str]:
    """The lines of a script but for its docstring and empty ones."""
    lines = (EXAMPLES / file).read_text().splitlines()
    first = ast.parse("\n".join(lines)).body[0].end_lineno
    return [line for line in lines[first:] if line.strip()]


def test_a_script_takes_a_plan_in_ten_lines():
    changed = [line for line in ndiff(code("own_loop.py"), code("own_loop_planned.py")) if line.startswith("+ ")]
    assert 0 < len(changed) <= 10


WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"machine": "box:2", "search": "fsdp"},
    "tensor parallel": {"machine": "box:4", "degrees": "tp=2,dp=2,zero=1", "micro_batches": 2},
    "stages": {"machine": "box:4", "search": "data-parallel", "stages": 2, "micro_batches": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", sample([*WAYS.values()], len(WAYS)), ids=sample([*WAYS], len(WAYS)))
def test_losses_and_weights_are_those_of_plain_pytorch(ranks: Ranks, script: Any, how: dict[str, Any]):
    ids = torch.from_numpy(script.text())
    plan = ui.plan(script.CharGPT(), next(script.batches(ids, 0)), optimizer="adamw", **how)
    steps, world = script.EVERY, plan.stats.devices
    model = model_of(plan, **OPTIONS)
    want, weights = script.train(steps)
    for losses, state in ranks.run("", world, own_loop, str(EXAMPLES), model, OPTIONS, steps):
        assert len(losses) == steps + 1
        assert losses == pytest.approx(want, rel=1e-5)
        assert state.keys() == weights.keys()
        for name, value in weights.items():
            np.testing.assert_allclose(state[name], value.detach().numpy(), atol=2e-4, err_msg=name)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).square().mean()


@pytest.mark.slow
def test_ranks_that_have_joined_train_save_go_on_and_refuse_alike(ranks: Ranks, tmp_path: Path):
    torch.manual_seed(0)
    module = Line()
    plan = ui.plan(module, torch.ones(8, 4), machine="box:2", search="fsdp", optimizer="adam")
    weights = {name: x.numpy().copy() for name, x in module.state_dict().items()}
    one, other = ranks.run("", 2, of_step, model_of(plan, lr=0.01), weights, str(tmp_path / "checkpoints"))
    assert one["losses"] == other["losses"]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 8, 4))).float()
    for x, found in zip(rows, one["losses"], strict=True):
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-6)
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(one["state"][name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert one["steps"] == (3, 3)
    assert one["again"] == one["next"]
    assert one["said"] == other["said"]
    assert [said.partition(";")[0] for said in one["said"]] == [
        "Line: batch: ranks 0 and 1 have different ones",
        "Line: the ranks have different plans",
        "Line: this plan is for 7 ranks, not 2",
    ]


@pytest.mark.skipif(not ALL, reason="a schedule of its own: make zoo")
def test_a_pipeline_that_never_drains_goes_on_with_both_versions_of_its_weights(ranks: Ranks, tmp_path: Path):
    torch.manual_seed(0)
    module = Line()
    how: dict[str, Any] = {"search": "data-parallel", "stages": 2, "micro_batches": 2, "schedule": "2bw"}
    plan = ui.plan(module, torch.ones(8, 4), machine="box:2", **how)
    weights = {name: x.numpy().copy() for name, x in module.state_dict().items()}
    one, _ = ranks.run("", 2, of_step, model_of(plan, lr=0.05), weights, str(tmp_path / "checkpoints"))
    assert one["again"] == one["next"]


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="processes of their own: make zoo")
def test_the_script_runs_under_torchrun(tmp_path: Path):
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    command.append(str(EXAMPLES / "own_loop_planned.py"))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 24
    assert torch.load(tmp_path / "char_gpt.pt").keys()
