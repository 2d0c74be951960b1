"""Modules that run by plans in DTensors: loss, gradients and collectives, on 4 ranks, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parallelized
import pytest
from dtensor_models import FROZEN, MODELS, built
from extent import ALL
from ranks import Ranks
from torch_models import InDouble

import unity_ir as ui
from unity_ir.api.plans import Plan
from unity_ir.interop.dtensor.described import Record
from unity_ir.interop.dtensor.module import PlannedStep
from unity_ir.interop.expressible import DTENSOR, step_program

MACHINE = """
overhead = 0.0

[device]
name = "ideal"
flops = { f32 = 1e13, f64 = 1e13 }
memory_bandwidth = 1e12
memory = 16e9
launch = 0.0
efficiency = 0.7

[[levels]]
name = "node"
size = 2
bandwidth = 1e11
latency = 0.0

[[levels]]
name = "gpu"
size = GPUS
bandwidth = 4e11
latency = 0.0
"""
"""Devices for which nothing costs anything to start, so that even small models are worth dividing."""

PLANS: dict[str, dict[str, Any]] = {
    "data-parallel": {"search": "data-parallel"},
    "fsdp": {"search": "fsdp"},
    "megatron": {"degrees": "tp=2"},
    "joint": {"search": "joint"},
}
MORE: dict[str, dict[str, Any]] = {
    "zero-3": {"degrees": "zero=3"},
    "hsdp": {"degrees": "zero=2,shards=2"},
    "megatron-4": {"degrees": "tp=4"},
    "sequence": {"degrees": "tp=2,sp=true"},
    **{f"random-{seed}": {"search": f"random,seed={seed}"} for seed in range(6)},
}
REFUSED: dict[tuple[str, str], str] = {
    **{
        (model, "sequence"): "divides the sequence of attention, which this graph lacks"
        for model in ("perceptron", "moe", "resnet")
    },
    **{("resnet", f"random-{seed}"): "with a halo along dim" for seed in (0, 1, 2, 4)},
}
"""The cells that cannot exist, and what their messages say: docs/pytorch.md has the reasons."""

SAMPLE = [
    *(("perceptron", plan, 4) for plan in PLANS),
    ("resnet", "megatron", 4),
    ("perceptron", "random-4", 8),
    ("adapters", "fsdp", 4),
]
"""Cells of `make test`: most on 4 ranks, one on 2 x 2 x 2, where moves go along two of three mesh axes."""
EVERY = [
    *((model, plan, 4) for model in MODELS for plan in (*PLANS, *MORE)),
    *((model, plan, 4) for model in FROZEN for plan in PLANS),
    *((model, f"random-{seed}", 8) for model in ("perceptron", "moe") for seed in range(6)),
]
CASES = [cell for cell in (EVERY if ALL else SAMPLE) if cell[:2] not in REFUSED]

Planned = Callable[..., tuple[Plan, PlannedStep]]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The plan of a model by its name, and what ranks need of it, with constants as arrays."""
    folder = tmp_path_factory.mktemp("machines")

    def plan(model: str, by: str, world: int = 4) -> tuple[Plan, PlannedStep]:
        module, inputs, loss = built(model)
        machine = folder / f"ideal{world}.toml"
        machine.write_text(MACHINE.replace("GPUS", str(world // 2)))
        with InDouble():
            found = ui.plan(module, inputs, loss, machine=str(machine), **{**PLANS, **MORE}[by])
        assert found.imported is not None
        constants: Any = {n: x.numpy() for n, x in found.imported.tables.items()}
        program = step_program(found.graph, found.machine, DTENSOR)
        return found, PlannedStep(program, found.machine, found.imported.origin, constants)

    return plan


def on_gloo(record: Record, phase: str) -> dict[str, int]:
    """The collectives of a phase; on CPUs PyTorch gathers where it should send from all to all."""
    found: dict[str, int] = {}
    for each in record["redistributes"]:
        if each["phase"] == phase and (name := each["collective"]) is not None:
            name = "all_gather" if name == "all_to_all" else name
            found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "by", "world"), CASES)
def test_a_step_is_that_of_pytorch_and_sends_what_is_planned(
    ranks: Ranks, planned: Planned, model: str, by: str, world: int
):
    plan, step = planned(model, by, world)
    record = plan.placements()
    every = ranks.run("", world, parallelized.compared, model, step)
    for found in every:
        assert found["loss"] < 1e-13
        assert found["gradients"].keys() == {n for n, p in record["parameters"].items() if p["gradient"] is not None}
        assert max(found["gradients"].values()) < 1e-12, found["gradients"]
        assert all(off < 1e-12 for off in found["buffers"].values()), found["buffers"]
        assert found["counts"] == (on_gloo(record, "forward"), on_gloo(record, "backward"))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "by"), REFUSED if ALL else [("perceptron", "sequence"), ("resnet", "random-1")])
def test_cells_that_cannot_exist_are_refused_by_name(planned: Planned, model: str, by: str):
    with pytest.raises(ui.UnityError, match=REFUSED[model, by]):
        planned(model, by)


TRAINED = [
    ("resnet", "fsdp", (2, 2)),
    ("perceptron", "joint", None),
    ("moe", "data-parallel", (4,)),
    ("moe", "zero-3", (2, 1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "by", "shape"), TRAINED if ALL else TRAINED[:1])
def test_training_is_that_of_pytorch(
    ranks: Ranks, planned: Planned, model: str, by: str, shape: tuple[int, ...] | None
):
    _, step = planned(model, by)
    for found in ranks.run("", 4, parallelized.trained, model, step, shape):
        assert max(found.values()) < 1e-11, found


MESSAGES = {
    "mesh": "the mesh has dims 1 x 4 x 1; the plan needs node 2, gpu 2, outermost first",
    "module": "the module has no parameter '0.weight'; give the module that was planned",
    "dtype": "parameter 0.weight is [32, 16] torch.float32; the plan has [32, 16] torch.float64",
    "again": "parameter 0.weight is a DTensor already; give the module as it was planned",
    "few": "the batch has no 'input'; the plan reads input, target",
    "many": "the module takes input, target, in this order or by name",
    "unknown": "the plan reads no input 'other'; it reads input, target",
    "shape": "input input is [4, 16] torch.float64; the plan is of a whole batch, [8, 16] torch.float64",
    "kind": "input input is int; it must be a tensor",
    "targets": "the loss takes target",
    "placements": (
        "input input is in Replicate(), Replicate(); the plan reads it in Shard(dim=0), Replicate() on its mesh"
    ),
}


@pytest.mark.slow
def test_what_does_not_fit_a_plan_is_refused_on_all_ranks(ranks: Ranks, planned: Planned):
    _, step = planned("perceptron", "megatron")
    for found in ranks.run("", 4, parallelized.refused, "perceptron", step):
        assert found == {what: f"parallelize: {message}" for what, message in MESSAGES.items()}
    said = "the plan is for 4 devices, and there are 2 ranks; start as many, or plan for another machine"
    assert ranks.run("", 2, parallelized.of_too_few, "perceptron", step) == [f"parallelize: {said}"] * 2
