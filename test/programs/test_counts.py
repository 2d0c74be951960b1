"""Kernels of a program read and write as many bytes as its plan, and `--stats`, say: counted while it runs."""

from __future__ import annotations

import os

import pytest
from lowered import kernel_name
from models import machine
from ranks import Ranks, kernel_bytes
from zoo_plans import MACHINES, SIZES, of_type

from unity_ir.cost.lines import kernel_of_line, step_bytes, update_bytes
from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.graph import Optimizer
from unity_ir.pcg.sharding import pins
from unity_ir.plan.plan import plan_graph
from unity_ir.plan.program import Compute, UpdateWeight
from unity_ir.plan.schedule import piece_bytes
from unity_ir.search import run

ADAMW = Optimizer("adamw")
SAMPLE = [("mlp", "joint", 4, "mixed"), ("gpt2", "fsdp", 2, "mixed"), ("lenet", "data-parallel", 2, "f32")]
MORE = [
    (model, ("data-parallel", "fsdp", "joint")[i % 3], 2, ("f32", "mixed")[i // 3 % 2])
    for i, model in enumerate(sorted(SIZES))
]
CASES = [*SAMPLE, *MORE] if os.environ.get("ZOO") == "all" else SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "world", "dtype"), CASES)
def test_kernels_move_the_bytes_of_the_plan(ranks: Ranks, model: str, strategy: str, world: int, dtype: str):
    graph, on = of_type(build(model, **SIZES[model]), dtype), machine(MACHINES[world])
    plan = plan_graph(run(graph, on, strategy, ADAMW).graph, on, ADAMW)
    tensors = plan.program.tensors

    def is_here(register: int) -> bool:
        """Whether rank 0 has a piece; others may do other branches at the same time."""
        return all(coordinate == 0 for _, coordinate in pins(tensors[register].layout))

    computes = [line.action for line in plan.schedule.lines if isinstance(line.action, Compute)]
    computes = [c for c in computes if is_here(c.results[0])]
    names = sorted({kernel_name(plan, c) for c in computes})
    found = ranks.run(emit(plan, graph).text, world, kernel_bytes, names)[0]
    assert found == [kernel_of_line(plan.program, c).bytes for c in computes]
    weights = [i.weight for i in plan.program.body if isinstance(i, UpdateWeight) and is_here(i.weight)]
    counted = sum(found) + sum(update_bytes(piece_bytes(plan.program, w), ADAMW) for w in weights)
    assert counted <= step_bytes(plan) if any(pins(t.layout) for t in tensors.values()) else counted == step_bytes(plan)
