"""Sums of columns in the kernels that make what is summed are those of kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from models import data, weight
from operator_cases import DTYPES

from unity_ir.forms.column_sums import column_sums, is_column_sum, with_common_variables
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton import column_sums as generator
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import Node, Value, apply
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.groups import with_fusions
from unity_ir.plan.instructions import Compute, Fused
from unity_ir.plan.local_operator import LocalOperator, local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Program
from unity_ir.tdl.syntax import Access, Bound, Reduce, Result, Var


def with_larger(h: Value, inputs: tuple[Node, ...]) -> Graph:
    """A loss of `h`, and of a tensor so large that the step's peak memory is not where sums of columns are."""
    rows = prod(h.shape[:-1])
    y, z = data("y", *h.shape), data("z", 4 * rows, h.shape[-1])
    large = apply("exp", [apply("tanh", [apply("mul", [z.result, weight("u", *z.result.shape)]).result]).result]).result
    losses = [apply("mse", [h, y.result]).result, apply("mse", [large, z.result]).result]
    return Graph("larger", (*inputs, y, z), (apply("add", losses).result,))


def normed(op: str, *shape: int) -> Graph:
    """Sum columns for gradients of a norm's weights, of a bias before it, and of scales."""
    x = data("x", *shape)
    before = apply("mul", [x.result, weight("scale", *shape)]).result
    vectors = [weight("w", shape[-1]), weight("b", shape[-1])][: 1 if op == "rms_norm" else 2]
    h = apply(op, [apply("add", [before, weight("bias", shape[-1])]).result, *vectors]).result
    return with_larger(h, (x,))


def activated(*shape: int) -> Graph:
    """An activation of a product and its bias."""
    x = data("x", *shape[:-1], 4)
    product = apply("matmul", [x.result, weight("v", 4, shape[-1])]).result
    return with_larger(apply("gelu", [apply("add", [product, weight("bias", shape[-1])]).result]).result, (x,))


def summed(*shape: int) -> Graph:
    """Elements that are not 0 where nothing is read, and their sums."""
    x, y = data("x", *shape), data("y", shape[-1])
    h = apply("exp", [apply("mul", [x.result, weight("scale", *shape)]).result]).result
    loss = apply("mse", [apply("reduce_sum", [h], {"dim": 0}).result, y.result]).result
    graph = with_larger(h, (x, y))
    return replace(graph, outputs=(apply("add", [loss, graph.outputs[0]]).result,))


CASES: Mapping[str, Callable[[], Graph]] = {
    # 603 rows are neither whole tiles nor whole programs.
    "layer_norm": lambda: normed("layer_norm", 3, 201, 20),
    "rms_norm": lambda: normed("rms_norm", 603, 32),
    "summed": lambda: summed(603, 20),
    # Two whole blocks of columns, and a part of one.
    "blocks": lambda: activated(5, 103, 70),
}


SUMS = {"layer_norm": 3, "rms_norm": 2, "summed": 1, "blocks": 1}
"""The sums of columns of each case, all in one kernel."""


def in_groups(graph: Graph) -> Program:
    """The program of a training step on one device, in groups."""
    on = load("box:1")
    return with_fusions(lower(differentiate(graph, Optimizer(), on.mesh), on), lambda _: "triton")


def summing(program: Program) -> list[tuple[Fused, LocalOperator]]:
    """The groups with sums of columns."""
    found = [i for i in program.body if isinstance(i, Fused) and "reduce_sum" in i.operator]
    return [(i, local_operator(program, i)) for i in found if any(m.operator != "cast" for m in i.members[1:])]


def by_kernel(program: Program, instruction: Compute, known: dict[int, torch.Tensor], runner: Any) -> None:
    """Add to what is known what an instruction's kernels make of it."""
    one = local_operator(program, instruction)
    made = launcher(one.line, one.dtypes, "triton", one.divided)
    known |= zip(instruction.results, runner.run(made, [known[r] for r in instruction.operands]), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_single_operators(
    name: str, dtype: str, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "WIDTH", 32)
    graph = mixed_precision(CASES[name](), "bf16") if dtype == "mixed" else CASES[name]()
    program = in_groups(graph)
    ((group, one),) = summing(program)
    made = launcher(one.line, one.dtypes, "triton", one.divided)
    assert [each.kind for each in made.work] == ["columns", "rows"]
    assert sum(i.operator == "reduce_sum" for i in group.members) == SUMS[name]
    assert not any(i.operator == "reduce_sum" for i in program.body if isinstance(i, Compute))
    generator_of_values = torch.Generator().manual_seed(0)
    together: dict[int, torch.Tensor] = {}
    for register in group.operands:
        tensor = program.tensors[register]
        together[register] = torch.randn(tensor.shape, generator=generator_of_values).to(DTYPES[tensor.dtype])
    alone = dict(together)
    by_kernel(program, group, together, runner)
    for member in group.members:
        by_kernel(program, member, alone, runner)
    tolerance = 2e-5 if dtype == "f32" else 3e-2
    for register in group.results:
        found, expected = together[register], alone[register]
        assert found.dtype == expected.dtype
        scale = float(expected.abs().max())
        assert scale > 0
        torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance * scale)


def most_sums(rows: int, columns: int) -> int:
    """The most sums of columns in a kernel of a layer norm's gradients."""
    found = [one for one in summing(in_groups(normed("layer_norm", rows, columns))) if "norm" in one[0].operator]
    made = [(group, launcher(one.line, one.dtypes, "triton", one.divided)) for group, one in found]
    sums = [[m.operator for m in g.members].count("reduce_sum") for g, each in made if each.work[0].kind == "columns"]
    return max(sums, default=0)


@pytest.mark.slow
def test_few_rows_and_long_ones_have_kernels_of_their_own() -> None:
    fewest, longest = generator.FEWEST_ROWS, generator.LONGEST
    assert most_sums(fewest, 8) == 3
    assert most_sums(fewest - 1, 8) == 0
    assert most_sums(fewest, longest + 1) == 1
    assert most_sums(fewest, 2 * longest + 1) == 0


def line(*results: Result, **extents: int) -> Bound:
    """A line over operands x and w."""
    return Bound("test", (), results, extents, {})


def read(*names: str) -> Access:
    return Access("x", tuple(map(Var, names)))


def test_results_get_variables_in_common() -> None:
    total = Result("b", (Var("e"),), Reduce("sum", (Var("k"),), read("k", "e")))
    own = line(Result("out", (Var("r"), Var("c")), read("r", "c")), total, r=8, c=4, k=8, e=4)
    assert column_sums(own) is None
    made = with_common_variables(own, {"k": (0,)})
    assert made is not None
    common, axes = made
    assert common.results[1] == Result("b", (Var("c"),), Reduce("sum", (Var("r"),), read("r", "c")))
    assert (dict(common.extents), axes) == ({"r": 8, "c": 4}, {"r": (0,)})
    form = column_sums(common)
    assert form is not None
    assert (form.rows, form.columns, form.has_statistics) == (("r",), ("c",), False)
    # A sum alone, one of another size, and one of what is read across are none.
    assert column_sums(line(common.results[1], r=8, c=4)) is None
    assert with_common_variables(line(own.results[0], total, r=8, c=4, k=9, e=4), {}) is None
    across = Result("b", (Var("c"),), Reduce("sum", (Var("r"),), read("c", "r")))
    assert column_sums(line(common.results[0], across, r=4, c=4)) is None
    assert is_column_sum(total)
    assert not is_column_sum(across)
