"""Operators that are one kernel compute what they compute one by one, no later, and with no more memory than that."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import torch
from graphs import random_graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import machine
from operator_cases import DTYPES

from unity_ir.lowering.fusing import with_fusions
from unity_ir.lowering.kernels.launcher import launcher
from unity_ir.lowering.saving import with_savings
from unity_ir.lowering.spmd import Compute, Exchange, Fused, Leaf, Program, Reshard, lower
from unity_ir.lowering.tuning import Piece, piece_of
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, Optimizer
from unity_ir.search import run
from unity_ir.tdl.evaluate import evaluate

Arrays = dict[int, Any]


def in_triton(piece: Piece) -> str:
    return "triton"


def lowered(graph: Graph, where: str = "box:1", plan: str | None = None) -> Program:
    on = machine(where)
    placed = graph if plan is None else run(graph, on, plan).graph
    return with_savings(lower(fuse_collectives(differentiate(placed, Optimizer(), on.mesh)), on))


def fused(program: Program) -> list[Fused]:
    return [i for i in with_fusions(program, in_triton).body if isinstance(i, Fused)]


def values(program: Program, seed: int = 0) -> Arrays:
    """Every register of a program for one device, as its lines say, in float64 of float32 leaves."""
    rng, found = np.random.default_rng(seed), Arrays()
    for instruction in program.body:
        match instruction:
            case Leaf(op, result, _, value):
                tensor = program.tensors[result]
                integer = tensor.dtype in ("i64", "i32")
                made = rng.integers(0, 2, tensor.shape) if integer else rng.standard_normal(tensor.shape)
                found[result] = np.full(tensor.shape, value) if op == "constant" else np.asarray(made)
            case Compute(_, operands, results):
                line = program.local_line(instruction)
                found |= zip(results, evaluate(line, [found[r] for r in operands]), strict=True)
            case Reshard(operand, result) | Exchange(operand, result):
                found[result] = found[operand]
            case _:
                pass
    return found


def compare(program: Program, group: Fused, known: Mapping[int, Any], runner: Any, tolerance: float) -> None:
    piece = piece_of(program, group)
    made = launcher(piece.line, piece.dtypes, "triton", piece.divided)
    assert len(made.compiled) == len(made.launches)
    dtype = DTYPES[program.tensors[group.results[0]].dtype]
    given = [
        torch.from_numpy(np.asarray(known[r])).to(DTYPES[program.tensors[r].dtype]).contiguous() for r in group.operands
    ]
    for register, one in zip(group.results, runner.run(made, given, *(0 for _ in piece.divided)), strict=True):
        assert one.dtype == dtype
        expected = known[register]
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(one.double().numpy(), expected, rtol=tolerance, atol=tolerance * scale)


def test_random_groups(runner: Any) -> None:
    groups = list[str]()

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 10**6), st.integers(3, 12))
    def property(seed: int, size: int) -> None:
        program = lowered(random_graph(Random(seed), size, dims=(2, 3, 6), dtype="f32"))
        known = values(program, seed)
        for group in fused(program):
            compare(program, group, known, runner, 2e-5)
            groups.append(group.operator)

    property()
    assert len(set(groups)) > 10
