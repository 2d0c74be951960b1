"""A backward reads what its forward saved where both have the same pieces, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import attention, machine, mlp

from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.plan.saved_softmax import with_savings
from unity_ir.search import run


def program(graph: Graph, where: str, plan: str) -> Program:
    on = machine(where)
    return lower(differentiate(run(graph, on, plan).graph, Optimizer(), on.mesh), on)


def operators(of: Program) -> list[str]:
    return [i.operator for i in of.body if isinstance(i, Compute) and "attention" in i.operator]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "plan"), [("ideal:2", "data-parallel"), ("ideal:2x2", "joint")])
def test_a_backward_reads_what_its_forward_saved(where: str, plan: str) -> None:
    before = program(attention(), where, plan)
    assert operators(before) == ["attention", "attention_grad"]
    after = with_savings(before)
    assert operators(after) == ["attention_saving", "attention_saved_grad"]
    forward, backward = (i for i in after.body if isinstance(i, Compute) and "attention" in i.operator)
    assert backward.operands[-2:] == forward.results
    saved = after.tensors[forward.results[1]]
    assert saved.dtype == "f32"
    assert saved.shape == after.tensors[forward.results[0]].shape[:3]
    assert after.tensors.keys() >= before.tensors.keys()
    assert with_savings(after) == after


def test_programs_without_kernels_save_nothing_and_others_do() -> None:
    graph = attention()
    made = program(graph, "ideal:2", "data-parallel")
    assert "attention_saving" in emit(plan_step(made), graph).text
    assert "attention_saving" not in emit(plan_step(made, PlanOptions(kernels="torch")), graph).text


@pytest.mark.parametrize(("where", "plan"), [("ideal:2", "data-parallel"), ("ideal:1", "data-parallel")])
def test_a_loss_saves_the_logarithms_of_its_rows(where: str, plan: str) -> None:
    """The loss is an addend where samples are divided, but its gradient does not read it."""
    after = with_savings(program(mlp(), where, plan))
    forward, backward = (i for i in after.body if isinstance(i, Compute) and "cross_entropy" in i.operator)
    assert (forward.operator, backward.operator) == ("cross_entropy_saving", "cross_entropy_saved_grad")
    assert backward.operands[-1:] == forward.results[1:]
    whole, saved = (after.tensors[r] for r in (forward.operands[0], forward.results[1]))
    assert (saved.dtype, saved.local(after.mesh)) == ("f32", whole.local(after.mesh)[:-1])


def test_classes_that_are_divided_save_nothing() -> None:
    """The sums of pieces of a row are addends of the row's."""
    made = program(mlp(), "ideal:2", "data-parallel")
    body = tuple(
        replace(i, assignment=("c",) * len(i.assignment)) if isinstance(i, Compute) and "entropy" in i.operator else i
        for i in made.body
    )
    changed = replace(made, body=body)
    assert with_savings(changed) == changed


@pytest.mark.parametrize("change", ["operands", "assignment", "attributes"])
def test_another_forward_is_left_alone(change: str) -> None:
    """Attention on other operands, divided otherwise, or of another scale has made other sums."""
    made = program(attention(), "ideal:2", "data-parallel")
    body = list(made.body)
    (at,) = (k for k, i in enumerate(body) if isinstance(i, Compute) and i.operator == "attention")
    forward = body[at]
    assert isinstance(forward, Compute)
    others = {
        "operands": {"operands": forward.operands[::-1]},
        "assignment": {"assignment": ("h",) * len(forward.assignment)},
        "attributes": {"attributes": (("causal", 0), ("scale", 0.5))},
    }
    body[at] = replace(forward, **others[change])  # pyright: ignore[reportArgumentType]
    changed = replace(made, body=tuple(body))
    assert with_savings(changed) == changed


def test_a_backward_divided_otherwise_is_left_alone() -> None:
    made = program(attention(), "ideal:2", "data-parallel")
    body = tuple(
        replace(i, assignment=("h",) * len(i.assignment))
        if isinstance(i, Compute) and i.operator == "attention_grad"
        else i
        for i in made.body
    )
    changed = replace(made, body=body)
    assert with_savings(changed) == changed


def test_a_divided_value_saves_nothing() -> None:
    """Pieces along the values' features would each make the same sums, not parts of them."""
    made = program(attention(), "ideal:2", "data-parallel")
    body = tuple(
        replace(i, assignment=("d",) * len(i.assignment)) if isinstance(i, Compute) and "attention" in i.operator else i
        for i in made.body
    )
    changed = replace(made, body=body)
    assert with_savings(changed) == changed
