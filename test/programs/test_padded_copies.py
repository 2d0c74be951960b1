"""Large products read padded copies of what moves make with unaligned rows, and make the same numbers of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import machine
from ranks import Ranks, gradients

from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.types import tensor_type
from unity_ir.plan import padded_rows
from unity_ir.plan.instructions import Compute, ReshardMove
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph
from unity_ir.search import run


def head(vocabulary: int) -> Graph:
    """Logits, by a weight whose rows are as long as the vocabulary."""
    x, labels = (
        leaf("input", tensor_type((32, 16), "f16"), name="x"),
        leaf("input", tensor_type((32,), "i64"), name="t"),
    )
    weight = leaf("weight", tensor_type((16, vocabulary), "f16"), name="w")
    loss = apply("cross_entropy", [apply("matmul", [x.result, weight.result]).result, labels.result]).result
    return Graph("head", (x, labels), (loss,))


def planned(vocabulary: int, strategy: str = "fsdp", **options: Any) -> Plan:
    on = machine("2gpu")
    return plan_graph(run(head(vocabulary), on, strategy).graph, on, options=PlanOptions(**options))


def copies(plan: Plan) -> list[tuple[Compute, int]]:
    """Every cast to the type that its operand has, with the elements of a row of its result."""
    tensors = plan.program.tensors
    casts = [i for i in plan.program.body if isinstance(i, Compute) and "cast" in i.operator]
    alike = [i for i in casts if tensors[i.operands[0]].dtype == tensors[i.results[0]].dtype]
    return [(i, tensors[i.results[0]].row) for i in alike]


def test_a_gathered_weight_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies(planned(259)) == []
    monkeypatch.setattr(padded_rows, "WORTH_A_COPY", 16)
    plan = planned(259)
    ((copy, row),) = copies(plan)
    assert row == 320
    moved = {i.result for i in plan.program.body if isinstance(i, ReshardMove)}
    assert {*copy.operands} <= moved
    readers = [i for i in plan.program.body if isinstance(i, Compute) and copy.results[0] in i.operands]
    assert [i.operator for i in readers] == ["matmul"]
    assert copies(planned(264)) == []
    assert copies(planned(259, kernels="torch")) == []


def test_a_weight_is_copied_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_rows, "WORTH_A_COPY", 16)
    plan = planned(259, "data-parallel")
    ((copy, _),) = copies(plan)
    moves = {i.result: i.operand for i in plan.program.body if isinstance(i, ReshardMove)}
    assert {moves.get(r, r) for r in copy.operands} == {i.result for i in plan.program.leaves("weight")}
    lines = [line.action for line in plan.schedule.lines]
    assert lines.index(copy) + 1 == next(k for k, i in enumerate(lines) if isinstance(i, Compute) and i != copy)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "matmul"), [("fsdp", "triton"), ("fsdp", "torch"), ("data-parallel", "triton")])
def test_a_copy_changes_no_number(ranks: Ranks, strategy: str, matmul: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = emit(planned(259, strategy, matmul=matmul), head(259)).text
    monkeypatch.setattr(padded_rows, "WORTH_A_COPY", 16)
    copied = emit(planned(259, strategy, matmul=matmul), head(259)).text
    assert "# cast [16, 259]" in copied
    assert "# cast [16, 259]" not in plain
    (*_, loss, found), (*_, expected_loss, expected) = (ranks.run(text, 2, gradients)[0] for text in (copied, plain))
    assert loss == expected_loss
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], each) for name, each in expected.items())
