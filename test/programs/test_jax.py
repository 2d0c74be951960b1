"""Steps of plans in JAX on CPU devices: loss, gradients and collectives are those of PyTorch and of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import in_jax
import pytest
from case import Case
from dtensor_models import COUNTED, FROZEN, MODELS, built
from extent import ALL, examples, sample
from hypothesis import Phase, given, seed, settings
from in_jax import Apart, Planned
from operator_cases import CASES
from test_dtensor import MACHINE, MORE, PLANS
from torch_models import InDouble

import unity_ir as ui
from unity_ir.interop.expressible import JAX, step_program
from unity_ir.pcg.collectives import BETWEEN_DEVICES
from unity_ir.pcg.sharding import SUM
from unity_ir.plan.instructions import HaloExchange, ReshardMove
from unity_ir.plan.program import Program

pytest.importorskip("jax")

REFUSED: dict[tuple[str, str], str] = {
    (model, "sequence"): "divides the sequence of attention, which this graph lacks"
    for model in ("perceptron", "moe", "resnet")
}
"""The cells that cannot exist, and what their messages say."""

Cell = tuple[str, str, int, dict[str, Any]]
"""A model, a plan, the number of devices, and further options of the plan."""

SAMPLE: list[Cell] = [
    ("perceptron", "joint", 4, {}),
    ("perceptron", "random-4", 8, {}),
    ("perceptron", "megatron", 4, {"micro_batches": 2}),
    ("moe", "megatron", 4, {}),
    ("adapters", "fsdp", 4, {}),
    ("resnet", "random-1", 4, {}),
    ("ignored labels", "joint", 4, {"micro_batches": 2}),
]
"""Cells of `make test`: one on 2 x 2 x 2 devices, one with micro-batches, one with halos."""
EVERY: list[Cell] = [
    *((model, plan, 4, {}) for model in MODELS for plan in (*PLANS, *MORE) if (model, plan) not in REFUSED),
    *((model, f"random-{seed}", 8, {}) for model in ("perceptron", "moe") for seed in range(6)),
    # A batch norm is of the whole batch, which micro-batches divide.
    *(
        (model, plan, 4, {"micro_batches": 2})
        for model in MODELS
        for plan in ("fsdp", "megatron", "zero-3", "joint")
        if model != "resnet"
    ),
    *(
        (model, plan, 4, {"micro_batches": count})
        for model in COUNTED
        for plan in (*PLANS, "random-0", "random-1")
        for count in (1, 2)
    ),
    *((model, plan, 4, {}) for model in FROZEN for plan in PLANS),
]
CELLS = EVERY if ALL else SAMPLE


def name_of(cell: Cell) -> str:
    model, by, world, more = cell
    return "-".join([model, by, str(world), *(f"{name}{value}" for name, value in more.items())])


MakePlan = Callable[..., Planned]


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    process = Apart()
    yield process
    process.close()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> MakePlan:
    folder = tmp_path_factory.mktemp("machines")

    def plan(model: str, by: str, world: int = 4, **options: Any) -> Planned:
        module, inputs, loss = built(model)
        machine = folder / f"ideal{world}.toml"
        machine.write_text(MACHINE.replace("GPUS", str(world // 2)))
        with InDouble():
            found = ui.plan(module, inputs, loss, machine=str(machine), **{**PLANS, **MORE}[by], **options)
        assert found.imported is not None
        tables = {n: x.numpy() for n, x in found.imported.tables.items()}
        return Planned(step_program(found.graph, found.machine, JAX), found.machine, tables)

    return plan


def collectives(program: Program) -> dict[str, int]:
    """The collectives of a program by kind, but for halos; a loss in partial sums is added up at the end."""
    moves = (i.kind for i in program.body if isinstance(i, ReshardMove) and i.kind in BETWEEN_DEVICES)
    found = Counter(moves)
    if SUM in program.tensors[program.outputs[0]].layout[: program.axes]:
        found["all_reduce"] += 1
    return dict(found)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_step_is_that_of_pytorch_and_sends_what_is_planned(apart: Apart, planned: MakePlan, cell: Cell):
    model, by, world, more = cell
    plan = planned(model, by, world, **more)
    found = apart.run(in_jax.compared, model, plan, "manual")
    assert found["loss"] < 1e-13
    assert found["missing"] == []
    assert max(found["gradients"].values()) < 1e-12, found["gradients"]
    assert all(off < 1e-12 for off in found["buffers"].values()), found["buffers"]
    assert found["placed"]
    lowered, compiled = found["counts"]
    # XLA leaves out a gather that makes what is there already: of a replica's own shard, as random layouts have it, or
    # one that repeats another, as ZeRO-3's, which it does not keep apart on CPUs.
    assert all(n <= lowered[kind] for kind, n in compiled.items())
    assert by not in PLANS or compiled == lowered
    messages = lowered.pop("collective_permute", 0)
    assert bool(messages) == any(isinstance(i, HaloExchange) for i in plan.program.body)
    assert lowered == collectives(plan.program)


LOSSES = {
    "perceptron": [{"search": "joint"}, {"degrees": "tp=2,dp=2"}],
    "gpt": [{"search": "fsdp", "micro_batches": 2}, {"degrees": "tp=2,dp=2,zero=3"}],
    "llama": [
        {"degrees": "tp=2,dp=2,sp=true"},
        {"degrees": "tp=2,dp=2,zero=3", "recompute": "block", "micro_batches": 2},
    ],
    "mixture": [{"search": "data-parallel"}],
    "convolutional": [{"search": "fsdp"}],
    "indexed": [{"search": "data-parallel"}],
}
"""Losses of JAX (`jax_models`) with options to plan them by; the first two run in `make test`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES if ALL else [*LOSSES][:1])
def test_a_loss_of_jax_is_planned_and_stepped(apart: Apart, name: str):
    for options in LOSSES[name] if ALL else LOSSES[name][:1]:
        found = apart.run(in_jax.stepped_loss, name, options)
        # JAX's own attention has its softmax in float32.
        close = 1e-6 if name == "llama" else 1e-12
        assert found["loss"] < close
        assert max(found["gradients"]) < close
        assert found["trained"] < close
        assert found["alike"]


