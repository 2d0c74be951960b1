"""Kernels of a program read and write as many bytes as its plan, and `--stats`, say: counted while it runs."""

from __future__ import annotations

import os

import pytest
from extent import sample
from lowered import kernel_name
from models import cnn, machine
from ranks import Ranks, copies, kernel_bytes
from test_halos import spatial
from zoo_plans import MACHINES, SIZES, of_type, planned

from unity_ir.cost.kernels import kernel_of_line, step_bytes, update_bytes
from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import pins_of
from unity_ir.plan.copies import copies as copied
from unity_ir.plan.instructions import Compute, TimeStep, UpdateWeight
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph, plan_step
from unity_ir.plan.scheduled import Start, moves_of
from unity_ir.search import run

ADAMW = Optimizer("adamw")
SAMPLE = [("mlp", "joint", 4, "mixed"), ("gpt2", "fsdp", 2, "mixed"), ("lenet", "data-parallel", 2, "f32")]
SAMPLE += [("gpt2", "degrees", 2, "mixed")]
MORE = [
    (model, ("data-parallel", "fsdp", "joint")[i % 3], 2, ("f32", "mixed")[i // 3 % 2])
    for i, model in enumerate(sorted(SIZES))
]
CALLS = [f"{c.function}{many}" for r in COLLECTIVES.values() for c in r.calls.values() if c for many in ("", "_many")]
CASES = [*SAMPLE, *MORE] if os.environ.get("ZOO") == "all" else SAMPLE


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "world", "dtype"), CASES)
def test_kernels_move_the_bytes_of_the_plan(ranks: Ranks, model: str, strategy: str, world: int, dtype: str):
    graph, on = of_type(build(model, **SIZES[model]), dtype), machine(MACHINES[world])
    options = {"cp": world, "ring": True} if strategy == "degrees" else None
    plan = plan_graph(run(graph, on, strategy, ADAMW, options).graph, on, ADAMW)
    tensors = plan.program.tensors

    def is_here(register: int) -> bool:
        """Whether rank 0 has a piece; others may do other branches at the same time."""
        return all(coordinate == 0 for _, coordinate in pins_of(tensors[register].layout))

    computes = [line.action for line in plan.schedule.lines if isinstance(line.action, Compute)]
    computes = [c for c in computes if is_here(c.results[0])]
    names = sorted({kernel_name(plan, c) for c in computes})
    found, casts = ranks.run(emit(plan, graph).text, world, kernel_bytes, names, quick=False)[0]
    assert found == [kernel_of_line(plan.program, c).bytes for c in computes]
    updates = [i for i in plan.program.body if isinstance(i, UpdateWeight) and is_here(i.weight)]
    # Some gradients have 16 bits until the update.
    sizes = [[plan.program.bytes[r] for r in (i.weight, i.grad)] for i in updates]
    counted = sum(found) + sum(update_bytes(weight, ADAMW, 0, grad) for weight, grad in sizes) + casts
    assert bool(casts) == (dtype == "mixed")
    assert (
        counted <= step_bytes(plan) if any(pins_of(t.layout) for t in tensors.values()) else counted == step_bytes(plan)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), [("mlp", "fsdp"), ("gpt2", "joint")])
def test_a_loop_over_micro_batches_moves_the_bytes_of_the_plan(ranks: Ranks, model: str, strategy: str):
    # Of one layer: most of the time is the search's.
    keys = SIZES[model] | ({"layers": 1} if model == "gpt2" else {})
    graph, on, count = of_type(build(model, **keys), "mixed"), machine(MACHINES[2]), 4
    plan = plan_graph(run(graph, on, strategy, ADAMW, micro_batches=count).graph, on, ADAMW)
    program = plan.program
    computes = [
        (line.action, number > 0)
        for number in range(count)
        for line in plan.schedule.lines
        if isinstance(line.action, Compute)
        and (line.when == "every" or number == {"first": 0, "last": count - 1}[line.when])
    ]
    names = sorted({kernel_name(plan, c) for c, _ in computes})
    found, casts = ranks.run(emit(plan, graph).text, 2, kernel_bytes, names, quick=False)[0]
    # Products add to gradients of earlier micro-batches, which they read.
    assert (len(program.added) > 0) == (strategy == "joint")
    assert found == [kernel_of_line(program, c).bytes + again * plan.added_bytes(c) for c, again in computes]
    sums = [i for i in program.body if isinstance(i, TimeStep) and i.kind == "accumulate"]
    added = sum(size for step in sums for size in plan.time_step_bytes(step))
    updated = [program.bytes[i.weight] for i in program.body if isinstance(i, UpdateWeight)]
    assert sum(found) + added + sum(update_bytes(size, ADAMW) for size in updated) + casts == step_bytes(plan)


COPYING = [
    ("mlp", "random-0", 4, 0),
    ("gpt2", "random-1", 8, 0),
    ("mlp", "pinned-3", 4, 0),
    ("mlp", "pinned-0", 4, 2**20),
    ("bert_large", "data-parallel", 2, 2**20),
    ("gpt2", "fsdp", 4, 2**20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "world", "bucket"), sample(COPYING, 3))
def test_collectives_copy_what_is_simulated(ranks: Ranks, model: str, strategy: str, world: int, bucket: int):
    graph = build(model, **SIZES[model])
    program = planned(graph, strategy, world, ADAMW)
    plan = plan_step(program, PlanOptions(kernels="torch", bucket=bucket))
    for rank, found in enumerate(ranks.run(emit(plan, graph).text, world, copies, CALLS, quick=False)):
        assert found == expected_copies(plan, rank)


@pytest.mark.slow
def test_halos_copy_what_is_simulated(ranks: Ranks):
    plan = plan_step(spatial(("y", "y")), PlanOptions(kernels="torch"))
    first, inner, *_ = ranks.run(emit(plan, cnn()).text, 4, copies, CALLS, quick=False)
    assert inner == expected_copies(plan, 1)
    assert any(kernels >= 4 for kernels, *_ in inner)
    assert len(first) == len(inner)
    assert all(a <= b for one, other in zip(first, inner, strict=True) for a, b in zip(one, other, strict=True))


def expected_copies(plan: Plan, rank: int) -> list[tuple[int, int, int, int]]:
    """
    Per collective that copies something on a rank: kernels and bytes before it, kernels and bytes after it; but for
    copies of what is still wanted before an all-reduce, which the program's text shows.
    """
    tensors, at = plan.program.tensors, plan.program.mesh.coordinates(rank)
    found: list[tuple[int, int, int, int]] = []
    for line in plan.schedule.lines:
        if isinstance(line.action, Start):
            first = moves_of(line.action)[0]
            ends = (first.operand, first.result)
            here = (all(at[i] == c for i, c in pins_of(tensors[r].layout)) for r in ends)
            both = copied(plan.program, line.action, tensors.keys())
            found.append(tuple(n for is_here, c in zip(here, both) for n in (c.kernels * is_here, c.bytes * is_here)))
    return [each for each in found if any(each)]
