"""An imported module computes what PyTorch does: the loss and every gradient, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unity_ir.dialects.convert import from_graph, to_graph
from unity_ir.frontends.torch import from_torch
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.optimizer import Optimizer


def weighted(y: Tensor) -> Tensor:
    """The sum of all elements, of which no two count the same."""
    return (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)).sum()


def agree(module: nn.Module, x: Tensor) -> None:
    """Loss and gradients of the imported module are PyTorch's."""
    imported = from_torch(module, x)
    graph = differentiate(imported.graph, Optimizer())
    given = {k: v.numpy() for k, v in {"x": x, **imported.tables}.items()}
    values = interpret(graph, given, {k: v.numpy() for k, v in imported.weights.items()})
    loss = module(x)
    loss.backward()
    assert float(values[graph.outputs[0]]) == pytest.approx(loss.item(), rel=1e-9)
    func = from_graph(imported.graph)
    func.verify()
    assert to_graph(func) == imported.graph
    for update in graph.updates:
        want = module.get_parameter(update.weight.node.name).grad
        np.testing.assert_allclose(values[update.grad], 0 if want is None else want.numpy(), atol=1e-9)
