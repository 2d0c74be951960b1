"""The stages of a plan, and their schedule, as torch.distributed.pipelining takes them."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Any

import pytest
from graphs import boxes
from staged import staged
from torch.distributed.pipelining.schedules import _Action

import unity_ir as ui
from unity_ir.interop.pipelining import modules, stages
from unity_ir.models import build
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.micro_batches import in_micro_batches, micro_batch
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.search import run
from unity_ir.search.baselines.batch_dims import sample_dims

COUNT = 8


def in_stages(order: str, ranks: int, chunks: int, by: str) -> Graph:
    """A deep perceptron in stages, each on two devices."""
    graph = build("mlp", batch=16, hidden=16, layers=8, classes=16)
    dims = sample_dims(graph)
    plan = run(micro_batch(graph, dims, COUNT), boxes(2), by).graph
    placed = staged(plan, Pipeline(order, ranks, chunks), boxes(ranks, 2))
    return in_micro_batches(placed, dims, COUNT, lambda weight: True)


@pytest.mark.parametrize(
    ("order", "ranks", "chunks", "by"),
    [("1f1b", 2, 1, "fsdp"), ("interleaved", 2, 2, "data-parallel"), ("zb-v", 2, 2, "fsdp")],
)
def test_every_parameter_is_of_the_stage_that_reads_it(order: str, ranks: int, chunks: int, by: str):
    found = stages(in_stages(order, ranks, chunks, by), boxes(ranks, 2))
    schedule = pipeline_schedule(order, ranks, COUNT, chunks)
    assert [stage["rank"] for stage in found["stages"]] == list(schedule.rank_of)
    owned = [stage["parameters"] for stage in found["stages"]]
    # Layers are in order, as many in each stage; so are their weights.
    assert [name for names in owned for name in names] == [f"dense{i}.weight" for i in range(8)]
    assert {len(names) for names in owned} == {8 // (ranks * chunks)}
    assert [stage["modules"] for stage in found["stages"]] == [[n.removesuffix(".weight") for n in o] for o in owned]
    read: list[list[Any]] = [list(map(_Action.from_str, row)) for row in csv.reader(found["csv"].splitlines())]
    assert len(read) == ranks
    for rank, actions in enumerate(read):
        assert {a.stage_index for a in actions} == set(schedule.stages_of(rank))
        assert {a.microbatch_index for a in actions} == set(range(COUNT))


def test_modules_are_the_outermost_that_a_stage_has_alone():
    owners = {"in.w": 0, "h.0.a.w": 0, "h.0.a.b": 0, "h.0.c": 1, "h.1.w": 1, "h.1.v.w": 1, "out": 1}
    assert modules(owners, 0) == ["in", "h.0.a"]
    assert modules(owners, 1) == ["h.0.c", "h.1", "out"]
    assert modules(owners, 2) == []
    assert modules(dict.fromkeys(owners, 0), 0) == ["in", "h", "out"]


def test_plans_that_torch_has_no_stages_for_are_refused():
    plan = ui.plan("mlp", machine="box:2", search="fsdp", batch=8, hidden=16, layers=2, classes=4)
    with pytest.raises(ui.UnityError, match="stages: @mlp has no stages; plan with stages and micro_batches"):
        plan.stages()
    graph = in_stages("1f1b", 2, 1, "data-parallel")
    late = replace(graph, pipeline=Pipeline("2bw", 2))
    with pytest.raises(ui.UnityError, match="2bw of @mlp goes on from step to step"):
        stages(late, boxes(2, 2))
