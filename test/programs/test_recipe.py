"""
What training does around a step is what PyTorch does: `clip_grad_norm_`, schedules of `lr_scheduler`, parameter groups;
steps that are not finite are skipped; a run goes on in the middle of its schedule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import MODELS, machine
from ranks import Ranks, check, refused, run_main
from recipe import against_torch

from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.optimizer import Optimizer, optimizer_of
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search import run

NO_DECAY = "@vectors weight_decay=0; fc2.* lr=0.02"


def text_of(model: str, where: str, plan: str, optimizer: Optimizer) -> str:
    graph, on = MODELS[model][0](), machine(where)
    step = fuse_collectives(differentiate(run(graph, on, plan, optimizer).graph, optimizer, on.mesh))
    return emit(plan_step(lower(step, on), PlanOptions(kernels="torch")), graph).text


ADAMW = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "clip": 0.2}
GROUPED = optimizer_of("test", "adamw", {**ADAMW, "groups": NO_DECAY})
MOMENTUM = Optimizer("momentum", 0.05, weight_decay=0.01, clip=0.1)
CASES = [
    ("mlp", "ideal:2", "data-parallel", GROUPED, ["cosine", 3, 8, 0.0]),
    ("mlp", "ideal:2x2", "fsdp", GROUPED, ["linear", 2, 8, 0.1]),
    ("attention", "ideal:2x2", "joint", MOMENTUM, ["linear", 0, 6, 0.5]),
    ("mlp", "ideal:2x2", "random", Optimizer("momentum", 0.05, clip=50.0), ["cosine", 2, 6, 0.0]),
]


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [-1, 3])
@pytest.mark.parametrize(("model", "where", "plan", "optimizer", "schedule"), CASES, ids=range(len(CASES)))
def test_a_run_is_pytorch_s(
    ranks: Ranks, model: str, where: str, plan: str, optimizer: Optimizer, schedule: list[Any], spoiled: int
):
    graph = MODELS[model][0]()
    own = {}
    for node in graph.weights() if optimizer.groups else ():
        if len(node.result.type.shape) < 2:
            own[node.name] = {"weight_decay": 0.0}
        elif "fc2" in node.name:
            own[node.name] = {"lr": 0.02}
    text = text_of(model, where, plan, optimizer)
    world = machine(where).devices
    found = ranks.run(text, world, against_torch, 6, schedule, own, spoiled if has_floats(graph) else -1)
    wrong, norms = found[0]
    assert wrong == []
    assert any(norm > optimizer.clip for norm in norms) == (optimizer.clip < 10)
    assert [each[0] for each in found] == [[]] * world


def has_floats(graph: Any) -> bool:
    """Whether an input is not of integers, so that a nan can be in it."""
    return any(n.result.type.dtype == "f32" for n in graph.inputs)


MUTANTS = {
    "the norm counts copies": (".square().sum() / copies", ".square().sum()"),
    "the norm is of the own pieces": ("    dist.all_reduce(square)\n", ""),
    "the norm is of the largest": ("    dist.all_reduce(square)\n", "    dist.all_reduce(square, dist.ReduceOp.MAX)\n"),
    "gradients are not scaled": ("scale=scale)", "scale=1.0)"),
    "gradients are scaled twice": ("scale=scale)", "scale=scale * scale)"),
    "the limit is another": ("return (CLIP / ", "return (2 * CLIP / "),
}


@pytest.mark.slow
def test_the_check_tells_what_is_wrong_with_the_recipe(ranks: Ranks):
    # Where each rank has a shard, and where each has all.
    texts = [text_of("mlp", "ideal:2x2", plan, GROUPED) for plan in ("fsdp", "data-parallel")]
    for text in texts:
        assert ranks.run(text, 4, check, 2)[0] == []
    for what, (before, after) in MUTANTS.items():
        assert [text.count(before) for text in texts] == [1, 1], what
        assert any(ranks.run(text.replace(before, after), 4, check, 2)[0] for text in texts), what


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_norms_and_updates_of_16_bits(ranks: Ranks, dtype: str):
    """Norms are not rounded to the gradient's type, in which they may be inf; what is too large for f16 is."""
    graph, on = with_dtype(MODELS["mlp"][0](), dtype), machine("ideal:2")
    optimizer = Optimizer("adam", 0.01, clip=0.1)
    step = fuse_collectives(differentiate(run(graph, on, "fsdp", optimizer).graph, optimizer, on.mesh))
    text = emit(plan_step(lower(step, on)), graph).text
    assert ranks.run(text, 2, check, 2)[0] == []


