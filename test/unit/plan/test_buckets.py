"""Several tensors in one call are what they are in calls of their own; small moves share calls, wanted first first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extent import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unity_ir.lowering import runtime
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute, Leaf, ReshardMove
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.schedule import BUCKET_MEMBERS, schedule
from unity_ir.plan.scheduled import Bucket, Schedule
from unity_ir.search import run

WAYS = 3
COLLECTIVES = runtime.load(("collectives",), MESH=(WAYS,))


def everywhere(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What every rank gets when each calls a collective with arguments of its own."""
    started: list[tuple[Tensor, Tensor]] = []

    def start(out: Tensor, mine: Tensor, group: None, async_op: bool) -> SimpleNamespace:
        assert mine.is_contiguous()
        started.append((out, mine))
        return SimpleNamespace(wait=lambda: None)

    scope = function.__globals__
    scope["_all_gather"] = scope["_reduce_scatter"] = start
    ctx = SimpleNamespace(groups={(0,): None})
    pending = [function(ctx, *own, (0,)) for own in arguments]
    inputs = torch.stack([mine for _, mine in started])
    for rank, (out, _) in enumerate(started):
        gathers = "gather" in function.__name__
        out.copy_(inputs.flatten() if gathers else inputs.sum(0).chunk(WAYS)[rank])
    return [p.wait() for p in pending]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 2)), min_size=1, max_size=4)
)
@settings(max_examples=40)
def test_many_in_one_call_are_as_in_calls_of_their_own(tensors: list[tuple[list[int], int]]):
    dims = tuple(dim % len(shape) for shape, dim in tensors)
    generator = torch.Generator().manual_seed(0)
    for kind in ("all_gather", "reduce_scatter"):
        shapes = [
            [s * WAYS if kind == "reduce_scatter" and i == dim else s for i, s in enumerate(shape)]
            for (shape, _), dim in zip(tensors, dims, strict=True)
        ]
        ranks = [[torch.randint(9, shape, generator=generator) for shape in shapes] for _ in range(WAYS)]
        many = everywhere(getattr(COLLECTIVES, f"{kind}_many"), [(own, dims) for own in ranks])
        for i, dim in enumerate(dims):
            alone = everywhere(getattr(COLLECTIVES, kind), [(own[i], dim) for own in ranks])
            for found, want in zip(many, alone, strict=True):
                assert torch.equal(found[i], want)


def lowered(graph: Graph, where: str, strategy: str) -> tuple[Program, Graph]:
    machine = load(where)
    plan = run(graph, machine, strategy).graph
    step = fuse_collectives(differentiate(plan, Optimizer(), machine.mesh))
    return lower(step, machine), erase(replace(plan, updates=(), optimizer=None))


def buckets(found: Schedule, kind: str) -> list[tuple[int, Bucket]]:
    return [
        (i, a)
        for i, a in enumerate(line.action for line in found.lines)
        if isinstance(a, Bucket) and a.moves[0].kind == kind
    ]


def test_small_weights_are_gathered_in_the_order_they_are_wanted():
    program, _ = lowered(
        build("gpt2", batch=8, sequence=8, layers=6, hidden=64, heads=4, vocabulary=64), "box:4", "fsdp"
    )
    found = schedule(program, 8192)
    first: dict[int, int] = {}
    for i, line in reversed(list(enumerate(found.lines))):
        if isinstance(line.action, Compute):
            first.update(dict.fromkeys(map(found.held, line.action.operands), i))
    gathers = buckets(found, "all_gather")
    assert len(gathers) > 2
    wanted = [first[m.result] for _, bucket in gathers for m in bucket.moves]
    assert wanted == sorted(wanted)
    assert all(place < min(first[m.result] for m in bucket.moves) for place, bucket in gathers)
    assert all(len(bucket.moves) <= BUCKET_MEMBERS for _, bucket in gathers)
    scatters = buckets(found, "reduce_scatter")
    assert len(scatters) > 2
    # No gradient is kept to the end for want of others.
    assert scatters[0][0] < scatters[-1][0] - 20
    none = [line.action for line in schedule(program, 0).lines]
    assert not any(isinstance(a, Bucket) for a in none)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    moved = [
        m for line in found.lines for m in (line.action.moves if isinstance(line.action, Bucket) else (line.action,))
    ]
    assert {m for m in moved if isinstance(m, ReshardMove) and m.kind in kinds} == {
        a for a in none if isinstance(a, ReshardMove) and a.kind in kinds
    }
    assert any(isinstance(a, Leaf) for a in none)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "strategy"),
    sample([("box:4", "data-parallel"), ("box:8", "expert"), ("box:8", "fsdp"), ("box:8", "tofu")], 4, 1),
)
def test_the_program_of_a_24_layer_model_stays_readable(where: str, strategy: str):
    program, reference = lowered(build("bert_large"), where, strategy)
    text = emit(plan_step(program), reference).text
    own, fixed = text.split(runtime.text(("watchdog",)))
    assert own.count("\n") <= 3500
    # The same in every program, but for functions that no line calls: recipe, graphs, checks, checkpoints, data.
    assert fixed.count("\n") <= 2800
