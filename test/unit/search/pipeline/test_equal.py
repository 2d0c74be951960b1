"""A planned pipeline is what its placed graph costs, cut where it may be, and the best there is of small graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import prod

import pytest
from graphs import boxes, with_memory
from hypothesis import given
from hypothesis import strategies as st

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load, part
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.recompute import not_kept
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.plan import plan_graph
from unity_ir.search import run
from unity_ir.search.baselines.batch_dims import sample_dims
from unity_ir.search.pipeline.balance import least_longest
from unity_ir.search.pipeline.cuts import units
from unity_ir.search.pipeline.equal import PipelinePlan, pipeline_plan
from unity_ir.search.pipeline.orders import TRIED, ScheduleKind
from unity_ir.search.pipeline.placed import pipeline_step
from unity_ir.search.pipeline.ranges import CountedSchedule, StageRanges
from unity_ir.search.pipeline.rows import priced_units
from unity_ir.simulate.stages import simulate_stages

GPT2 = "gpt2,batch=8,sequence=64,layers=3,hidden=64,heads=4,vocabulary=512"
MLP = "mlp,batch=16,layers=5,hidden=64"
OPTIMIZER = Optimizer("adamw")


def planned(
    model: str, machine: Machine, parts: int, micro_batches: int, schedule: ScheduleKind | None = None
) -> PipelinePlan:
    return pipeline_plan(from_text(model), machine, parts, micro_batches, schedule, OPTIMIZER)


@pytest.fixture(scope="module")
def gpt2() -> PipelinePlan:
    return planned(GPT2, boxes(2, 2, overhead=1e-6), 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["joint", "fsdp", "megatron"])
def test_rows_add_up_to_the_cost_of_the_graph(strategy: str):
    """Every kernel and every move belongs to one unit; a device holds no less than `cost` counts."""
    machine = boxes(2, 2, overhead=1e-6)
    placed = run(from_text(GPT2.replace("layers=3", "layers=1")), machine, strategy, OPTIMIZER).graph
    priced = cost(placed, machine, OPTIMIZER)
    rows = priced_units(priced, placed, OPTIMIZER, 1).rows
    seconds = rows.forward + rows.input_gradient + rows.weight_gradient + rows.once
    assert seconds.sum() == pytest.approx(priced.time)
    assert priced.memory_bytes <= rows.held.sum() + rows.live[0].sum() <= 1.5 * priced.memory_bytes
    # What is done once per step: moves of weights and of their gradients, and updates.
    moves = (m for r in (*priced.reshards, *priced.weight_reshards) if root(r.value).op == "weight" for m in r.moves)
    once = sum(machine.move_time(move, dtype) for move, dtype in moves)
    assert rows.once.sum() == pytest.approx(once + priced.update)


@pytest.mark.parametrize(("strategy", "rests"), [("data-parallel", 1), ("fsdp", 4)])
def test_micro_batches_add_up_gradients_where_they_are_made(strategy: str, rests: int):
    """
    Of FSDP, too, in the layout that weights are brought to: whole, as of data parallelism. Those of products alone are
    added as they are made: these read the sum, while they compute where that takes longer.
    """
    machine = boxes(2, 2)
    placed = run(from_text(GPT2), machine, strategy, OPTIMIZER).graph
    priced = cost(placed, machine, OPTIMIZER)
    one, four = (priced_units(priced, placed, OPTIMIZER, count).rows.weight_gradient.sum() for count in (1, 4))
    matrices = [n for n in placed.weights() if len(n.types[0].shape) == 2]
    assert {prod(n.types[0].degrees) for n in matrices} == {rests}
    others = [n for n in placed.weights() if n not in matrices or n.name in ("wte.weight", "wpe.weight")]
    added = sum(machine.memory_seconds(1, 3 * 4 * prod(n.types[0].shape)) for n in others)
    read = sum(machine.memory_seconds(0, 4 * prod(n.types[0].shape)) for n in matrices if n not in others)
    assert 0.8 * read < (four - one) / 0.75 - added < read


@pytest.mark.slow
def test_between_the_halves_of_a_backward_gradients_are_held_too():
    """Until W a stage holds operands and results' gradients, of which weight gradients are made."""
    machine = boxes(2, overhead=1e-6)
    plan = planned(GPT2, machine, 2, 4, ("zb-h1", 1))
    step = replace(pipeline_step(plan, machine, sample_dims(from_text(GPT2))), optimizer=OPTIMIZER)
    emitted = simulate_stages(plan_graph(step, machine, OPTIMIZER), machine)
    assert plan.loads.late is not None
    for stage, (live, late) in enumerate(zip(plan.loads.live, plan.loads.late, strict=True)):
        kept = emitted.kept[f"{stage}F"]
        assert live == pytest.approx(kept, rel=0.2)
        assert kept + emitted.kept[f"{stage}I"] <= late <= 1.25 * (kept + emitted.kept[f"{stage}I"])
        assert late > live


