"""Programs of which some ranks do other things than others: operators and weights on a part of the machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from models import MODELS, mlp
from pinned import pinned
from ranks import Ranks, check, load_and_train, train_and_save
from test_programs import program

from unity_ir.dialects.convert_program import from_op, to_op
from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.collectives import FROM_ONE
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import ReshardMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program


def pinned_program(graph: Graph, seed: int, optimizer: str = "sgd") -> Program:
    plan, on = pinned(graph, seed)
    settings = Optimizer(optimizer, 0.1 if optimizer == "sgd" else 1e-3)
    return lower(fuse_collectives(differentiate(plan, settings, on.mesh)), on)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_equals_pytorch(ranks: Ranks, model: str):
    graph = MODELS[model][0]()
    for seed in (0, 1):
        text = emit(
            plan_step(pinned_program(graph, seed), PlanOptions(kernels="torch" if seed else "triton")), graph
        ).text
        assert ranks.run(text, 4, check, 2) == [[]] * 4


@pytest.mark.slow
def test_every_kind_of_move_occurs_and_the_text_says_all():
    kinds: Counter[str] = Counter()
    for build, _ in MODELS.values():
        for seed in range(8):
            made = pinned_program(build(), seed)
            kinds.update(i.kind for i in made.body if isinstance(i, ReshardMove))
            assert from_op(to_op(made)) == made
    assert {*FROM_ONE, "zero_pad"} <= kinds.keys()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "broadcast(out, group=ctx.groups[axes], group_src=root",
            "broadcast(out, group=ctx.groups[axes], group_src=1 - root",
        ),
        ("parts = list(_cut(x, dim, axes))", "parts = list(_cut(x.flip(dim), dim, axes))"),
        ("list(parts) or None, group", "list(parts)[::-1] or None, group"),
        ("out if ctx.index(axes) == root else None", "x if ctx.index(axes) == root else None"),
        ("dist.isend(x, group", "dist.isend(torch.zeros_like(x), group"),
    ],
)
def test_every_mutant_is_caught(ranks: Ranks, right: str, wrong: str):
    plans = ((build(), seed) for seed in range(4) for build, _ in MODELS.values())
    for graph, seed in plans:
        text = emit(plan_step(pinned_program(graph, seed), PlanOptions(kernels="torch")), graph).text
        if right not in text:
            continue  # a program has the collectives it uses
        assert text.count(right) == 1
        if any(ranks.run(text.replace(right, wrong), 4, check, 1)):
            return
    raise AssertionError("no plan's check has caught it")


@pytest.mark.slow
def test_a_checkpoint_of_some_ranks_loads_on_all(ranks: Ranks, tmp_path: Path):
    folder = str(tmp_path / "checkpoints")
    text = emit(plan_step(pinned_program(mlp(), 1, "adam"), PlanOptions(kernels="torch")), mlp()).text
    assert "torch.float32, ('at " in text
    saved = ranks.run(text, 4, train_and_save, 2, folder)[0]
    first, loaded, _ = ranks.run(
        program(mlp(), "ideal:2", "data-parallel", "adam", kernels="torch"), 2, load_and_train, 1, folder
    )[0]
    again = ranks.run(text, 4, load_and_train, 1, folder)[0]
    assert first == again[0] == 2
    for name, value in saved.items():
        np.testing.assert_array_equal(loaded[name], value)
        np.testing.assert_array_equal(again[1][name], value)
