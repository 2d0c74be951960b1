"""Attention around a ring: where it is possible, and how its lines are ordered, priced and said in text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from graphs import boxes

from unity_ir.cost.plan import cost
from unity_ir.errors import UnityError
from unity_ir.machine import Machine
from unity_ir.models import build
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.freeze import freeze
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.materialise import materialise
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment, pinned_at
from unity_ir.pcg.striped import striped
from unity_ir.plan.instructions import Compute, ReshardMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import plan_graph
from unity_ir.plan.program import Program
from unity_ir.plan.rings import rings, seen_in_turn, with_rings
from unity_ir.plan.schedule import schedule
from unity_ir.plan.scheduled import Wait
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.pipeline.staged import Stages
from unity_ir.simulate.report import as_emitted

SIZES = {"batch": 4, "sequence": 64, "layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64}
EIGHT = boxes(2, 2, 2)
ADAMW = Optimizer("adamw")


def placed(degrees: Degrees, machine: Machine = EIGHT, model: str = "gpt2", **sizes: int) -> Graph:
    return recipe(build(model, **{**SIZES, **sizes}), machine, degrees)


def lowered(graph: Graph, machine: Machine = EIGHT) -> Program:
    return lower(training_step(graph, ADAMW, machine.mesh), machine)


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        (Degrees(cp=8), (0, 1, 2)),
        (Degrees(cp=4), (1, 2)),
        (Degrees(cp=2, tp=2, sp=True), (1,)),
        (Degrees(cp=4, tp=2, zero=3), (0, 1)),
        (Degrees(cp=4, stripes=True), (1, 2)),
        (Degrees(tp=4, sp=True), None),
    ],
)
def test_every_layer_stays_divided_the_devices_of_cp(degrees: Degrees, axes: tuple[int, ...] | None):
    program = lowered(placed(degrees))
    found = rings(program)
    assert [ring.axes for ring in found] == ([] if axes is None else [axes] * 2)
    if axes is None:
        assert with_rings(program) is program
        return
    made = with_rings(program)
    pieces = 2 ** len(axes)
    kinds = [i.kind for i in made.body if isinstance(i, ReshardMove)]
    # Keys and values, forward and backward, and gradients of both, of which the last goes home.
    assert kinds.count("ring_shift") == 2 * (4 * (pieces - 1) + 2 * pieces)
    gathered = {v for r in found for i in (*r.forwards, *r.backwards) for v in i.operands}
    assert not any(isinstance(i, ReshardMove) and i.kind == "all_gather" and i.result in gathered for i in made.body)
    # What a device holds at once of keys and values are pieces, not the sequence.
    assert max(made.tensors[i.result].bytes(made.mesh) for i in made.body if isinstance(i, ReshardMove)) <= max(
        program.tensors[i.result].bytes(program.mesh) for i in program.body if isinstance(i, ReshardMove)
    )


@pytest.mark.parametrize("model", ["gpt2", "llama3_8b", "bert_large"])
def test_stages_of_a_pipeline_have_rings_of_their_own(model: str):
    sizes = {**SIZES, **({"kv_heads": 2, "intermediate": 32} if model == "llama3_8b" else {})}
    how = {"micro_batches": 2, "stages": Stages(2, "1f1b"), "options": {"cp": 2, "ring": True}}
    plan = run(build(model, **sizes), EIGHT, "degrees", ADAMW, **how).graph
    made = with_rings(lowered(plan))
    assert [ring.axes for ring in rings(lowered(plan))] == [(2,)] * 2
    assert Counter(
        made.tensors[i.result].layout[0] for i in made.body if isinstance(i, ReshardMove) and i.kind == "ring_shift"
    ) == {pinned_at(0): 8, pinned_at(1): 8}


@pytest.mark.parametrize(
    ("trained", "shifts"),
    [("*q_proj*", 4), ("*k_proj*", 6), ("*v_proj*", 6), ("*q_proj*,!*v_proj*", 6), ("*k_proj*,!*v_proj*", 8)],
)
def test_gradients_that_frozen_weights_leave_unread_do_not_go_around(trained: str, shifts: int):
    """In each direction keys and values go one place, and in the backward the gradients that are read two."""
    graph = freeze(build("llama3_8b", **{**SIZES, "layers": 1, "kv_heads": 2, "intermediate": 32}), f"*,!{trained}")
    plan = recipe(graph, EIGHT, Degrees(cp=2, ring=True))
    made = with_rings(lowered(plan))
    kinds = Counter(i.kind for i in made.body if isinstance(i, ReshardMove))
    assert kinds["ring_shift"] == shifts


def test_what_cannot_go_around_is_gathered():
    assert rings(lowered(placed(Degrees(cp=4, stripes=True)))) != ()
    # Two stripes to a device: what a query sees of a piece is no range of it.
    assert all(ring.axes == (0, 1, 2) for ring in rings(lowered(placed(Degrees(cp=8, stripes=True)))))
    graph = build("gpt2", **SIZES)
    two = recipe(striped(graph, 8, 2), EIGHT, Degrees(cp=4))
    assert rings(lowered(two)) == ()
    # Queries other than the keys' sequence: of more devices than a step has lines for.
    many = boxes(2, 2, 2, 2, 2)
    assert rings(lowered(placed(Degrees(cp=32), many), many)) == ()
    assert rings(lowered(placed(Degrees(cp=16), many), many)) != ()


def test_gathers_that_others_read_stay():
    program = lowered(placed(Degrees(cp=8)))
    ring = rings(program)[0]
    keys = ring.forwards[0].operands[1]
    more = len(program.tensors)
    extra = Compute("neg", (keys,), (more,), (), program.tensors[keys].layout)
    tensors = {**program.tensors, more: program.tensors[keys]}
    changed = replace(program, tensors=tensors, body=(*program.body, extra))
    assert [r.forwards for r in rings(changed)] == [r.forwards for r in rings(program)[1:]]


def test_pieces_are_under_way_beside_attention():
    """Each hand-on of keys and values starts before the attention to what is there, and is waited for after it."""
    program = with_rings(lowered(placed(Degrees(cp=8, zero=1))))
    lines = [line.action for line in schedule(program).lines]
    attention = [n for n, a in enumerate(lines) if isinstance(a, Compute) and a.operator.startswith("attention_part")]
    reads = {r for n in attention for r in lines[n].operands}
    started = {a.result: n for n, a in enumerate(lines) if isinstance(a, ReshardMove) and a.kind == "ring_shift"}
    waited = {r: n for n, a in enumerate(lines) if isinstance(a, Wait) for r in a.registers}
    handed_on = [r for r in started if r in reads]
    assert len(handed_on) == 2 * 2 * 2 * 7
    for register in handed_on:
        assert any(started[register] < n < waited[register] for n in attention)
    # The backward's go around in the backward.
    half = next(n for n, a in enumerate(lines) if isinstance(a, Compute) and a.operator == "cross_entropy")
    assert sum(started[r] > half for r in handed_on) == len(handed_on) // 2


def test_it_is_priced_as_it_is_emitted():
    """A ring takes less time than a gather, which attention waits for, and less memory than the whole sequence."""
    machine = boxes(2, 2, bandwidth=1e10)
    graph = build("gpt2", **{**SIZES, "sequence": 16384, "hidden": 256, "batch": 1})
    plan = recipe(graph, machine, Degrees(cp=4, stripes=True))
    without, peak = as_emitted(plan, machine, ADAMW)[:2]
    around, lower_peak = as_emitted(replace(plan, ring_attention=True), machine, ADAMW)[:2]
    assert around < without
    assert lower_peak < peak
    # Of keys and values, which the backward reads, each device keeps its own piece, which it has in either case.
    before, after = (cost(replace(plan, ring_attention=ring), machine, ADAMW).memory_bytes for ring in (False, True))
    assert before - after == 2 * 2 * 16384 * 256 * 4


@pytest.mark.zoo
@pytest.mark.slow
def test_the_joint_search_takes_it_where_it_is_faster():
    machine = boxes(2, 2, bandwidth=2e10)
    graph = build("gpt2", **{**SIZES, "sequence": 16384, "layers": 1, "hidden": 256, "heads": 1, "batch": 1})
    found, without = (run(graph, machine, "joint", ADAMW, options) for options in ({}, {"ring": False}))
    assert found.graph == replace(without.graph, ring_attention=True)
    assert as_emitted(found.graph, machine, ADAMW)[0] < as_emitted(without.graph, machine, ADAMW)[0]
    assert not erase(found.graph).ring_attention
    assert found.bound == without.bound


def test_a_part_of_the_scores_is_what_a_turn_sees():
    """The attribute that prices go by, against all pairs of positions."""
    for pieces, rounds, block in ((4, 1, 8), (4, 3, 4), (2, 8, 1)):
        length = rounds * block
        positions = [[(r * pieces + p) * block + x for r in range(rounds) for x in range(block)] for p in range(pieces)]
        for turn in range(pieces):
            parts = [
                sum(k <= q for q in positions[p] for k in positions[(p - turn) % pieces]) / length**2
                for p in range(pieces)
            ]
            assert seen_in_turn(turn, length, block) == pytest.approx(max(parts))


def test_degrees_need_a_sequence_to_divide():
    with pytest.raises(UnityError, match=r"^degrees: ring=true hands keys and values on over the devices of cp"):
        Degrees(ring=True)
    assert placed(Degrees(cp=2, ring=True)).ring_attention
    assert not placed(Degrees(cp=2)).ring_attention


def test_a_plan_has_it_where_its_graph_says_so():
    for degrees in (Degrees(cp=8), Degrees(cp=8, ring=True)):
        plan = plan_graph(placed(degrees), EIGHT, ADAMW)
        names = {i.operator for i in plan.program.body if isinstance(i, Compute)}
        assert any("attention_part" in name for name in names) == degrees.ring


def test_what_memory_counts_as_going_around_does():
    """Memory counts no keys or values as going around that the step gathers, whatever layouts they come in."""
    graph, machine = build("gpt2", **{**SIZES, "sequence": 16, "layers": 1}), boxes(2, 2)
    counted = around = 0
    for seed in range(60):
        random = Random(seed)

        def divided(node: Node, random: Random = random) -> Assignment:
            if node.op.startswith("attention"):
                return ("i", "i")
            may: list[str | int] = [REPEAT]
            may += node.analysis.splittable if node.op in ("split_heads", "split", "matmul", "add") else ()
            found: list[str | int] = []
            for what in random.choices(may, k=2):
                size = node.analysis.bound.extents.get(str(what), 1) // 2 ** found.count(what)
                found.append(what if size % 2 == 0 else REPEAT)
            return tuple(found)

        plan = materialise(graph, {n: divided(n) for n in graph.nodes() if n.is_compute}, machine.mesh)
        plan = replace(plan, ring_attention=True)
        marked = sum(reshard.stays_divided for reshard in cost(plan, machine, ADAMW).reshards)
        found = len(rings(lowered(plan, machine)))
        assert marked <= 2 * found
        counted, around = counted + marked, around + found
    assert 0 < counted <= 2 * around
