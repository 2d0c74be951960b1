"""Tensors whose rows are unaligned are stored with padded rows, where all kernels that use them take strides."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unity_ir.forms.addresses import needs_int64
from unity_ir.forms.stored import with_rows
from unity_ir.kernels.launchers import launcher
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan import padded_rows
from unity_ir.plan.instructions import Fused
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line

BERT = {"batch": 2, "sequence": 4, "layers": 1, "hidden": 16, "heads": 2}


def planned(graph: Graph, **options: Any) -> Plan:
    machine = load("box:1")
    return plan_step(lower(differentiate(graph, Optimizer("sgd"), machine.mesh), machine), PlanOptions(**options))


def rows(plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """Shape and row of every padded tensor."""
    return sorted((t.shape, t.row) for t in plan.program.tensors.values() if t.row)


def model(vocabulary: int) -> Graph:
    return mixed_precision(build("bert_large", **BERT, vocabulary=vocabulary), "bf16")


@pytest.mark.slow
def test_logits_and_their_gradient_are_padded():
    assert rows(planned(model(259))) == [((2, 4, 259), 320), ((2, 4, 259), 320)]


def test_with_products_in_pytorch_their_operands_are_padded():
    assert rows(planned(model(259), matmul="torch")) == [((2, 4, 259), 320)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (model(264), {}),  # 528 bytes are aligned
        (model(101), {}),  # short rows
        (build("bert_large", **BERT, vocabulary=259), {}),  # float32 is copied element by element
        (model(259), {"kernels": "torch"}),
    ],
)
def test_others_are_not(graph: Graph, options: dict[str, Any]):
    assert rows(planned(graph, **options)) == []


def test_alike_products_of_which_one_is_padded():
    """Each has a function of its own: what reads the other knows no padded rows."""
    x, labels = leaf("input", tensor_type((8, 16), "bf16"), name="x"), leaf("input", tensor_type((8,), "i64"), name="t")
    logits, other = (
        apply("matmul", [x.result, leaf("weight", tensor_type((16, 259), "bf16"), name=name).result]).result
        for name in ("v", "w")
    )
    folded = apply("reshape", [other], {"shape": (8, 7, 37)}).result
    total = apply("reduce_mean", [folded], {"dim": 0, "count": 3}).result
    loss = apply("add", [apply("cross_entropy", [logits, labels.result]).result, total]).result
    graph = Graph("two", (x, labels), (loss,))
    plan = planned(graph, fuse=False, matmul="triton")
    assert {row for shape, row in rows(plan) if shape == (8, 259)} == {320}
    text = emit(plan, graph).text
    (step,) = re.findall(r"def forward_backward.*?\n\n\n", text, re.DOTALL)
    calls = re.findall(r"= (matmul_8x16_16x259\w*)\(", step)
    assert len(calls) == len({*calls}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["triton", "torch"])
def test_padding_changes_no_number(matmul: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from loading import compiled, module

    graph = model(259)

    def run(name: str) -> tuple[Any, ...]:
        path = tmp_path / f"{name}.py"
        program: Any = module(path, compiled(emit(planned(graph, matmul=matmul), graph).text, path))
        ctx = SimpleNamespace(device=torch.device("cpu"), index=lambda axes, position=0: position, at=lambda pins: True)
        return program.forward_backward(ctx, program.init_weights(ctx), program.Data().batch(0))

    # What lies beyond a row must not be read.
    new_empty, made = torch.Tensor.new_empty, list[tuple[int, ...]]()

    def spoiled(*args: Any, **more: Any) -> torch.Tensor:
        found = new_empty(*args, **more)
        made.append(tuple(found.shape))
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", spoiled)
    loss, grads = run("padded")
    assert any(shape[-1:] == (320,) for shape in made)
    monkeypatch.setattr(padded_rows, "FEWEST", 10_000)
    expected_loss, expected = run("plain")
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[n], g) for n, g in expected.items())


def test_what_is_beyond_rows_counts_for_addresses():
    """Of 2^31 elements in memory addresses have 64 bits, if the tensor itself has fewer, too."""
    line = bind(parse_line("f(x) out[m, n] = exp(x[m, n])"), ((42_700, 50_257),), {})
    assert not needs_int64(line)
    assert needs_int64(with_rows(line, {"x": 50_304}, (0,)))
    assert needs_int64(with_rows(line, {}, (50_304,)))


def test_a_matrix_read_transposed_has_nothing_beyond_its_columns(runner: Any):
    """Only along rows are there elements beyond the end."""
    line = bind(parse_line("f(x) out[i] = max[j](x[j, i] - x[i, j])"), ((300, 300),), {})
    made = launcher(with_rows(line, {"x": 320}, (0,)), ("bf16",))
    stored = torch.full((300, 320), float("nan"), dtype=torch.bfloat16)
    x = stored[:, :300]
    x.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal((300, 300))))
    (got,) = runner.run(made, [x], within=[stored])
    # The interpreter cuts bfloat16 off where it should round.
    torch.testing.assert_close(got.float(), (x.float().T - x.float()).amax(1), rtol=1e-2, atol=0)


def test_columns_of_padded_rows_are_summed_in_the_loss_s_gradient(runner: Any):
    """The gradient of a head's bias is summed where that of the logits is made; what lies beyond rows is not read."""
    samples, classes, row = 512, 259, 320
    x, t = (
        leaf("input", tensor_type((samples, 16), "f32"), name="x"),
        leaf("input", tensor_type((samples,), "i64"), name="t"),
    )
    w, b = (leaf("weight", tensor_type(s, "f32"), name=n).result for n, s in (("w", (classes, 16)), ("b", (classes,))))
    logits = apply("add", [apply("matmul_nt", [x.result, w]).result, b]).result
    graph = Graph("head", (x, t), (apply("cross_entropy", [logits, t.result]).result,))
    program = planned(mixed_precision(graph, "bf16"), matmul="triton").program
    (group,) = (i for i in program.body if isinstance(i, Fused) and "cross_entropy_saved_grad" in i.operator)
    assert group.operator == "cast + cross_entropy_saved_grad + cast + reduce_sum + cast"
    assert [program.tensors[r].row for r in (group.operands[0], group.results[0])] == [row, row]
    operator = local_operator(program, group)
    made = launcher(operator.line, operator.dtypes, "triton", operator.divided)
    stored = torch.full((samples, row), float("nan"), dtype=torch.bfloat16)
    stored[:, :classes] = torch.randn(samples, classes, generator=torch.Generator().manual_seed(0))
    given, ids = stored[:, :classes], torch.arange(samples) % classes
    one, logsum = torch.tensor(1.0), given.float().logsumexp(1)
    found, bias = runner.run(made, [given, one, ids, logsum], within=[stored])
    want = (given.float().softmax(1) - torch.nn.functional.one_hot(ids, classes)) / samples
    torch.testing.assert_close(found.float(), want, rtol=1.6e-2, atol=1e-6)
    torch.testing.assert_close(bias, want.sum(0), rtol=1e-4, atol=1e-7)
