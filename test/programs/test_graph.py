"""Steps that are a CUDA graph, by a stand-in that records them on the CPU, are those that the host does one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import sample
from models import MODELS, machine
from ranks import Ranks, run_main
from recorded import captured, ended, held_gradients, run_as_graph, update_without_weights, which_change_weights
from zoo_plans import SIZES

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer, optimizer_of
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run


def text_of(where: str, optimizer: Optimizer, plan: str = "data-parallel", model: str = "mlp") -> str:
    """A program by Triton's kernels."""
    graph, on = MODELS[model][0](), machine(where)
    step = fuse_collectives(differentiate(run(graph, on, plan, optimizer).graph, optimizer, on.mesh))
    return emit(plan_step(lower(step, on), PlanOptions(kernels="triton")), graph).text


ADAMW = optimizer_of("test", "adamw", {"lr": 0.05, "clip": 1.0, "weight_decay": 0.1, "groups": "@vectors lr=0.01"})
SCHEDULE = ["--schedule", "cosine", "--warmup", "2"]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "plan", "optimizer"),
    [
        ("box:1", "data-parallel", ADAMW),
        ("ideal:2", "fsdp", ADAMW),
        ("ideal:2", "data-parallel", Optimizer("momentum", 0.1)),
        ("box:1", "data-parallel", Optimizer("lion", 1e-3)),
    ],
)
def test_a_run_is_the_same(ranks: Ranks, where: str, plan: str, optimizer: Optimizer, tmp_path: Path):
    text, world = text_of(where, optimizer, plan), machine(where).devices
    log = tmp_path / "log.jsonl"
    plain = ranks.run(text, world, run_main, [*SCHEDULE, "--steps", "7", "--log", str(log)])[0]
    records = log.read_text()
    log.unlink()
    lines, replays = ranks.run(text, world, run_as_graph, [*SCHEDULE, "--steps", "7", "--log", str(log)])[0]
    assert replays == [4]
    assert lines == plain
    for before, after in zip(records.splitlines(), log.read_text().splitlines(), strict=True):
        for key in {"step", "loss", "learning_rate", "gradient_norm"} & json.loads(before).keys():
            assert json.loads(before)[key] == pytest.approx(json.loads(after)[key], rel=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("model", sample(["gpt2", "moe", "dlrm", "bert_large"], 2))
def test_models_have_nothing_that_waits(ranks: Ranks, model: str):
    """In mixed precision: attention, experts, and gradients of tables, by Triton's kernels."""
    sizes = SIZES[model] | {"batch": 2} | ({"layers": 1} if "layers" in SIZES[model] else {})
    graph, on = mixed_precision(build(model, **sizes), "bf16"), machine("ideal:1")
    step = fuse_collectives(differentiate(run(graph, on, "data-parallel", ADAMW).graph, ADAMW, on.mesh))
    text = emit(plan_step(lower(step, on), PlanOptions(kernels="triton")), graph).text
    plain = ranks.run(text, 1, run_main, ["--steps", "5"])[0]
    assert ranks.run(text, 1, run_as_graph, ["--steps", "5"])[0] == (plain, [2])


@pytest.mark.slow
def test_the_update_holds_no_gradients_and_needs_no_weights(ranks: Ranks):
    text = text_of("box:1", ADAMW)
    assert ranks.run(text, 1, held_gradients) == [[]]
    ranks.run(text, 1, update_without_weights)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_no_step_counts_after_one_that_ends_the_run(ranks: Ranks, clip: float):
    """The host learns of an infinite loss a step late, and does the step again, with the weights it had."""
    text = text_of("box:1", Optimizer("adam", 0.05, clip=clip))
    assert ranks.run(text, 1, which_change_weights, [1.0, float("inf"), 1.0, 1.0])[0] == [True, False, False, False]


BATCHES = """
import numpy

def batch(t):
    x = numpy.random.default_rng(t).standard_normal((24, 16)).astype("float32")
    return {{"{x}": x * (numpy.nan if t in {spoiled} else 1), "{y}": numpy.arange(24) % 12}}
"""


def batches(folder: Path, spoiled: tuple[int, ...]) -> list[str]:
    """Write a function that makes batches, some with a nan; the options that have a program call it."""
    x, y = (node.name for node in MODELS["mlp"][0]().inputs)
    name = "_".join(map(str, ("spoiled", *spoiled)))
    (folder / f"{name}.py").write_text(BATCHES.format(x=x, y=y, spoiled=(*spoiled, -1)))
    return ["--data", f"{name}:batch"]


@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped(ranks: Ranks, tmp_path: Path):
    """Before there is a graph, and after; so is what a checkpoint says of them, from which a run without goes on."""
    text, given = text_of("box:1", ADAMW), batches(tmp_path, (1, 4, 5, 8))
    plain = ranks.run(text, 1, run_main, [*given, "--steps", "10"], None, str(tmp_path))[0]
    assert [line.endswith("step skipped") for line in plain] == [t in (1, 4, 5, 8) for t in range(10)]
    options = [*given, "--save", str(tmp_path / "saved"), "--save-every", "3", "--steps"]
    lines, replays = ranks.run(text, 1, run_as_graph, [*options, "6"], str(tmp_path))[0]
    assert (lines, replays) == (plain[:6], [3])
    load = ["--load", str(tmp_path / "saved")]
    assert ranks.run(text, 1, run_main, [*options, "10", *load], None, str(tmp_path))[0] == plain[6:]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("first", [2, 6])
def test_a_run_that_cannot_go_on_ends_as_without_a_graph(ranks: Ranks, tmp_path: Path, clip: float, first: int):
    text, given = text_of("box:1", Optimizer("adam", 0.05, clip=clip)), batches(tmp_path, tuple(range(first, 30)))
    options = [*given, "--steps", "30"]
    code, said, lines = ranks.run(text, 1, ended, options, str(tmp_path))[0]
    assert (code, said) == ranks.run(text, 1, ended, options, str(tmp_path), False)[0][:2]
    assert code == 1
    assert "loss nan; first input 'x' is nan, on rank 0; --check-nan finds the step that made it" in said
    assert len(lines) == first + (9 if clip else 0)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["float(loss)", "loss.tolist()", "torch.tensor(1.0)"])
