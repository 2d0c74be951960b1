"""What moves make of pieces is row-major, whatever PyTorch would choose where dims are of size 1."""

from __future__ import annotations

from math import prod

import torch
from extent import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unity_ir.lowering import runtime

WAYS = 2
COLLECTIVES = runtime.load(("collectives",), MESH=(WAYS,))


@st.composite
def contiguous(draw: st.DrawFn) -> tuple[Tensor, int]:
    """A tensor that says it is contiguous, strides of dims of size 1 being what they may, and a dim."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= WAYS
    strides = [draw(st.integers(1, 70)) if size == 1 else prod(shape[i + 1 :]) for i, size in enumerate(shape)]
    # Channels last are what PyTorch looks for.
    if draw(st.booleans()) and len(shape) > 2 and all(size == 1 for size in shape[2:]):
        strides[2:] = [shape[1]] * (len(shape) - 2)
    found = torch.arange(prod(shape)).as_strided(shape, strides)
    assert found.is_contiguous()
    return found, dim


def row_major(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


@given(contiguous())
@settings(max_examples=examples(200))
def test_parts_and_what_is_joined_are_row_major(drawn: tuple[Tensor, int]):
    x, dim = drawn
    parts = COLLECTIVES._cut(x, dim, (0,))
    assert list(parts.stride()) == row_major(tuple(parts.shape))
    assert all(map(torch.equal, parts, x.chunk(WAYS, dim)))
    for pieces in (parts.unbind(0), x.chunk(WAYS, dim), [x, x]):
        joined = COLLECTIVES._joined(pieces, dim)
        assert list(joined.stride()) == row_major(tuple(joined.shape))
        assert torch.equal(joined, torch.cat([*pieces], dim))
