"""Writes in place, through views of views of all kinds: loss and gradients of random programs against PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_agree import agree, weighted

from unity_ir.errors import UnityError
from unity_ir.frontends.torch import from_torch
from unity_ir.frontends.torch.aliases import Layout
from unity_ir.frontends.torch.memory import ranges_by_strides, ranges_of

PROGRAMS = range(60 if os.environ.get("ZOO") == "all" else 10)

VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x[0],
    lambda x: x[..., -1],
    lambda x: x[..., 1:],
    lambda x: x[..., ::2],
    lambda x: x[1:, ..., :2] if x.dim() > 1 else x,
    lambda x: x.transpose(0, -1),
    lambda x: x.reshape(-1),
    lambda x: x.unsqueeze(1),
    lambda x: x.diagonal(dim1=0, dim2=-1),
    lambda x: x.unfold(-1, 2, 1) if x.shape[-1] > 2 else x,
    lambda x: x.detach(),
    lambda x: x.contiguous(),
    lambda x: x.unflatten(-1, (-1, 2)) if x.shape[-1] % 2 == 0 else x,
)
WRITES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, s: x.add_(s),
    lambda x, s: x.mul_(2),
    lambda x, s: x.copy_(s.expand_as(x)),
    lambda x, s: x.fill_(3),
    lambda x, s: x.zero_(),
    lambda x, s: x.copy_(torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)),
    lambda x, s: x.masked_fill_(x > s, 0.5),
)


class Program(nn.Module):
    """A random program of views and writes; every tensor is read at the end, so that aliases must be up to date."""

    def __init__(self, seed: int):
        super().__init__()
        self.a = nn.Parameter(torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        pick = Random(self.seed).randrange
        mine, constant = self.a * x, torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
        tensors, places = [mine, constant], [mine, constant]
        scale = self.a.mean()
        for _ in range(4):
            view = VIEWS[pick(len(VIEWS))](tensors[pick(len(tensors))]) if pick(4) else places[pick(2)]
            tensors.append(view)
            # What overlaps itself, or is detached from what has a gradient, cannot be written.
            if (view.dim() < 4 and view.grad_fn is not None) or view is constant or view._base is constant:
                WRITES[pick(len(WRITES))](view, scale)
        return weighted(self.a) + sum(weighted(t) for t in tensors) + sum(weighted(t) for t in places)


@pytest.mark.slow
@pytest.mark.parametrize("seed", PROGRAMS)
def test_random_programs(seed: int):
    agree(Program(seed), torch.full((), 1.25, dtype=torch.float64))


@given(st.data())
def test_ranges_follow_from_strides(data: st.DataObject):
    """Whatever strides say of a view is what its positions say; of plain views they say it."""
    base = torch.arange(24).reshape(data.draw(st.sampled_from([(2, 3, 4), (24,), (4, 1, 6), (2, 2, 2, 3)])))
    view = base
    for _ in range(3):
        of = VIEWS[data.draw(st.integers(0, len(VIEWS) - 1))]
        made = of(view) if view.dim() > 1 and view.numel() else view
        # Not what `contiguous` or `reshape` has copied.
        view = made if made.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() else view
    lies, own = (Layout(tuple(t.shape), t.stride(), int(t.storage_offset())) for t in (view, base))
    found = ranges_by_strides(own, lies)
    order = sorted(range(view.dim()), key=lambda d: -view.stride(d))
    assert found is None or not view.numel() or found == ranges_of(view.permute(order).reshape(-1), own.size)
    rows = base[..., data.draw(st.integers(0, base.shape[-1] - 1)) :: 2].transpose(0, -1)
    assert ranges_by_strides(own, Layout(tuple(rows.shape), rows.stride(), int(rows.storage_offset()))) is not None


class Written(nn.Module):
    """A function of one parameter that writes in place."""

    def __init__(self, of: Callable[[Tensor], Tensor]):
        super().__init__()
        self.a = nn.Parameter(torch.rand(3, 4, dtype=torch.float64) + 0.5)
        self.register_buffer("kept", torch.zeros(3, 4, dtype=torch.float64))
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return weighted(self.of(self.a * x))


def _constant_in_no_grad(a: Tensor) -> Tensor:
    mask = torch.ones(3, 4, dtype=a.dtype)
    row = mask[1]
    with torch.no_grad():
        mask[:, 0] = 0
        row.mul_(3)
    return a * mask + row


def _data_in_no_grad(a: Tensor) -> Tensor:
    kept = a.detach().clone()
    with torch.no_grad():
        kept[0] = 5
        kept[:, 1:] *= a[:, 1:]
    return a * kept


def _shifted(a: Tensor) -> Tensor:
    out = a.new_zeros(a.shape)
    out[..., 1:] = a[..., :-1].clone()
    out[..., 0] = 2
    return out


def _empty(a: Tensor) -> Tensor:
    y = a * 2
    y[:, 4:] = 1
    y[3:].add_(1)
    return torch.cat([y, y[:, :0]], 1)


@pytest.mark.parametrize("of", [_constant_in_no_grad, _data_in_no_grad, _shifted, _empty])
def test_equals_pytorch(of: Callable[[Tensor], Tensor]):
    agree(Written(of), torch.full((), 1.25, dtype=torch.float64))


def _trained_in_no_grad(a: Tensor) -> Tensor:
    y = a * 2
    with torch.no_grad():
        y[0] = 0
    return y


def _trained_by_detach(a: Tensor) -> Tensor:
    y = a * 2
    y.detach()[0] = 0
    return y


@pytest.mark.parametrize("of", [_trained_in_no_grad, _trained_by_detach])
def test_a_write_that_only_the_gradient_does_not_see_is_refused(of: Callable[[Tensor], Tensor]):
    with pytest.raises(UnityError, match="writes under no_grad or detach into a tensor that has a gradient"):
        from_torch(Written(of), torch.ones((), dtype=torch.float64))