@pytest.mark.slow
def test_weights_that_are_stacked_or_integers(apart: Apart):
    found = apart.run(in_jax.unusual_weights)
    assert found["counts"].tolist() == [0, 0, 0, 0]
    assert found["number"] == "jax: layers.0 and its like are 1; the plan has 3"
    assert found["shape"] == "jax: layers.0 is only a shape; give an array"


@pytest.mark.slow
def test_a_loss_of_jax_is_trained_by_a_program_of_pytorch(apart: Apart):
    off, message = apart.run(in_jax.in_program)
    assert off < 1e-6
    assert message == "loss: weights: it has no weight 'w'"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS if ALL else ["perceptron"])
@pytest.mark.parametrize("by", PLANS if ALL else ["joint"])
def test_annotations_compute_the_same(apart: Apart, planned: MakePlan, model: str, by: str):
    found = apart.run(in_jax.compared, model, planned(model, by), "annotated")
    assert found["loss"] < 1e-13
    assert max(found["gradients"].values()) < 1e-12, found["gradients"]
    assert found["counts"][0] == {}
    assert found["counts"][1]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", sample(list(CASES), 14))
def test_every_operator_is_its_reference(apart: Apart, name: str):
    @seed(0)
    @settings(max_examples=examples(10), phases=[Phase.generate], database=None)
    @given(CASES[name])
    def run(case: Case):
        apart.run(in_jax.by_evaluation, name, case)

    run()


TRAINED = [("resnet", "fsdp"), ("perceptron", "megatron"), ("moe", "zero-3")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "by"), TRAINED if ALL else TRAINED[:1])
def test_training_is_that_of_pytorch(apart: Apart, planned: MakePlan, model: str, by: str):
    found = apart.run(in_jax.trained, model, planned(model, by))
    assert max(found.values()) < 1e-11, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "micro_batches"), [("perceptron", 2), pytest.param("llama", 1, marks=pytest.mark.zoo)]
)
def test_a_step_can_be_traced(apart: Apart, planned: MakePlan, model: str, micro_batches: int):
    """With micro-batches, and with tables of the model, which the step keeps."""
    plan = planned(model, "megatron", micro_batches=micro_batches)
    assert bool(plan.tables) == (model == "llama")
    found = apart.run(in_jax.jitted, model, plan)
    assert max(found.values()) < 1e-13, found


SEQUENCES = {"batch": 8, "sequence": 8, "hidden": 16, "layers": 1, "vocabulary": 16, "heads": 4}
LLAMA = {**SEQUENCES, "kv_heads": 2, "intermediate": 16}
IN_BF16: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt2", "zero=2", SEQUENCES),
    ("llama3_8b", "tp=2,dp=4,zero=1", LLAMA),
    ("moe", "zero=2", {**LLAMA, "experts": 4, "chosen": 2, "dispatch": "sparse"}),
]


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize(("model", "degrees", "sizes"), IN_BF16 if ALL else IN_BF16[:1])
def test_mixed_precision_rounds_once(apart: Apart, model: str, degrees: str, sizes: dict[str, Any]):
    """Losses and gradients are those of float32, to what bf16 holds: 8 bits, of sums of up to 32 products."""
    plans = [ui.plan(model, machine="dgx-h100:1", degrees=degrees, precision=p, **sizes) for p in (None, "bf16")]
    found = apart.run(in_jax.in_halves, "// -----".join(p.text for p in plans))
    assert found["loss"] < 0.01
    assert max(found.values()) < 0.05, found
    assert max(found.values()) > 1e-5


MESSAGES = {
    "few": "the batch has no 'input'; the plan reads input, target",
    "weights": "the weights have no '0.weight'; the plan reads 0.weight, ",
    "unknown": "the plan reads no input 'other'; it reads input, target",
    "shape": "input is [4, 16]; the plan has [8, 16]",
    "numbers": "target is of float64; the plan reads int64",
    "text for mesh": "mesh is of str; give a jax.sharding.Mesh with the plan's dims",
    "no devices": "an abstract mesh has no devices to run on; lower the step, or give a Mesh",
    "no platform": "an abstract mesh is of no platform; name it: cuda, rocm, tpu, cpu",
    "list": "batch of list; give a dict of arrays by name",
    "ragged": "target is no array: ",
    "text": "target is of <U1; the plan reads int64",
    "platform": "platform=gpu: must be cuda, rocm, tpu or cpu",
    "mesh": "the mesh has dims a 4, b 1; the plan needs node 2, gpu 2, outermost first",
}


@pytest.mark.slow
def test_what_does_not_fit_a_plan_is_refused(apart: Apart, planned: MakePlan):
    found = apart.run(in_jax.refused, "perceptron", planned("perceptron", "megatron"))
    assert found.keys() == MESSAGES.keys()
    for what, message in MESSAGES.items():
        assert found[what].startswith(f"jax: {message}"), found[what]
