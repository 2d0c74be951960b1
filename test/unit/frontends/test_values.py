"""The pieces of the import: shape changes and what they become, folding, masks, padded labels, in-place analysis."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unity_ir.frontends.torch import values
from unity_ir.frontends.torch.maps.indexing import flat_index
from unity_ir.frontends.torch.masks import is_causal_mask, visible
from unity_ir.frontends.torch.padded import Padded
from unity_ir.frontends.torch.site import shrink, uniform
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.interpret import interpret
from unity_ir.pcg.node import Value, leaf
from unity_ir.pcg.types import tensor_type


def source(*shape: int) -> tuple[Value, torch.Tensor]:
    """An input, and the array 0, 1, 2, ... for it."""
    array = torch.arange(float(prod(shape)), dtype=torch.float64).reshape(shape)
    return leaf("input", tensor_type(shape, "f64"), name="x").result, array


def evaluate(value: Value, array: torch.Tensor) -> np.ndarray:
    (x,) = [n for n in Graph("g", (), (value,)).nodes() if n.op == "input"]
    return interpret(Graph("g", (x,), (value,)), {"x": array.numpy()}, {})[value]


def factored(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """A shape of `total` elements, with some dims of size 1."""
    shape: list[int] = []
    while total > 1:
        size = draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0]))
        shape.append(size)
        total //= size
        if draw(st.booleans()) and len(shape) < 4:
            shape.append(1)
    return tuple(shape)


@pytest.mark.slow
@given(st.data())
def test_chains_of_shape_changes_are_what_pytorch_does(data: st.DataObject):
    """Whatever becomes one operator, vanishes, or is made heads of on the way."""
    draw: Any = data.draw
    x, array = source(*factored(draw, draw(st.sampled_from([12, 16, 24]))))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["reshape", "permute", "expand", "swap"]))
        rank = len(x.shape)
        if kind == "reshape":
            shape = factored(draw, prod(x.shape))
            x, array = values.reshape(x, shape), array.reshape(shape)
        elif kind == "permute":
            perm = draw(st.permutations(range(rank)))
            x, array = values.permute(x, perm), array.permute(perm)
        elif kind == "swap" and rank > 1:
            a, b = draw(st.integers(-rank, rank - 1)), draw(st.integers(-rank, rank - 1))
            x, array = values.swap(x, a, b), array.transpose(a, b)
        elif kind == "expand" and prod(x.shape) < 200:
            wide = tuple(draw(st.integers(1, 2)) if s == 1 else s for s in (*(1,) * draw(st.integers(0, 1)), *x.shape))
            x, array = values.expand(x, wide), array.expand(wide)
        assert x.shape == tuple(array.shape)
    (given_x,) = [n for n in Graph("g", (), (x,)).nodes() if n.op == "input"]
    start = source(*given_x.types[0].shape)[1]
    np.testing.assert_array_equal(evaluate(x, start), array.numpy())


def test_heads_are_split_and_merged_by_their_own_operators():
    x, array = source(2, 3, 8)
    heads = values.permute(values.reshape(x, (2, 3, 4, 2)), (0, 2, 1, 3))
    assert heads.node.op == "split_heads"
    back = values.reshape(values.permute(heads, (0, 2, 1, 3)), (2, 3, 8))
    assert back == x
    moved = values.op("relu", heads)
    merged = values.reshape(values.permute(moved, (0, 2, 1, 3)), (2, 3, 8))
    assert merged.node.op == "merge_heads"
    np.testing.assert_array_equal(evaluate(merged, array), array.numpy())


@given(st.lists(st.integers(1, 3), max_size=3), st.lists(st.booleans(), min_size=3, max_size=3))
def test_shrunk_tensors_broadcast_back(shape: list[int], same: list[bool]):
    tensor = torch.arange(prod(shape)).reshape(shape)
    for dim, is_same in zip(range(len(shape)), same, strict=False):
        if is_same:
            tensor = tensor.narrow(dim, 0, 1).expand_as(tensor)
    small = shrink(tensor)
    assert torch.equal(small.expand_as(tensor), tensor)
    assert all(
        s == 1 or not torch.equal(small, small.narrow(d, 0, 1).expand_as(small)) for d, s in enumerate(small.shape)
    )


@pytest.mark.parametrize(
    ("tensor", "number"),
    [
        (torch.full((2, 3), 7), 7),
        (torch.tensor(True), True),
        (torch.tensor([1.0, 2.0]), None),
        (torch.tensor([float("nan")]), None),
        (torch.zeros(0), None),
        (torch.full((2,), float("-inf")), float("-inf")),
    ],
)
def test_uniform(tensor: torch.Tensor, number: float | None):
    assert uniform(tensor) == number


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        (torch.ones(3, 3, dtype=torch.bool).tril(), True),
        (torch.ones(2, 1, 3, 3, dtype=torch.bool).tril(), True),
        (torch.ones(3, 3, dtype=torch.bool).tril(-1), False),
        (torch.ones(3, 3, dtype=torch.bool), False),
        (torch.full((3, 3), LOWEST).triu(1), True),
        (torch.full((3, 3), float("-inf")).triu(1), True),
        (torch.full((3, 3), -1.0).triu(1), None),
        (torch.stack([torch.ones(3, 3).tril(), torch.ones(3, 3)]).bool(), False),
    ],
)
def test_causal_masks(mask: torch.Tensor, is_causal: bool | None):
    seen = visible(mask)
    assert (seen is None) == (is_causal is None)
    assert seen is None or is_causal_mask(seen, 3, 3) == is_causal


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.integers(1, 3), st.data())
def test_cuts_of_concatenations(sizes: list[int], step: int, data: st.DataObject):
    """Of the operand that has all positions, where there is one."""
    given = [leaf("input", tensor_type((2, size), "i64"), name=f"x{i}").result for i, size in enumerate(sizes)]
    start = data.draw(st.integers(0, sum(sizes) - 1))
    count = data.draw(st.integers(1, len(range(start, sum(sizes), step))))
    array = torch.arange(2 * sum(sizes)).reshape(2, -1)
    graph = Graph(
        "f", tuple(v.node for v in given), (values.cut(values.op("concat", *given, dim=1), 1, start, count, step),)
    )
    parts = {f"x{i}": part.numpy() for i, part in enumerate(array.split(sizes, 1))}
    want = array[:, start::step][:, :count]
    assert np.array_equal(interpret(graph, parts, {})[graph.outputs[0]], want.numpy())
    ends = np.cumsum(sizes)
    is_in_one = np.searchsorted(ends, start, "right") == np.searchsorted(ends, start + (count - 1) * step, "right")
    assert is_in_one != any(n.op == "concat" for n in graph.nodes())


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.data())
def test_cuts_of_padded_labels(size: int, before: int, after: int, data: st.DataObject):
    """What is left between the fill is what a cut of the padded array has there."""
    labels = leaf("input", tensor_type((2, size), "i64"), name="x").result
    array = torch.arange(2 * size).reshape(2, size)
    padded = Padded(labels, 1, before, after, -100, (2, before + size + after))
    # Cuts that leave none of the labels are of no use to a loss.
    start = data.draw(st.integers(0, before + size - 1))
    length = data.draw(st.integers(max(1, before + 1 - start), before + size + after - start))
    got = padded.cut(1, start, length)
    want = torch.nn.functional.pad(array, (before, after), value=-100)[:, start : start + length]
    inner = got.value if isinstance(got, Padded) else got
    ends = (got.before, got.after) if isinstance(got, Padded) else (0, 0)
    values_of = torch.from_numpy(evaluate(inner, array).copy())
    assert torch.equal(torch.nn.functional.pad(values_of, ends, value=-100), want)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_several_indices_are_one(sizes: list[int], data: st.DataObject):
    count = data.draw(st.integers(1, 4))
    indices = [torch.tensor(data.draw(st.lists(st.integers(-s, s - 1), min_size=count, max_size=count))) for s in sizes]
    array = torch.arange(prod(sizes)).reshape(sizes)
    assert torch.equal(array.reshape(-1)[flat_index(indices, sizes)], array[tuple(indices)].reshape(-1))