def root(value: Value) -> Node:
    while value.node.is_parallel:
        value = value.node.operands[0]
    return value.node


def test_stages_are_cut_in_the_order_of_the_graph(gpt2: PipelinePlan):
    """Tied embeddings rest on the first stage, which reads them first; the last has a copy."""
    stage = gpt2.stage_of
    for node in (n for n in gpt2.graph.nodes() if n.is_compute):
        assert all(stage[root(value)] <= stage[node] for value in node.operands)
    assert {stage[n] for n in gpt2.graph.nodes() if n.is_compute} == {0, 1}
    leaves = {n.name: stage[n] for n in gpt2.graph.nodes() if n.is_leaf and n.op != "constant"}
    assert (leaves["tokens"], leaves["labels"], leaves["wte.weight"]) == (0, 1, 0)
    assert leaves["h.0.ln_1.weight"] == 0
    assert leaves["h.2.mlp.c_proj.weight"] == leaves["ln_f.weight"] == 1
    (tied,) = units(erase(gpt2.graph)).tied
    assert tied[0].name == "wte.weight"


def test_a_tied_weight_is_held_by_both_stages():
    tied, machine = from_text(GPT2), boxes(2, overhead=1e-6)
    plan = pipeline_plan(tied, machine, 2, 4, ("1f1b", 1), OPTIMIZER)
    priced = priced_units(cost(plan.graph, plan.part, OPTIMIZER), plan.graph, OPTIMIZER, 4)
    ranges = StageRanges([priced.rows], machine, 2, machine.device.usable)
    table = 512 * 64 * 4
    for cut in range(1, ranges.count - 1):
        once, held, added = ranges.own(0, cut, ranges.count)
        assert held - priced.rows.held[cut:].sum() == 2 * table
        assert once - priced.rows.once[cut:].sum() == pytest.approx(2 * table / 1e9, rel=0.1)
        assert added == pytest.approx(0.75 * machine.memory_seconds(1, 3 * table))
    assert ranges.own(0, 0, ranges.count)[1] == pytest.approx(priced.rows.held.sum())


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TRIED, ids=str)
def test_peaks_are_those_of_the_micro_batches_that_are_live(kind: tuple[str, int]):
    name, chunks = kind
    # Of one layer more there are many times as many pipelines of eight stages.
    model, parts = (MLP, 4 // chunks) if chunks < 4 else (MLP.replace("layers=5", "layers=4"), 2)
    plan = planned(model, boxes(4), parts, 8, kind)
    assert (plan.schedule, plan.stages) == (name, plan.parts * chunks)
    schedule = pipeline_schedule(name, plan.parts, 8, chunks)
    live = peak_live(schedule, plan.loads.live, plan.loads.late)
    held = [sum(plan.loads.held[stage] for stage in schedule.stages_of(rank)) for rank in range(plan.parts)]
    assert plan.peaks == pytest.approx([rest + each for rest, each in zip(held, live, strict=True)])


def test_of_given_layouts_stages_and_schedule_are_the_best_of_all(gpt2: PipelinePlan):
    priced = priced_units(cost(gpt2.graph, gpt2.part, OPTIMIZER), gpt2.graph, OPTIMIZER, 4)
    ranges = StageRanges([priced.rows], boxes(2, 2, overhead=1e-6), 2, gpt2.part.device.usable)
    orders = [CountedSchedule.of(pipeline_schedule(name, 2, 4, chunks)) for name, chunks in TRIED]
    found = (
        ranges.makespan(cuts, order, False)
        for order in orders
        for cuts in all_cuts(ranges.count, order.schedule.stages)
    )
    best = min(each[1] for each in found if each is not None)
    assert gpt2.makespan == pytest.approx(best)


def all_cuts(count: int, stages: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, count), stages - 1))


