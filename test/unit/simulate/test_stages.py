"""Simulated steps in stages: seconds by the schedule's formula, and memory that ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from math import isclose

import pytest

from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, Pipeline
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.instructions import Instruction, Leaf, TimeStep
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.plan.schedule import schedule
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
def graph(order: str, count: int = RANKS, batch: int = 262144) -> Graph:
    serial = from_text(f"mlp,batch={batch},hidden=2048,layers=16,classes=2048")
    stages, optimizer = Stages(count, order), Optimizer("adamw")
    return run(serial, on(), "data-parallel", optimizer, micro_batches=MICRO_BATCHES, stages=stages).graph


@cache
def step(order: str, count: int = RANKS) -> StagedStep:
    return simulate_stages(planned(order, count), on())


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("order", "count"), [("1f1b", 4), ("zb-h1", 4), ("zb-v", 8), ("dualpipe-v", 8)])
def test_a_rank_keeps_what_its_backwards_read_and_gives_it_back(order: str, count: int):
    """In one backward or in halves; some schedules have both."""
    found = step(order, count)
    schedule = found.times.schedule
    assert {a.kind for actions in schedule.ranks for a in actions if a.kind in "BIW"} == KINDS.get(order, {"I", "W"})
    for rank in range(RANKS):
        kept = {k: sum(found.kept.get(f"{s}{k}", 0) for s in schedule.stages_of(rank)) for k in "FBIW"}
        assert kept["F"] > 0
        assert order == "1f1b" or kept["F"] == -kept["I"] - kept["W"]
        assert "B" not in KINDS.get(order, ()) or kept["F"] == -kept["B"]


KINDS = {"1f1b": {"B"}, "dualpipe-v": {"B", "I", "W"}}


@pytest.mark.parametrize(("batch", "share"), [(64, 1.0), (262144, 0.0)], ids=["bytes", "arithmetic"])
def test_products_of_all_but_the_first_micro_batch_add_to_gradients_of_those_before(batch: int, share: float):
    """They read the gradients: where few rows make products wait for memory that takes time, else none."""
    found = simulate_stages(plan_graph(graph("gpipe", batch=batch), on(), Optimizer("adamw")), on())
    each = 2048 * 2048 * 4 / (on().device.memory_bandwidth * on().device.efficiency)
    for rank in range(RANKS):
        starts, ends = found.times.starts[rank], found.times.ends[rank]
        took = [end - start for start, end in zip(starts, ends, strict=True)][MICRO_BATCHES:]
        assert isclose(took[1] - took[0], 4 * share * each, rel_tol=0.05, abs_tol=1e-9)
        assert all(isclose(each, took[1]) for each in took[1:-1])


def test_other_gradients_are_added_by_kernels_of_their_own():
    """Each addition reads both and writes the sum: three times the bytes of the gradients."""
    plan = planned("gpipe")
    own = next(own for part, own in plan.parts if part.kind == "B" and part.stage == 1)
    steps = [i for i in own.program.body if isinstance(i, TimeStep) and i.kind == "accumulate"]
    assert [own.time_step_bytes(i) for i in steps] == [(0,) * MICRO_BATCHES] * 4
    apart = replace(own, program=replace(own.program, body=tuple(map(by_itself, own.program.body))))
    weights = 2048 * 2048 * 4
    assert [apart.time_step_bytes(i) for i in map(by_itself, steps)] == [(0, *[3 * weights] * (MICRO_BATCHES - 1))] * 4


def by_itself(instruction: Instruction) -> Instruction:
    return replace(instruction, is_added=False) if isinstance(instruction, TimeStep) else instruction


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
        held = [i.result for i in leaves if here.issuperset(pins_of(program.tensors[i.result].layout))]
        count = {r: MICRO_BATCHES if program.when[r] == "every" else 1 for r in held}
        assert two.always[rank] - one.always[rank] == sum(count[r] * program.bytes[r] for r in held) > 0
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


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Plan]:
    """Plans of which no sum over devices begins before the rank's last backward has ended."""

    def planned(order: str) -> Plan:
        with monkeypatch.context() as patch:
            patch.setattr("unity_ir.plan.pipeline.parts._Parts._start_early", lambda *_: None)
            return plan_graph(graph(order), on(), Optimizer("adamw"))

    return planned