OPTIONS = ["--schedule", "cosine", "--warmup", "2"]


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_its_schedule(ranks: Ranks, tmp_path: Path):
    text = text_of("mlp", "ideal:2", "data-parallel", Optimizer("adamw", 0.1, clip=1.0))
    log, folder = tmp_path / "log.jsonl", str(tmp_path / "saved")
    whole = ranks.run(text, 2, run_main, [*OPTIONS, "--steps", "6", "--log", str(log)])[0]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [f"step {r['step']} loss {r['loss']:.6f}  norm {r['gradient_norm']:.4g}" for r in records] == whole
    assert [round(r["learning_rate"], 4) for r in records] == [0.05, 0.1, 0.1, 0.0854, 0.05, 0.0146]
    keys = {"seconds", "samples_per_second", "peak_bytes", "skipped"}
    assert keys <= records[1].keys()
    first = [*OPTIONS, "--schedule-steps", "6", "--steps", "3", "--save", folder]
    assert ranks.run(text, 2, run_main, first)[0] == whole[:3]
    assert ranks.run(text, 2, run_main, [*OPTIONS, "--steps", "6", "--load", folder])[0] == whole[3:]
    for other in (["--warmup", "2"], ["--schedule", "linear", "--warmup", "2"], [*OPTIONS, "--schedule-steps", "9"]):
        code, said = ranks.run(text, 2, refused, [*other, "--steps", "6", "--load", folder], {})[0]
        assert code == 1
        assert "--changed schedule goes on so" in said
    again = ["--steps", "6", "--load", folder, "--changed", "schedule"]
    assert len(ranks.run(text, 2, run_main, again)[0]) == 3


@pytest.mark.slow
def test_a_run_of_which_no_step_is_finite_ends(ranks: Ranks, tmp_path: Path):
    text = text_of("mlp", "ideal:2", "data-parallel", Optimizer("sgd", 0.1, clip=1.0))
    spoiled = text.replace("square = torch.zeros(", "square = math.nan + torch.zeros(")
    code, said = ranks.run(spoiled, 2, refused, ["--steps", "20"], {})[0]
    assert (code, said) == (1, "mlp: step 10: the gradient of 10 steps in a row is not finite\n")
    lines = ranks.run(spoiled, 2, run_main, ["--steps", "9"])[0]
    assert lines[-1].endswith("  norm nan: step skipped")


BATCHES = """
import numpy

def {name}(t):
    x = numpy.random.default_rng(0).standard_normal((24, 16)).astype("float32")
    return {{"{x}": x * (numpy.nan if t in {skipped} else 1), "{y}": numpy.arange(24) % 12}}
"""


@pytest.mark.slow
def test_the_optimizer_knows_nothing_of_skipped_steps(ranks: Ranks, tmp_path: Path):
    """Nor does it after a checkpoint: one batch again and again, with steps that are skipped between, or without."""
    text = text_of("mlp", "ideal:2", "data-parallel", Optimizer("adam", 0.05, clip=1.0))
    x, y = (node.name for node in MODELS["mlp"][0]().inputs)
    for name, skipped in (("spoiled", (1, 4)), ("whole", ())):
        (tmp_path / f"{name}_batches.py").write_text(BATCHES.format(name=name, x=x, y=y, skipped=skipped))
    given = {name: ["--data", f"{name}_batches:{name}"] for name in ("spoiled", "whole")}
    plain = ranks.run(text, 2, run_main, [*given["whole"], "--steps", "5"], None, str(tmp_path))[0]
    options = [*given["spoiled"], "--save", str(tmp_path / "saved"), "--steps"]
    lines = ranks.run(text, 2, run_main, [*options, "3"], None, str(tmp_path))[0]
    lines += ranks.run(text, 2, run_main, [*options, "7", "--load", str(tmp_path / "saved")], None, str(tmp_path))[0]
    assert [line.endswith("step skipped") for line in lines] == [t in (1, 4) for t in range(7)]
    done = [line.partition(" loss ")[2] for line in lines if not line.endswith("skipped")]
    assert done == [line.partition(" loss ")[2] for line in plain]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "cosine", "--steps", "5", "--warmup", "5"], "has no steps: --warmup 5 takes all 5"),
        (["--schedule", "linear", "--steps", "0"], "--schedule linear has no steps: --warmup 0 takes all 0"),
        (["--warmup", "-1"], "--warmup and --schedule-steps count steps"),
        (["--least-rate", "2", "--schedule", "linear"], "--least-rate is a part of the learning rate, from 0 to 1"),
        (["--least-rate", "0.1"], "--schedule-steps and --least-rate are of --schedule linear or cosine"),
        (["--lr", "-1"], "--lr is a number from 0"),
        (["--check", "--log", "x.jsonl"], "--check trains nothing; leave out --log"),
        (["--log", "/no/such/folder/x.jsonl"], "/no/such/folder"),
    ],
)
def test_options_that_make_no_recipe_are_refused(ranks: Ranks, options: list[str], message: str):
    code, said = ranks.run(text_of("mlp", "ideal:2", "data-parallel", Optimizer()), 2, refused, options, {})[0]
    assert code == 1
    assert message in said
    assert said.count("\n") == 1
