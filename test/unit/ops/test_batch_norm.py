"""Batch normalisation of values far from 0, in single precision: nothing is lost but what the values have lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from unity_ir.models.vision import Vision
from unity_ir.pcg.interpret import interpret


@pytest.mark.parametrize("mean", [0.0, 100.0, 4000.0])
def test_statistics_do_not_cancel(mean: float):
    x = (np.random.default_rng(0).standard_normal((64, 3, 2, 2)) + mean).astype(np.float32)
    builder = Vision("bn")
    graph = builder.graph(builder.batch_norm(builder.input("x", *x.shape), "bn"))
    weights = {"bn.weight": np.ones(3, np.float32), "bn.bias": np.zeros(3, np.float32)}
    (out,) = graph.outputs
    found = interpret(graph, {"x": x}, weights)[out]
    assert found.dtype == np.float32
    expected = F.batch_norm(torch.from_numpy(x).double(), None, None, training=True)
    np.testing.assert_allclose(found, expected.numpy(), atol=16 * np.finfo(np.float32).eps)