@pytest.mark.slow
@pytest.mark.parametrize("order", ["1f1b", "zb-h1", "2bw"])
def test_sums_over_devices_begin_beside_the_last_backward(order: str, late: Callable[[str], Plan]):
    """Over one link they follow each other; together they take as long as behind it."""
    early, behind = step(order), simulate_stages(late(order), on())
    for mine, left, whole in zip(early.started, early.sums, behind.sums, strict=True):
        assert len(mine) == 4
        assert sum(each.end - each.begin for each in mine) == pytest.approx(whole)
        assert max(each.begin for each in mine) <= 0
        assert all(then.begin >= each.end - 1e-12 for each, then in pairwise(mine))
        assert left == pytest.approx(max(mine[-1].end, 0.0), abs=1e-12)
        assert left < 0.3 * whole
    assert behind.started == ((),) * RANKS
    assert early.seconds < behind.seconds
    # They are made in place of what they are of.
    assert early.peaks == behind.peaks
    drawn = [label.what for label in early.timeline().tasks.labels]
    assert drawn.count("sum of a gradient") == 4 * RANKS * early.times.schedule.steps


def test_without_overlap_sums_over_devices_are_behind_the_last_backward(late: Callable[[str], Plan]):
    waiting, behind = (simulate_stages(plan, on(), overlap=False) for plan in (planned("1f1b"), late("1f1b")))
    assert waiting.seconds == pytest.approx(behind.seconds)
    assert waiting.sums == pytest.approx(behind.sums)


WEIGHT = 1024 * 1024 * 4
"""Bytes of each of the 16 weights that a rank of `of_weights` has."""


@cache
def of_weights(order: str, count: int, **options: int) -> Graph:
    """A perceptron whose weights are more than all else; each device has a half of their sums."""
    serial = from_text("mlp,batch=256,hidden=1024,layers=64,classes=1024")
    given = {"micro_batches": MICRO_BATCHES, "stages": Stages(count, order)}
    return run(serial, on(), "degrees", Optimizer("adamw"), {"zero": 1, **options}, **given).graph


@pytest.mark.slow
@pytest.mark.parametrize(("order", "count"), [("1f1b", RANKS), ("interleaved", 2 * RANKS)])
def test_sums_that_are_waited_for_give_back_what_they_are_of(order: str, count: int, monkeypatch: pytest.MonkeyPatch):
    """If none is waited for, a device has what they make, half of 16 weights, beside all that they are of."""

    def found(under_way: int) -> StagedStep:
        monkeypatch.setattr("unity_ir.plan.plan.schedule", partial(schedule, under_way=under_way))
        return simulate_stages(plan_graph(of_weights(order, count), on(), Optimizer("adamw")), on())

    few, free = found(1), found(2**40)
    assert few.always == free.always
    for rank in range(RANKS):
        assert few.peaks[rank] - few.always[rank] < 3 * WEIGHT
    for rank in range(1, RANKS):
        assert free.peaks[rank] - free.always[rank] == pytest.approx(8 * WEIGHT, abs=0.4 * WEIGHT)


@pytest.mark.slow
def test_sums_of_several_stages_of_a_rank_follow_each_other():
    found = simulate_stages(plan_graph(of_weights("zb-v", 2 * RANKS), on(), Optimizer("adamw")), on())
    for mine in found.started:
        assert len(mine) == 16
        assert all(then.begin >= each.end - 1e-12 for each, then in pairwise(mine))


@pytest.mark.slow
def test_a_stage_s_own_moves_wait_for_sums_over_the_same_links():
    """So its last backward takes longer than those before."""
    found = simulate_stages(plan_graph(of_weights("1f1b", 2, tp=2), on(), Optimizer("adamw")), on())
    for begin, end in zip(found.times.starts, found.times.ends, strict=True):
        assert end[-1] - begin[-1] > 1.01 * found.stages.backward[0]
