"""Evaluation: the forward alone equals plain PyTorch's, on data in order, and training is as if it were not done."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_out import evaluated
from models import MODELS, data, machine, weight
from ranks import Ranks, refused, run_main
from test_micro_batches import masked
from torch import nn

from unity_ir.errors import UnityError
from unity_ir.frontends.torch import from_torch
from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import apply
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.forward import forward_of
from unity_ir.plan.instructions import ReshardMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search import run

TORCH = PlanOptions(kernels="torch")


def step_of(graph: Graph, where: str, plan: str, micro_batches: int = 1) -> Program:
    on, adam = machine(where), Optimizer("adam", 0.05)
    placed = run(graph, on, plan, adam, micro_batches=micro_batches).graph
    return lower(fuse_collectives(differentiate(placed, adam, on.mesh)), on)


def text_of(
    graph: Graph, where: str, plan: str, micro_batches: int = 1, options: PlanOptions = TORCH, of: Graph | None = None
) -> str:
    """The text of a program that can evaluate; `of` is its serial forward, if not that of training."""
    program = step_of(graph, where, plan, micro_batches)
    return emit(
        plan_step(program, options), of or graph, forward=plan_step(forward_of(program, machine(where)), options)
    ).text


def dropped(p: float = 0.25) -> Graph:
    """Dropout of an activation, and of attention's probabilities; a further output, which no loss needs."""
    x, y = data("x", 8, 6, 24), data("y", 8, 6, 24)
    flat = (apply("matmul", [x.result, weight(name, 24, 24)]).result for name in "qkv")
    q, k, v = (apply("split_heads", [each], {"heads": 4}).result for each in flat)
    h = apply("attention_dropout", [q, k, v], {"scale": 0.4, "drop": p, "seed": 3}).result
    h = apply("dropout", [apply("merge_heads", [h]).result], {"p": p, "seed": 5}).result
    out = apply("matmul", [h, weight("w", 24, 24)]).result
    return Graph("dropped", (x, y), (apply("mse", [out, y.result]).result, apply("tanh", [out]).result))


def rows_of(graph: Graph, path: Path, batches: int, left: int = 0, ignored: int | None = None) -> None:
    """
    Write a file of random rows: `batches` whole batches, and `left` rows more. With labels that are `ignored`, those of
    the second batch are, and of the first all but two.
    """
    random, arrays = np.random.default_rng(7), dict[str, Any]()
    for node in graph.inputs:
        type = node.result.type
        shape = (batches * type.shape[0] + left, *type.shape[1:])
        numbers = random.standard_normal(shape, dtype="float32")
        arrays[node.name] = random.integers(0, 6, shape) if type.dtype == "i64" else numbers
        if ignored is not None and type.dtype == "i64":
            arrays[node.name][: 2 * type.shape[0]] = ignored
            arrays[node.name][0, :2] = 5
    np.savez(path, **arrays)


CASES: list[tuple[Callable[[], Graph], str, str, int]] = [
    (MODELS["mlp"][0], "ideal:2x2", "joint", 1),
    (MODELS["mlp"][0], "ideal:2", "zero3", 2),
    (MODELS["attention"][0], "ideal:2x2", "random", 1),
    (MODELS["cnn"][0], "ideal:2", "data-parallel", 1),
    (masked, "ideal:2", "data-parallel", 1),
    (masked, "ideal:2", "zero3", 2),
    (masked, "ideal:2x2", "joint", 4),
    (dropped, "ideal:2", "fsdp", 2),
    (dropped, "ideal:2x2", "random", 1),
]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("made", "where", "plan", "count"), CASES)
def test_the_loss_is_pytorch_s_and_training_is_not_disturbed(
    ranks: Ranks, tmp_path: Path, made: Callable[[], Graph], where: str, plan: str, count: int
):
    graph, world = made(), machine(where).devices
    text = text_of(graph, where, plan, count, of=dropped(0.0) if made is dropped else None)
    ignored = 0 if made is masked else None
    rows_of(graph, tmp_path / "held_out.npz", 3, left=1, ignored=ignored)
    given = ["--steps", "4", "--log", str(tmp_path / "log.jsonl")]
    evaluating = [*given, "--eval-data", "held_out.npz", "--eval-every", "2"]
    lines, want = ranks.run(text, world, evaluated, evaluating, str(tmp_path), 3, ignored)[0]
    assert lines.pop(0) == "held_out.npz: 1 rows fill no last batch and are left out"
    found = [line for line in lines if "eval" in line]
    assert [line.rpartition(" ")[0] for line in found] == ["step 2 eval loss", "step 4 eval loss"]
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 2, 3, 4, 4]
    losses = [r["eval_loss"] for r in records if "eval_loss" in r]
    assert [f"{loss:.6f}" for loss in losses] == [line.rpartition(" ")[2] for line in found]
    assert losses[-1] == pytest.approx(want, rel=1e-5)
    assert losses[0] != pytest.approx(want, rel=1e-4)
    assert [line for line in lines if "eval" not in line] == ranks.run(text, world, run_main, ["--steps", "4"])[0]


def function(text: str, name: str) -> str:
    """The text of one of a program's functions."""
    (found,) = (s for s in ast.parse(text).body if isinstance(s, ast.FunctionDef) and s.name == name)
    return ast.unparse(found)


