"""The vocabulary-parallel cross-entropy equals PyTorch's, whole and with its classes divided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from parallelization import parallelize
from torch.nn import functional as F

from unity_ir.models.builder import Builder
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.graph import Graph, erase, rewrite
from unity_ir.pcg.interpret import interpret, interpret_pieces, join
from unity_ir.pcg.node import Node, Value
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.tdl.parallel import Configuration

CLASS = {"max_of_parts": "p", "sum_exp": "c", "class_score": "c"}
"""The index over classes of the operators that see them."""


def model(lead: tuple[int, ...], classes: int, parts: int) -> Graph:
    b = Builder("loss", "f64")
    logits, labels = b.weight("x", *lead, classes), b.input("t", *lead, dtype="i64")
    return b.graph(b.vocabulary_parallel_cross_entropy(logits, labels, parts))


def divided(graph: Graph, degree: int) -> Graph:
    """Every operator that sees the classes with them divided; the others in one piece."""

    def one(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
        if node.is_leaf:
            return node.results
        again = node.operator(*operands, **dict(node.attributes))
        values = [v for v in again if isinstance(v, Value)]
        if node.op not in CLASS:
            return values
        return parallelize(values[0].node, Configuration({CLASS[node.op]: degree}))

    return rewrite(graph, one)


def data(lead: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    # Far beyond what exp takes, were there no shift.
    return 900 * random.standard_normal((*lead, classes)), random.integers(0, classes, lead)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_loss_and_gradient_equal_pytorch(lead: tuple[int, ...], degree: int):
    whole = model(lead, 8, 4)
    graph = divided(whole, degree) if degree > 1 else whole
    assert erase(graph) == whole
    step = differentiate(graph, Optimizer())
    x, t = data(lead, 8)
    values, pieces = interpret(step, {"t": t}, {"x": x}), interpret_pieces(step, {"t": t}, {"x": x})
    logits = torch.tensor(x, requires_grad=True)
    loss = F.cross_entropy(logits.flatten(0, -2), torch.tensor(t).flatten())
    loss.backward()
    assert logits.grad is not None
    for value, expected in ((step.outputs[0], loss.detach()), (step.updates[0].grad, logits.grad)):
        np.testing.assert_allclose(values[value], expected.numpy(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(join(pieces[value], value.type), expected.numpy(), rtol=1e-9, atol=1e-12)


def test_no_gradient_goes_through_the_shift():
    step = differentiate(model((6,), 8, 2), Optimizer())
    assert not {"max_of_parts_grad", "reduce_extreme_grad"} & {n.op for n in step.nodes()}
