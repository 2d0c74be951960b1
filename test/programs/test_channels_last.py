"""Programs whose images have the channels last compute what those do that have them before rows and columns."""

from __future__ import annotations

import numpy as np
import pytest
from extent import ALL
from ranks import Ranks, trained
from zoo import SMALL
from zoo_plans import planned

from unity_ir.lowering.emit.printer import emit
from unity_ir.models import build
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program

CASES = [
    *[("lenet", "data-parallel", 2, "triton"), ("alexnet", "data-parallel/2", 1, "torch")],
    *[("alexnet", "expert", 2, "torch"), ("resnext50", "data-parallel", 2, "torch")],
]
MORE = [
    *[("resnet101", "data-parallel", 1, "torch"), ("wresnet", "fsdp", 2, "triton")],
    *[("inception_v3", "data-parallel", 1, "torch"), ("inception_v3", "spatial", 2, "torch")],
]


def images_last(program: Program) -> int:
    """The number of images that a program stores with the channels last."""
    return sum(tensor.is_channels_last for tensor in program.tensors.values())


@pytest.mark.parametrize(("model", "plan", "world", "convolution"), [*CASES, *(MORE if ALL else [])])
def test_gradients_are_those_of_channels_first(ranks: Ranks, model: str, plan: str, world: int, convolution: str):
    """In float32, convolutions by PyTorch and by the Triton kernel, the rest in the interpreter: loss and gradients."""
    graph = build(model, **{**SMALL[model], "batch": 4})
    step = planned(graph, plan, world, Optimizer("sgd", 1e-2))
    found = {}
    for channels in ("first", "last"):
        made = plan_step(step, PlanOptions(matmul="triton", convolution=convolution, channels=channels))
        assert (images_last(made.program) > 0) == (channels == "last")
        found[channels] = ranks.run(emit(made, graph).text, world, trained, 1, False)[0]
    first, last = found["first"], found["last"]
    np.testing.assert_allclose(last["losses"], first["losses"], rtol=1e-5)
    for name, wanted in first["gradients"][0].items():
        assert not last["apart"]
        largest = np.abs(wanted).max()
        np.testing.assert_allclose(last["gradients"][0][name], wanted, rtol=0, atol=1e-3 * largest + 1e-9, err_msg=name)


def test_images_whose_borders_are_exchanged_stay():
    """Halos are of images as they are: where rows are divided, all that operators connect with these is as it was."""
    step = planned(build("resnet101", **{**SMALL["resnet101"], "batch": 4}), "spatial", 2, Optimizer("sgd"))
    assert not images_last(plan_step(step, PlanOptions(channels="last")).program)


def test_images_of_a_step_in_stages_stay():
    """A stage's backward reads what its forward has made: both have one order."""
    graph = mixed_precision(build("alexnet", **{**SMALL["alexnet"], "batch": 4}), "bf16")
    made = plan_step(planned(graph, "1f1b,2:data-parallel/2", 2, Optimizer("sgd")), PlanOptions())
    assert made.parts
    assert not any(images_last(own.program) for _, own in made.parts)


def test_in_16_bits_they_are_last_unless_asked(ranks: Ranks):
    """In bf16 gradients differ by what rounding in another order makes."""
    serial = build("alexnet", **{**SMALL["alexnet"], "batch": 4})
    graph = mixed_precision(serial, "bf16")
    step = planned(graph, "data-parallel", 1, Optimizer("sgd", 1e-2))
    assert not images_last(plan_step(planned(serial, "data-parallel", 1, Optimizer())).program)
    found = {}
    for channels in ("first", "auto"):
        made = plan_step(step, PlanOptions(matmul="triton", channels=channels))
        assert (images_last(made.program) > 0) == (channels == "auto")
        found[channels] = ranks.run(emit(made, graph).text, 1, trained, 1, False)[0]
    for name, wanted in found["first"]["gradients"][0].items():
        apart = np.linalg.norm(found["auto"]["gradients"][0][name] - wanted) / np.linalg.norm(wanted)
        assert apart < 0.05, (name, apart)
