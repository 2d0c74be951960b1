"""Backwards of batch norms in two kernels, or one, with relu's mask computed from the samples again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_runner import runner
from models import data, weight
from torch.nn import functional as F

from unity_ir.kernels.launchers import launcher
from unity_ir.machine import load
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value, apply
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.groups import with_fusions
from unity_ir.plan.instructions import Compute, Leaf, UpdateWeight
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Program
from unity_ir.search.run import run

__all__ = ["runner"]

LONG, SHORT = (7, 3, 61, 61), (64, 64, 7, 7)


def normed(x: Value, name: str, groups: int = 1) -> Value:
    """A batch norm over each of some groups of the samples."""
    center = apply("batch_mean", [x], {"groups": groups}).result
    stats = apply("batch_stats", [x, center]).results
    channels = x.shape[1]
    w, b = weight(f"{name}.w", channels), weight(f"{name}.b", channels)
    return apply("batch_norm", [x, *stats, center, w, b], {"eps": 1e-5}).result


def block(shape: tuple[int, ...], ends: Sequence[str], groups: int = 1) -> Graph:
    """Scaled samples, normalised, and then by each of `ends`: `relu`, or `add` and relu."""
    x, y = data("x", *shape), data("y", *shape)
    h = apply("mul", [x.result, weight("scale", *shape)]).result
    for number, end in enumerate(ends):
        before = h
        h = normed(h, f"bn{number}", groups)
        h = apply("add", [h, before]).result if end == "add" else h
        h = apply("relu", [h]).result
    return Graph("block", (x, y), (apply("mse", [h, y.result]).result,))


def in_groups(graph: Graph) -> Program:
    """The program of a training step on one device, in groups."""
    on = load("box:1")
    return with_fusions(lower(differentiate(graph, Optimizer(), on.mesh), on), lambda _: "triton")


def operators(program: Program) -> list[str]:
    """The names of a program's kernels that have batch norms' gradients."""
    names = [i.operator for i in program.body if isinstance(i, Compute)]
    return [name for name in names if "_norm_" in name or "_stats_grad" in name]


MASK = "batch_norm + relu + relu_grad"


def test_two_kernels_read_samples_once_each() -> None:
    assert operators(in_groups(block(LONG, ["relu"]))) == [
        f"{MASK} + batch_norm_weight_grad",
        f"{MASK} + batch_norm_data_grad",
    ]


def by_kernels(program: Program, leaves: dict[str, torch.Tensor], runner: Any) -> dict[str, torch.Tensor]:
    """Run a program's kernels on its leaves; return the gradient of each weight."""
    known: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    for instruction in program.body:
        match instruction:
            case Leaf(op="constant", result=result, value=value):
                known[result] = torch.full(program.tensors[result].shape, value)
            case Leaf(name=name, result=result):
                known[result], names[result] = leaves[name], name
            case Compute(operands=read, results=results):
                one = local_operator(program, instruction)
                made = launcher(one.line, one.dtypes, "triton", one.divided)
                known |= zip(results, runner.run(made, [known[r] for r in read]), strict=True)
            case UpdateWeight(weight=updated, grad=grad):
                found[names[updated]] = known[grad]
            case _:
                raise AssertionError(instruction)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ends", [("relu",), ("relu", "add"), ("add", "add")])
@pytest.mark.parametrize("shape", [LONG, SHORT])
def test_gradients_are_those_of_pytorch(shape: tuple[int, ...], ends: Sequence[str], runner: Any) -> None:
    program = in_groups(block(shape, ends))
    assert not any("batch_norm_grad" in name or "stats_grad" in name for name in operators(program))
    draw = torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(shape, generator=draw) for name in ("x", "y", "scale")}
    for number in range(len(ends)):
        leaves |= {f"bn{number}.{v}": 1 + torch.randn(shape[1], generator=draw) / 4 for v in "wb"}
    found = by_kernels(program, leaves, runner)
    exact = {name: t.double().requires_grad_() for name, t in leaves.items()}
    h = exact["x"] * exact["scale"]
    for number, end in enumerate(ends):
        out = F.batch_norm(h, None, None, exact[f"bn{number}.w"], exact[f"bn{number}.b"], training=True)
        h = F.relu(out + h if end == "add" else out)
    F.mse_loss(h, exact["y"]).backward()
    assert {*found} == {*leaves} - {"x", "y"}
    for name, gradient in found.items():
        wanted = exact[name].grad
        assert wanted is not None
        assert float((gradient - wanted).norm() / wanted.norm()) < 2e-6, name


def test_groups_of_samples_stay_as_they_are() -> None:
    names = operators(in_groups(block((8, 3, 61, 61), ["relu"], groups=2)))
    assert any("batch_norm_grad" in name for name in names)
    assert not any("batch_norm_data_grad" in name for name in names)


def test_statistics_that_move_stay_as_they_are() -> None:
    """Sums over a batch on two devices are complete only after a collective, so its backward stays as it is."""
    on = load("box:2")
    placed = run(block((8, 3, 61, 61), ["relu"]), on, "data-parallel").graph
    program = with_fusions(lower(differentiate(placed, Optimizer(), on.mesh), on), lambda _: "triton")
    assert any("batch_norm_grad" in name for name in operators(program))
    assert not any("batch_norm_data_grad" in name for name in operators(program))
