"""Programs whose images are divided along rows and columns: borders are exchanged, their gradients added up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from models import by_hand, cnn, cnn_torch, machine
from ranks import Ranks, check, gradients
from zoo_plans import divided

from unity_ir.dialects.convert_program import from_op, to_op
from unity_ir.lowering.emit.printer import emit
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import HaloExchange
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.tdl.parallel import Configuration, operand_degrees


def spatial(wanted: tuple[str, ...]) -> Program:
    on = machine("ideal:" + "x".join("2" for _ in wanted))
    return lower(differentiate(divided(cnn(), wanted, on.mesh), Optimizer("sgd", 0.1), on.mesh), on)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("wanted", [("y",), ("z",), ("y", "z"), ("y", "y"), ("z", "z"), ("n", "y")])
def test_images_in_parts(ranks: Ranks, wanted: tuple[str, ...]):
    program = spatial(wanted)
    assert from_op(to_op(program)) == program
    kinds = Counter(i.kind for i in program.body if isinstance(i, HaloExchange))
    # Of an image no gradient is wanted.
    assert kinds["halo"] > kinds["halo_reduce"] >= 2
    text = emit(plan_step(program, PlanOptions(kernels="torch")), cnn()).text
    world = 2 ** len(wanted)
    assert ranks.run(text, world, check, 2) == [[]] * world
    weights, batch, loss, grads = ranks.run(text, world, gradients)[0]
    want_loss, want = by_hand(cnn_torch, weights, batch)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, want[name], rtol=1e-4, atol=1e-5 * np.abs(want[name]).max(), err_msg=name)


def test_halos_wider_than_a_piece():
    """Columns in four pieces of one, of which each needs two on either side."""
    program = spatial(("z", "z"))
    sizes = [
        (program.tensors[i.operand].local(program.mesh)[i.dim], i.low)
        for i in program.body
        if isinstance(i, HaloExchange) and i.kind == "halo"
    ]
    assert (1, 2) in sizes


def test_exchanges_that_operators_share_are_one():
    """A convolution and the gradient of its weight read the same halo."""
    program = spatial(("y",))
    exchanged = [i.operand for i in program.body if isinstance(i, HaloExchange) and i.kind == "halo"]
    assert len(exchanged) == len(set(exchanged))
    node = next(n for n in cnn().nodes() if n.op == "conv2d")
    needed = operand_degrees(node.analysis, Configuration({"y": 2}))
    assert needed[0].halo == ((0, 0), (0, 0), (2, 2), (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("out.narrow(dim, at, part.shape[dim]).copy_(part)", "pass"),
        ("out.narrow(dim, at, part.shape[dim]).add_(part)", "pass"),
        ("(other - me) * size + low + first))", "(me - other) * size % size + first))"),
        ("shift = (place - other) * size", "shift = (other - place) * size"),
        ("arrived.append((got, begin))", "arrived.append((got, size - stop))"),
    ],
)
def test_every_mutant_is_caught(ranks: Ranks, right: str, wrong: str):
    text = emit(plan_step(spatial(("y",)), PlanOptions(kernels="torch")), cnn()).text
    assert text.count(right) == 1
    with pytest.raises(AssertionError):
        # It either crashes or is caught.
        assert ranks.run(text.replace(right, wrong), 2, check, 1) == [[]] * 2