@pytest.mark.slow
def test_where_memory_is_short_stages_recompute_and_fit():
    """The fewer bytes there are, the longer the step, and every peak is within them."""
    machine = boxes(4, overhead=1e-6)
    wide = planned(GPT2, machine, 4, 8, ("gpipe", 1))
    assert not not_kept(wide.graph)
    makespans = [wide.makespan]
    for share in (0.9, 0.8, 0.7):
        memory = int(share * max(wide.peaks))
        short = planned(GPT2, with_memory(machine, memory), 4, 8, ("gpipe", 1))
        assert max(short.peaks) <= memory
        makespans.append(short.makespan)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(makespans))
    assert makespans[-1] > makespans[0]


@pytest.mark.slow
def test_recompute_that_is_said_is_marked():
    machine = boxes(4, overhead=1e-6)
    wide = planned(GPT2, machine, 4, 8, ("gpipe", 1))
    short = planned(GPT2, with_memory(machine, int(0.7 * max(wide.peaks))), 4, 8, ("gpipe", 1))
    assert not_kept(short.graph)
    assert cost(short.graph, short.part, OPTIMIZER).memory["activations"] < sum(wide.loads.live)


@pytest.mark.parametrize(
    ("model", "machine", "stages", "schedule", "said"),
    [
        (MLP, "box:4", 3, None, "3 parts: its leading mesh axes make no such number; use one of 1, 2, 4"),
        (MLP, "box:64", 64, None, r"64 stages of a graph that single values divide into \d+ units"),
        (MLP, "box:4", 2, ("2bw", 1), "2bw: not synchronous; use gpipe"),
        (MLP, "box:4", 2, ("zb-v", 1), "zb-v: 1 stages per rank; it is for 2"),
    ],
)
def test_what_cannot_be_planned(model: str, machine: str, stages: int, schedule: ScheduleKind | None, said: str):
    with pytest.raises(UnityError, match=said) as raised:
        pipeline_plan(from_text(model), load(machine), stages, 4, schedule)
    assert "\n" not in str(raised.value)


def test_nothing_fits():
    with pytest.raises(
        UnityError, match=r"^pipeline: no stages on 2 parts with 4 micro-batches fit devices of 1,000 bytes; use"
    ):
        planned(MLP, with_memory(boxes(4), 1000), 2, 4)


def test_the_part_is_the_machine_without_its_leading_axes(gpt2: PipelinePlan):
    assert gpt2.part == part(boxes(2, 2, overhead=1e-6), 2)
    graph: Graph = erase(gpt2.graph)
    assert graph.inputs[0].result.shape == (2, 64)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_the_longest_run_is_the_least_of_all_cuts(seconds: list[int], count: int):
    runs = (
        [sum(seconds[a:b]) for a, b in pairwise((0, *cuts, len(seconds)))]
        for parts in range(1, count + 1)
        for cuts in combinations(range(1, len(seconds)), parts - 1)
    )
    assert least_longest(seconds, count) == pytest.approx(min(map(max, runs)), rel=1e-5)
