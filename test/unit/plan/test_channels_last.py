"""Images are stored with the channels last, all together, where convolutions in 16 bits read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.models import build
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.node import apply, leaf
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import tensor_type
from unity_ir.plan.instructions import Compute, makes, reads
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search import run

PAIR = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}


def network(image: int = 8, channels: int = 16, of: str = "input") -> Graph:
    """Two convolutions, of nine taps and of one, and what is between them; of images that come in or are trained."""
    x = leaf(of, tensor_type((4, 3, image, image), "f32"), name="x").result
    first, second = (
        leaf("weight", tensor_type(s, "f32"), name=n).result
        for n, s in (("w", (channels, 3, 3, 3)), ("v", (8, channels, 1, 1)))
    )
    h = apply("relu", [apply("conv2d", [x, first], PAIR).result]).result
    h = apply("conv2d", [h, second], {**PAIR, "padding": (0, 0)}).result
    y = leaf("input", tensor_type((4, 8), "f32"), name="y").result
    out = apply("reduce_mean", [h], {"dim": 2, "count": 2}).result
    return Graph("network", (*([x.node] if of == "input" else []), y.node), (apply("mse", [out, y]).result,))


def planned(graph: Graph, machine: str = "dgx-h100:1x1", strategy: str = "data-parallel", **options: Any) -> Plan:
    on = load(machine)
    placed = run(graph, on, strategy, Optimizer("sgd")).graph
    return plan_step(
        lower(fuse_collectives(differentiate(placed, Optimizer("sgd"), on.mesh)), on), PlanOptions(**options)
    )


def last(program: Program) -> list[tuple[int, ...]]:
    return sorted(t.shape for t in program.tensors.values() if t.is_channels_last)


def test_images_and_a_copy_of_the_weight():
    """Not the input, nor weights of one tap, nor gradients of weights."""
    plan = planned(mixed_precision(network(), "bf16"), fuse=False)
    found = last(plan.program)
    assert found.count((16, 3, 3, 3)) == 1
    assert {(4, 16, 8, 8), (4, 8, 8, 8)} <= {*found}
    assert (8, 16, 1, 1) not in found
    inputs = {leaf.result for leaf in plan.program.leaves("input")}
    assert not any(plan.program.tensors[r].is_channels_last for r in inputs)


def test_nothing_but_operators_has_them():
    """Whatever else makes or reads a register knows of one order of dims: collectives, updates, files."""
    for model in ("resnet101", "inception_v3", "alexnet"):
        graph = mixed_precision(build(model, batch=8, image=64 if model != "inception_v3" else 96), "bf16")
        for machine, strategy in (
            ("dgx-h100:1x1", "data-parallel"),
            ("dgx-h100:1x4", "expert"),
            ("dgx-h100:1x4", "fsdp"),
        ):
            program = planned(graph, machine, strategy).program
            others = (i for i in program.body if not isinstance(i, Compute))
            touched = {r for i in others for r in (*makes(i), *reads(i))} | {*program.outputs}
            assert last(program)
            assert not any(program.tensors[r].is_channels_last for r in touched)


def test_not_in_32_bits_unless_asked():
    assert not last(planned(network()).program)
    assert last(planned(network(), channels="last").program)
    assert not last(planned(mixed_precision(network(), "bf16"), channels="first").program)
    assert not last(planned(mixed_precision(network(), "bf16"), eager=True).program)


def test_kernels_in_pytorch_are_as_written():
    assert not last(planned(mixed_precision(network(), "bf16"), kernels="torch").program)


def test_padded_rows_are_those_of_other_tensors():
    """Rows of 257 columns would be padded where these are last."""
    graph = mixed_precision(network(image=257, channels=257), "bf16")
    assert last(planned(graph).program)
    assert not any(t.row for t in planned(graph).program.tensors.values())


def test_gradients_of_small_images_are_no_images():
    """With images of 3 x 3 and windows of 3 x 3 the weight's gradient has the form of a convolution, and is none."""
    plan = planned(mixed_precision(network(image=3), "bf16"), fuse=False)
    updated = {(16, 3, 3, 3): 1}
    assert {shape: last(plan.program).count(shape) for shape in updated} == updated


def test_heads_are_no_channels():
    """A reshape that divides channels among heads makes a tensor that is stored in the order of its dims."""
    x, y = (leaf("input", tensor_type((4, 16, 8, 8), "f32"), name=n).result for n in "xy")
    w = leaf("weight", tensor_type((16, 16, 3, 3), "f32"), name="w").result
    heads = apply("reshape", [apply("conv2d", [x, w], PAIR).result], {"shape": (4, 2, 8, 64)}).result
    again = apply("reshape", [apply("relu", [heads]).result], {"shape": (4, 16, 8, 8)}).result
    loss = apply("mse", [apply("relu", [apply("conv2d", [again, w], PAIR).result]).result, y]).result
    graph = mixed_precision(Graph("heads", (x.node, y.node), (loss,)), "bf16")
    found = last(planned(graph, fuse=False).program)
    assert (4, 2, 8, 64) not in found
    assert (4, 16, 8, 8) in found


def test_trained_images():
    """The gradient of an image is one, which its update reads as the image rests; so it is cast before."""
    program = planned(mixed_precision(network(channels=256, of="weight"), "bf16")).program
    read = {r for i in program.body if not isinstance(i, Compute) for r in reads(i)}
    assert last(program)
    assert not any(program.tensors[r].is_channels_last for r in read)


def test_weights_that_others_read_are_copied():
    """Where a sum reads the cast of a weight as well, convolutions read a copy of the cast."""
    x, y = (leaf("input", tensor_type(s, "f32"), name=n).result for n, s in (("x", (4, 3, 8, 8)), ("y", (4, 16, 8, 8))))
    w = leaf("weight", tensor_type((16, 3, 3, 3), "f32"), name="w").result
    loss = apply("mse", [apply("conv2d", [x, w], PAIR).result, y]).result
    for _ in range(4):
        w = apply("reduce_mean", [w], {"dim": 0}).result
    graph = mixed_precision(Graph("decayed", (x.node, y.node), (apply("add", [loss, w]).result,)), "bf16")
    found = [t for t in planned(graph, fuse=False).program.tensors.values() if t.shape == (16, 3, 3, 3)]
    assert {t.is_channels_last for t in found if t.dtype == "bf16"} == {False, True}


def test_refused():
    with pytest.raises(UnityError, match="channels is 'middle'; it must be auto, last or first"):
        PlanOptions(channels="middle")
    assert replace(PlanOptions(), channels="last") != PlanOptions()
