"""A plan's step on one rank: it trains as PyTorch does, its state goes in and out, and it leaves nothing behind."""

from __future__ import annotations

import copy
import linecache
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unity_ir as ui


class Net(nn.Module):
    """A tied weight, running statistics, dropout, a frozen layer, and a constant of a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", torch.tensor([0.5, 2.0]), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        turned = torch.outer(torch.arange(3.0), self.angles)
        x = self.table(ids) * torch.cat([turned.cos(), turned.sin()], 1)
        x = self.norm(self.frozen(x).flatten(0, 1))
        return self.head(self.drop(x))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels.flatten())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 8, (2, 4, 3), generator=torch.Generator().manual_seed(seed))
    return drawn[0], drawn[1]


@pytest.fixture(scope="module")
def module() -> Net:
    torch.manual_seed(0)
    made = Net()
    made.drop.p = 0.0  # its mask is the program's own
    return made


@pytest.fixture(scope="module")
def plan(module: Net) -> ui.Plan:
    return ui.plan(module, batch(0), loss, machine="box:1", search="data-parallel", optimizer="adamw")


@pytest.fixture
def step(plan: ui.Plan) -> Iterator[ui.Step]:
    with plan.program(lr=0.01, weight_decay=0.1, clip=0.5) as made:
        yield made


def test_the_average_is_pytorchs(plan: ui.Plan, module: Net, tmp_path: Path):
    net = copy.deepcopy(module).train()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    with plan.program(lr=0.01, weight_decay=0.1, ema=0.8) as step:
        assert all(torch.equal(value, module.state_dict()[n]) for n, value in step.state_dict(average=True).items())
        for t in range(3):
            step(batch(t))
            optimizer.zero_grad()
            loss(net(batch(t)[0]), batch(t)[1]).backward()
            optimizer.step()
            averaged.update_parameters(net)
        found, path = step.state_dict(average=True), tmp_path / "average.safetensors"
        for n, wanted in averaged.module.named_parameters():
            torch.testing.assert_close(found[n], wanted.detach(), rtol=1e-5, atol=1e-6)
            assert n.startswith("frozen") or not torch.equal(found[n], step.state_dict()[n])
        net.load_state_dict(found)
        want = loss(net.eval()(batch(5)[0]), batch(5)[1])
        assert step.evaluate(batch(5), average=True).item() == pytest.approx(want.item(), rel=1e-5)
        assert step.evaluate(batch(5)).item() != step.evaluate(batch(5), average=True).item()
        step.save_weights(path, average=True)
        assert all(torch.equal(value, found[n]) for n, value in load_file(path).items())
        step.save(tmp_path / "saved")
    with plan.program(lr=0.01, weight_decay=0.1, ema=0.8) as step:
        step.load(tmp_path / "saved")
        assert all(torch.equal(value, found[n]) for n, value in step.state_dict(average=True).items())


def test_an_average_begins_as_the_weights_of_a_checkpoint_without(plan: ui.Plan, tmp_path: Path):
    with plan.program(lr=0.01) as step:
        for t in range(2):
            step(batch(t))
        step.save(tmp_path)
        want = step.state_dict()
    with plan.program(lr=0.01, ema=0.8) as step:
        step.load(tmp_path, changed=("ema",))
        assert all(torch.equal(value, want[n]) for n, value in step.state_dict(average=True).items())
        step(batch(2))
        found, now = step.state_dict(average=True)["table.weight"], step.state_dict()["table.weight"]
        torch.testing.assert_close(found, 0.8 * want["table.weight"] + 0.2 * now)
    with plan.program(lr=0.01) as step:
        assert step.load(tmp_path) == 2


def test_without_an_average_none_is_shown(step: ui.Step):
    for call in (lambda: step.evaluate(batch(0), average=True), lambda: step.state_dict(average=True)):
        with pytest.raises(ui.UnityError, match=r"^average: the program keeps none of its weights; make it with ema"):
            call()


def test_steps_and_their_state_are_those_of_pytorch(step: ui.Step, module: Net):
    net = copy.deepcopy(module).train()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    assert (step.lr, step.steps, step.norm, step.rank, step.device.type) == (0.01, 0, None, 0, "cpu")
    for t, rate in enumerate((0.01, 0.02, 0.0)):
        step.lr = optimizer.param_groups[0]["lr"] = rate
        want = loss(net(batch(t)[0]), batch(t)[1])
        optimizer.zero_grad()
        want.backward()
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        found = step(batch(t) if t else dict(zip(("ids", "labels"), batch(t), strict=True)))
        assert found.item() == pytest.approx(want.item(), rel=1e-5)
        assert step.norm == pytest.approx(norm.item(), rel=1e-5)
        assert (step.lr, step.steps) == (rate, t + 1)
    state = step.state_dict()
    assert state.keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)
    net.load_state_dict(state)
    net.eval()
    with torch.no_grad():
        assert step.evaluate(batch(9)).item() == pytest.approx(loss(net(batch(9)[0]), batch(9)[1]).item(), rel=1e-5)


def test_evaluation_changes_nothing(step: ui.Step):
    step(batch(0))
    before, random = step.state_dict(), torch.get_rng_state()
    first = step.evaluate(batch(1))
    assert torch.equal(step.evaluate(batch(1)), first)
    assert all(torch.equal(x, before[name]) for name, x in step.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.slow
def test_weights_come_from_a_module_a_state_dict_or_a_file(plan: ui.Plan, module: Net, tmp_path: Path):
    plan.save_weights(tmp_path / "w.safetensors")
    plan.save(tmp_path / "plan.pcg")
    other = copy.deepcopy(module)
    nn.init.normal_(other.table.weight)
    with plan.program() as step:
        first = step.evaluate(batch(0))
        step.load_state_dict(other.state_dict())
        changed = step.evaluate(batch(0))
    assert not torch.equal(first, changed)
    with plan.program(other) as step:
        assert torch.equal(step.evaluate(batch(0)), changed)
    with plan.program(other.state_dict()) as step:
        assert torch.equal(step.evaluate(batch(0)), changed)
    with ui.load(tmp_path / "plan.pcg").program(tmp_path / "w.safetensors") as step:
        assert torch.equal(step.evaluate(batch(0)), first)


def test_a_run_that_goes_on_from_a_checkpoint_is_one_that_never_stopped(plan: ui.Plan, tmp_path: Path):
    with plan.program(lr=0.01) as step:
        for t in range(3):
            step(batch(t))
            step.save(tmp_path / "c", keep=2)
        want = [step(batch(t)).item() for t in (3, 4)], step.evaluate(batch(5)).item()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_00000002", "step_00000003"]
    with plan.program(lr=0.01) as step:
        step(batch(7))
        assert step.load(tmp_path / "c") == step.steps == 3
        assert ([step(batch(t)).item() for t in (3, 4)], step.evaluate(batch(5)).item()) == want


def test_a_step_without_a_finite_gradient_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    plan = ui.plan(model, torch.ones(2, 4), lambda y: y.square().mean(), machine="box:1", search="data-parallel")
    with plan.program(lr=0.1, clip=1.0) as step:
        before = step.state_dict()
        step(torch.full((2, 4), torch.inf))
        assert (step.steps, step.skipped) == (1, 1)
        assert torch.equal(step.state_dict()["0.weight"], before["0.weight"])
        step(torch.ones(2, 4))
        assert (step.steps, step.skipped) == (2, 1)
        assert not torch.equal(step.state_dict()["0.weight"], before["0.weight"])


def test_a_model_of_the_zoo_starts_from_random_weights_by_its_seed():
    sizes = {"batch": 8, "hidden": 16, "layers": 2, "classes": 4}
    plan = ui.plan("mlp", machine="box:1", search="data-parallel", **sizes)
    states: list[dict[str, torch.Tensor]] = []
    for seed in (0, 0, 1):
        with plan.program(seed=seed) as step:
            states.append(step.state_dict())
    name = next(iter(states[0]))
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


WRONG: dict[str, Callable[[ui.Step], Any]] = {
    "Net: batch: it has 1 tensors; it must have ids, labels": lambda step: step(batch(0)[0]),
    "Net: batch: it has no 'labels'; it must have ids, labels": lambda step: step({"ids": batch(0)[0]}),
    "Net: batch(0): ids is [3, 3]; a batch is [4, 3]": lambda step: step((batch(0)[0][:3], batch(0)[1])),
    "Net: batch(0): ids is torch.float32; it must convert to": lambda step: step((torch.ones(4, 3), batch(0)[1])),
    "Net: batch(0): labels has values outside 0 to 7": lambda step: step((batch(0)[0], batch(0)[1] + 8)),
    "Net: state dict: it has no weight 'table.weight'": lambda step: step.load_state_dict({}),
    "Net: no complete checkpoint in /no": lambda step: step.load("/no"),
    "Net: cannot save to /dev/null/c: Not a directory": lambda step: step.save("/dev/null/c"),
    "step: lr is -1; it must be a number from 0": lambda step: setattr(step, "lr", -1),
}


def test_what_is_wrong_is_an_error_and_the_step_goes_on(step: ui.Step):
    first = step.evaluate(batch(0))
    for said, call in WRONG.items():
        with pytest.raises(ui.UnityError) as error:
            call(step)
        assert str(error.value).startswith(said)
    state = {**step.state_dict(), "norm.weight": torch.ones(5)}
    with pytest.raises(ui.UnityError, match=r"^Net: state dict: norm.weight is \[5\], torch.float32; it must be \[4\]"):
        step.load_state_dict({name: x * 2 if x.is_floating_point() else x for name, x in state.items()})
    assert torch.equal(step.evaluate(batch(0)), first), "a state dict that does not fit changes nothing"


@pytest.mark.slow
def test_what_cannot_start_is_an_error_and_leaves_no_ranks(plan: ui.Plan, module: Net, tmp_path: Path):
    plan.save(tmp_path / "plan.pcg")
    loaded = ui.load(tmp_path / "plan.pcg")
    two = ui.plan(module, batch(0), loss, machine="box:2", search="fsdp")
    for call, said in (
        (lambda: loaded.program(), "Net: the model was imported with weights; give a module"),
        (lambda: loaded.program(module), "Net: the model has a constant 'constant.0', which the weights do not have"),
        (lambda: loaded.program({}), "Net: weights: it has no weight 'table.weight'"),
        (lambda: plan.program("/no.safetensors"), "Net: cannot read /no.safetensors: "),
        (lambda: plan.program(backend="mpi"), "program: backend is 'mpi'; it must be nccl or gloo"),
        (lambda: plan.program(rate=1), "emit: triton has no argument rate"),
        (lambda: two.program(), "Net: this plan is for 2 ranks, not 1; run torchrun --nproc-per-node 2"),
    ):
        with pytest.raises(ui.UnityError) as error:
            call()
        assert str(error.value).startswith(said)
        assert not dist.is_initialized()


def test_a_step_leaves_nothing_behind(plan: ui.Plan):
    def everything() -> list[Any]:
        torch_wide = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        programs = [file for file in linecache.cache if file.startswith("<unity-ir")]
        return [dict(os.environ), threading.active_count(), torch_wide, programs, dist.is_initialized()]

    before = everything()
    step = plan.program()
    step(batch(0))
    step.close()
    step.close()
    assert everything() == before
    with pytest.raises(ui.UnityError, match="step: it is closed"):
        step(batch(0))


def test_a_program_without_a_forward_cannot_evaluate(plan: ui.Plan):
    with (
        plan.program(evaluate=False) as step,
        pytest.raises(ui.UnityError, match="evaluate: the program has no forward alone; make it with evaluate=True"),
    ):
        step.evaluate(batch(0))