@pytest.mark.slow
def test_triton_s_forward_is_that_of_the_step(ranks: Ranks, tmp_path: Path):
    graph = MODELS["attention"][0]()
    text = text_of(graph, "ideal:2", "joint", options=PlanOptions())
    forward = function(text, "forward")
    assert "attention_" in forward
    # Nothing is kept for a backward.
    assert "attention_saving" in function(text, "forward_backward")
    assert "saving" not in forward
    assert "grad" not in forward
    rows_of(graph, tmp_path / "held_out.npz", 1)
    lines, want = ranks.run(text, 2, evaluated, ["--eval-data", "held_out.npz", "--steps", "1"], str(tmp_path), 1)[0]
    assert float(lines[-1].rpartition(" ")[2]) == pytest.approx(want, rel=1e-5)


def test_what_the_step_makes_twice_is_not_kept_by_evaluation():
    """The forward gathers a weight once per micro-batch in ZeRO-3, which saves memory, and once per step otherwise."""
    for plan, when in (("zero3", "every"), ("fsdp", "first")):
        step = step_of(MODELS["mlp"][0](), "ideal:2", plan, 2)
        made = forward_of(step, machine("ideal:2"))
        gathers = [i.result for i in made.body if isinstance(i, ReshardMove) and i.kind == "all_gather"]
        assert when in {step.when[r] for r in gathers}
        assert {r: made.when[r] for r in gathers} == {r: step.when[r] for r in gathers}


def ignoring(reduction: str) -> Graph:
    """An imported loss over the labels that are not -100."""
    example = torch.zeros(4, 6), torch.tensor([1, -100, 2, 3])
    loss = partial(nn.functional.cross_entropy, reduction=reduction)
    return from_torch(nn.Linear(6, 4), example, lambda output, target: loss(output, target)).graph


def halved() -> Graph:
    """Half of a mean over some labels, which is none."""
    graph = masked()
    return replace(graph, outputs=(apply("scale", graph.outputs, {"by": 0.5}).result,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "is_counted"),
    [
        (masked, True),
        (lambda: mixed_precision(masked(), "bf16"), True),
        (lambda: ignoring("mean"), True),
        (lambda: ignoring("sum"), False),
        (halved, False),
        (MODELS["mlp"][0], False),
    ],
)
def test_labels_are_counted_where_a_loss_is_the_mean_over_them(made: Callable[[], Graph], is_counted: bool):
    for where, plan in (("ideal:1", "data-parallel"), ("ideal:2x2", "data-parallel"), ("ideal:2", "random")):
        forward = forward_of(step_of(made(), where, plan), machine(where))
        assert len(forward.outputs) == 1 + is_counted


BATCHES = """
import numpy, torch

def other(t):
    torch.rand(3)
    x = numpy.random.default_rng(t).standard_normal((24, 16)).astype("float32")
    return {"x": x, "labels": numpy.arange(24) % 12}

def drawn(t):
    return {"x": torch.randn(24, 16), "labels": torch.randint(12, (24,))}
"""


@pytest.mark.slow
def test_functions_make_other_data_and_random_numbers_stay_as_they_were(ranks: Ranks, tmp_path: Path):
    (tmp_path / "evaluating.py").write_text(BATCHES)
    text = text_of(MODELS["mlp"][0](), "ideal:2", "data-parallel")
    drawn, folder = ["--data", "evaluating:drawn"], str(tmp_path)
    given = [*drawn, "--eval-data", "evaluating:other", "--eval-every", "1", "--eval-batches", "2"]
    lines = ranks.run(text, 2, run_main, given, None, folder)[0]
    assert len([line for line in lines if "eval" in line]) == 3
    assert [line for line in lines if "eval" not in line] == ranks.run(text, 2, run_main, drawn, None, folder)[0]


@pytest.mark.slow
def test_what_is_refused_is_said_in_one_line(ranks: Ranks, tmp_path: Path):
    graph = MODELS["mlp"][0]()
    text = text_of(graph, "ideal:2", "data-parallel")
    without = emit(plan_step(step_of(graph, "ideal:2", "data-parallel"), TORCH), graph).text
    rows_of(graph, tmp_path / "held_out.npz", 2)
    (tmp_path / "evaluating.py").write_text(BATCHES)
    file = str(tmp_path / "held_out.npz")
    for program, options, message in (
        (
            without,
            ["--eval-data", file],
            "no forward alone for --eval-data; emit it with evaluate among the options of -t",
        ),
        (text, ["--eval-every", "2"], "--eval-every and --eval-batches are of --eval-data, which has to be given"),
        (text, ["--eval-data", file, "--eval-every", "-2"], "--eval-every counts steps"),
        (text, ["--eval-data", file, "--eval-batches", "3"], f"--eval-batches is 3, and {file} has 2"),
        (text, ["--eval-data", file, "--check"], "--check trains nothing; leave out --eval-data"),
        (text, ["--eval-data", "json:loads"], "say by --eval-batches how many"),
        (text, ["--eval-data", "no.npz"], "cannot read x, labels from no.npz"),
    ):
        code, said = ranks.run(program, 2, refused, options, {})[0]
        assert (code, said.count("\n")) == (1, 1), said
        assert message in said


def test_numbers_drawn_in_another_way_than_dropout_s_are_refused(monkeypatch: pytest.MonkeyPatch):
    import re

    from unity_ir.plan import forward

    monkeypatch.setattr(forward, "_DRAWN", re.compile("no such"))
    with pytest.raises(UnityError, match="evaluation must not; leave evaluate out"):
        forward_of(step_of(dropped(), "ideal:2", "data-parallel"), machine("ideal:2"))
