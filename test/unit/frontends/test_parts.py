"""Queries, keys and values are parts of one product's columns, however a module takes them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unity_ir.frontends.torch import from_torch
from unity_ir.frontends.torch.values import cut, parts, permute, reshape
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Value, leaf
from unity_ir.pcg.types import tensor_type

HEADS, SIZE = 2, 4
Heads = Callable[[Tensor], tuple[Tensor, ...]]


def unbound(x: Tensor) -> tuple[Tensor, ...]:
    """As timm has it."""
    return x.reshape(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)


def picked(x: Tensor) -> tuple[Tensor, ...]:
    apart = x.reshape(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
    return apart[0], apart[1], apart[2]


def chunked(x: Tensor) -> tuple[Tensor, ...]:
    """As nanoGPT has it."""
    return tuple(part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in x.chunk(3, -1))


def sliced(x: Tensor) -> tuple[Tensor, ...]:
    found = (x[..., i * HEADS * SIZE : (i + 1) * HEADS * SIZE] for i in range(3))
    return tuple(part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in found)


class Attention(nn.Module):
    """Attention whose queries, keys and values are one product."""

    def __init__(self, heads: Heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(x))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).pow(2).mean()


@pytest.mark.parametrize("heads", [unbound, picked, chunked, sliced])
@pytest.mark.parametrize("batch", [1, 3])
def test_queries_keys_and_values_are_split_before_heads_are(heads: Heads, batch: int):
    module, x = Attention(heads).double(), torch.randn(batch, 5, HEADS * SIZE, dtype=torch.float64)
    found = from_torch(module, (x,))
    moves = Counter(
        n.op for n in found.graph.nodes() if n.op in ("split", "split_heads", "transpose", "slice", "reshape")
    )
    assert moves == {"split": 1, "split_heads": 3}
    weights = {n: w.numpy() for n, w in found.weights.items()}
    got = interpret(found.graph, {found.graph.inputs[0].name: x.numpy()}, weights)[found.graph.outputs[0]]
    assert float(got) == pytest.approx(module(x).item(), rel=1e-12)


def test_slices_that_leave_out_or_repeat_positions_stay():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.w
            return (y[:, :2].sum() * y[:, 2:5].sum()) + y[:, ::2].sum() * y[:, 1::2].sum()

    graph = from_torch(Some(), (torch.ones(2, 6),)).graph
    assert [n.op for n in graph.nodes()].count("slice") == 4
    assert all(n.op != "split" for n in graph.nodes())


def values(of: tuple[Value, ...], x: np.ndarray) -> list[np.ndarray]:
    graph = Graph("g", (of[0].node,), of[1:])
    found = interpret(graph, {"x": x}, {})
    return [np.asarray(found[v]) for v in of[1:]]


MOVES: dict[str, Callable[[Value], Value]] = {
    "inner part of a dim": lambda x: reshape(x, (4, 3, 2, 5)),
    "merged dims": lambda x: reshape(x, (24, 5)),
    "beside a dim of size 1": lambda x: reshape(x, (4, 1, 6, 5)),
    "permuted": lambda x: permute(x, (2, 0, 1)),
    "permuted parts": lambda x: permute(reshape(x, (2, 2, 6, 5)), (1, 3, 0, 2)),
    "parts of permuted": lambda x: reshape(permute(x, (1, 0, 2)), (3, 2, 4, 5)),
    "across dims": lambda x: reshape(x, (8, 3, 5)),
}


@pytest.mark.parametrize("move", MOVES)
def test_parts_and_slices_of_moved_values(move: str):
    x = np.arange(120.0).reshape(4, 6, 5)
    given = leaf("input", tensor_type(x.shape, "f64"), name="x").result
    moved = MOVES[move](given)
    (whole,) = values((given, moved), x)
    for dim, size in enumerate(moved.shape):
        if size < 2:
            continue
        sizes = (1, size - 1)
        first, second = values((given, *parts(moved, dim, sizes)), x)
        assert np.array_equal(np.concatenate((first, second), dim), whole)
        (part,) = values((given, cut(moved, dim, 1, size - 1)), x)
        assert np.array_equal(part, second)