def test_a_step_that_waits_for_the_device_is_no_graph(ranks: Ranks, tmp_path: Path, wrong: str):
    text = text_of("box:1", ADAMW)
    plain = ranks.run(text, 1, run_main, ["--steps", "6"])[0]
    before = "        self.done.add_(self.live)\n"
    assert text.count(before) == 1
    code, said, lines = ranks.run(text.replace(before, f"        {wrong}\n{before}"), 1, ended, ["--steps", "6"], ".")[
        0
    ]
    assert (code, said.count("\n")) == (0, 1)
    assert "mlp: steps are no CUDA graph: " in said
    assert "operation not permitted when stream is capturing" in said
    assert [line.partition("  ")[0] for line in lines] == [line.partition("  ")[0] for line in plain]


@pytest.mark.slow
def test_who_imports_a_program_can_do_its_steps(ranks: Ranks):
    losses, wanted = ranks.run(text_of("box:1", ADAMW), 1, captured, 5)[0]
    assert losses == wanted
    assert len(set(losses)) == 5


MUTANTS = {
    "the rate is the host's": ("self.done, self.rate, scale", "self.done, RATE[0], scale"),
    "the number of the step is the host's": ("self.done, self.rate, scale", "self.steps + 1, self.rate, scale"),
    "batches are those of the first step": ("self.local[name].copy_(x, non_blocking=True)", "pass"),
    "gradients are not scaled": ("self.rate, scale, self.live)", "self.rate, 1.0, self.live)"),
    "steps are not skipped": ("self.rate, scale, self.live)", "self.rate, scale)"),
    "skipped steps count": ("        self.done.add_(self.live)\n", "        self.done.add_(1.0)\n"),
}


@pytest.mark.slow
def test_mutants_are_told(ranks: Ranks, tmp_path: Path):
    text, options = text_of("box:1", ADAMW), [*batches(tmp_path, (4,)), *SCHEDULE, "--steps", "8"]
    text = text.replace("        self.rate.fill_(rate)\n", "        self.rate.fill_(rate)\n        RATE[:] = [rate]\n")
    text = text.replace("class StepGraph:", "RATE = [1.0]\n\n\nclass StepGraph:")
    plain = ranks.run(text, 1, run_main, options, None, str(tmp_path))[0]
    assert ranks.run(text, 1, run_as_graph, options, str(tmp_path))[0] == (plain, [5])
    for what, (before, after) in MUTANTS.items():
        assert text.count(before) == 1, what
        assert ranks.run(text.replace(before, after), 1, run_as_graph, options, str(tmp_path))[0][0] != plain, what
