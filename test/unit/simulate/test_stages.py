"""Simulated steps in stages: seconds by the schedule's formula, and memory that ranks hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import isclose

import pytest

from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.plan.program import Leaf
from unity_ir.plan.schedule import piece_bytes
from unity_ir.search.pipeline.balance import balanced
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.run import run
from unity_ir.simulate.report import as_emitted, simulated
from unity_ir.simulate.stages import StagedStep, simulate_stages

RANKS, MICRO_BATCHES = 4, 8


@cache
def on() -> Machine:
    return load("box:8")


@cache
def planned(order: str, count: int = RANKS, optimizer: str = "adamw") -> Plan:
    """A perceptron of equal layers, in stages of two devices each."""
    return plan_graph(graph(order, count), on(), Optimizer(optimizer))


@cache
def graph(order: str, count: int = RANKS) -> Graph:
    serial = from_text("mlp,batch=262144,hidden=2048,layers=16,classes=2048")
    stages, optimizer = Stages(count, order), Optimizer("adamw")
    return run(serial, on(), "data-parallel", optimizer, micro_batches=MICRO_BATCHES, stages=stages).graph


@cache
def step(order: str, count: int = RANKS) -> StagedStep:
    return simulate_stages(planned(order, count), on())


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_seconds_are_those_of_fill_work_and_drain(order: str):
    found = step(order)
    stages = found.stages
    last = RANKS - 1
    fill = sum(stages.forward[:last]) + sum(stages.send)
    drain = sum(stages.backward[:last]) + sum(stages.send_back)
    slowest = max(f + b for f, b in zip(stages.forward, stages.backward, strict=True))
    least = max(stages.before) + fill + drain + stages.forward[last] + stages.backward[last]
    # No less than what the first micro-batch takes through all stages, and the rest through the slowest.
    least += (MICRO_BATCHES - 1) * slowest
    waits = 2 * MICRO_BATCHES * sum(stages.send)
    most = least + waits + max(found.sums) + max(found.updates) + max(stages.before)
    assert least - (MICRO_BATCHES - 1) * 0.2 * slowest <= found.seconds <= most
    assert isclose(found.seconds, as_emitted(graph(order), on(), Optimizer("adamw"))[0])


def test_interleaved_stages_have_less_of_a_bubble_and_late_weight_gradients_less_too():
    bubbles = {order: step(order, count).bubble for order, count in (("1f1b", 4), ("interleaved", 8), ("zb-h1", 4))}
    assert bubbles["interleaved"] < 0.7 * bubbles["1f1b"]
    assert bubbles["zb-h1"] < 0.8 * bubbles["1f1b"]


def test_each_rank_holds_as_many_micro_batches_as_its_order_says():
    gpipe, eager = step("gpipe"), step("1f1b")
    for rank in range(RANKS):
        # The same parts: what differs is how many micro-batches are live.
        kept = gpipe.kept[f"{rank}F"]
        live = min(MICRO_BATCHES, RANKS - rank)
        assert gpipe.peaks[rank] - eager.peaks[rank] == (MICRO_BATCHES - live) * kept


def test_a_stage_keeps_what_its_backward_reads_and_gives_it_back():
    found = step("1f1b")
    for stage in range(RANKS):
        assert found.kept[f"{stage}F"] > 0
        assert found.kept[f"{stage}F"] + found.kept[f"{stage}B"] == 0


def test_clipping_waits_for_all_ranks():
    program = planned("1f1b").program
    assert program.optimizer is not None
    clipped = replace(planned("1f1b"), program=replace(program, optimizer=replace(program.optimizer, clip=1.0)))
    found, without = simulate_stages(clipped, on()), step("1f1b")
    ends = [each[-1] + after for each, after in zip(without.times.ends, without.sums, strict=True)]
    assert found.norm > 0
    assert isclose(found.seconds, max(ends) + found.norm + max(found.updates))


def test_the_picture_has_every_action_and_the_memory_of_each_rank():
    found = step("1f1b")
    drawn = found.timeline()
    words = [label.what for label in drawn.tasks.labels]
    assert sum(word.endswith(f"F{MICRO_BATCHES - 1}") for word in words) == RANKS
    assert drawn.seconds == pytest.approx(found.seconds)


def test_without_overlap_sends_are_part_of_their_stages():
    beside, waited = step("1f1b").stages, simulate_stages(planned("1f1b"), on(), overlap=False)
    assert waited.seconds > step("1f1b").seconds
    assert waited.stages.send == ()
    assert waited.stages.forward[0] >= beside.forward[0] + beside.send[0] > beside.forward[0]


def test_counts_are_of_the_rank_with_the_most():
    found = simulated(graph("1f1b"), on(), Optimizer("adamw"))
    parts = {part.name: own.launches for part, own in planned("1f1b").parts}
    ranks = [parts["before"] + parts["after"] + parts[f"{r}F"] + parts[f"{r}B"] for r in range(RANKS)]
    assert found.launches == max(ranks)
    assert "4 stages on 4 parts" in found.pipeline[0]


def test_two_versions_are_held_and_no_rank_waits_for_a_step_to_end():
    """Of 2BW: weights and inputs twice, as many micro-batches as 1F1B; a step takes as long as its busiest rank."""
    one, found = step("1f1b"), plan_graph(replace(graph("1f1b"), pipeline=Pipeline("2bw", RANKS)), on())
    two, program, pipeline = simulate_stages(found, on()), found.program, found.pipeline
    assert pipeline is not None
    for rank in range(RANKS):
        here = set(enumerate(pipeline.mesh.coordinates(rank)))
        leaves = [i for i in program.body if isinstance(i, Leaf) and i.op in ("weight", "input")]
        held = [i.result for i in leaves if here.issuperset(pins(program.tensors[i.result].layout))]
        count = {r: MICRO_BATCHES if program.when[r] == "every" else 1 for r in held}
        assert two.always[rank] - one.always[rank] == sum(count[r] * piece_bytes(program, r) for r in held) > 0
        assert two.kept[f"{rank}F"] == one.kept[f"{rank}F"]
    work = [MICRO_BATCHES * (f + b) for f, b in zip(two.stages.forward, two.stages.backward, strict=True)]
    most = max(w + s + u for w, s, u in zip(work, two.sums, two.updates, strict=True))
    assert most <= two.seconds < one.seconds
    assert two.is_asynchronous
    assert not one.is_asynchronous


def test_runs_are_balanced():
    assert balanced([1, 1, 2], 2) == [2, 3]
    assert balanced([5, 1, 1, 1], 2) == [1, 4]
    assert balanced([1, 1, 1], 3) == [1, 2, 3]
    # What is sent behind the second item takes long; behind the last run nothing is sent.
    assert balanced([1, 1, 1, 1], 2, [0, 5, 0, 5]) == [1, 4]
    assert balanced([1, 1, 1, 1], 2, [3, 1.5, 0, 5]) == [3, 4]
