"""Rows that are sorted, computed and put back, and experts that compute every token, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_agree import agree, weighted

from unity_ir.frontends.torch import from_torch

TOKENS, CHOSEN, EXPERTS, WIDTH = 5, 2, 3, 4
ROWS = TOKENS * CHOSEN


class Mixture(nn.Module):
    """Tokens [5, 4], a router of three experts, and a vector [4] and a matrix [4, 4] for each."""

    def __init__(self, of: Callable[[Mixture, Tensor], Tensor]):
        super().__init__()
        self.of = of
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.a, self.router = drawn(TOKENS, WIDTH), drawn(WIDTH, EXPERTS)
        self.scale, self.up, self.down = drawn(EXPERTS, WIDTH), drawn(EXPERTS, WIDTH, 8), drawn(EXPERTS, 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return weighted(self.of(self, self.a * x))

    def choices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and experts [10] of the rows of tokens."""
        shares, ids = (x @ self.router).softmax(-1).topk(CHOSEN)
        return shares.reshape(-1), ids.reshape(-1)


def inverse(order: Tensor) -> Tensor:
    put_back = torch.empty_like(order)
    put_back[order] = torch.arange(len(order))
    return put_back


def _of_experts(m: Mixture, x: Tensor) -> Tensor:
    shares, ids = m.choices(x)
    sorted_ids, order = torch.sort(ids)
    y = F.silu(x[order // CHOSEN] * m.scale[sorted_ids]).split(2, -1)
    y = torch.cat([y[1], y[0]], -1) * shares[order][:, None] + 1
    return y[inverse(order)].view(TOKENS, CHOSEN, WIDTH).sum(1)


def _of_argsort(m: Mixture, x: Tensor) -> Tensor:
    _, ids = m.choices(x)
    order = ids.argsort(stable=True)
    return (x[order // CHOSEN] * m.scale[ids[order]])[inverse(order)]


def _of_several_numbers(m: Mixture, x: Tensor) -> Tensor:
    """Two rows for each token, and five for each of two tokens."""
    _, ids = m.choices(x)
    sorted_ids, order = torch.sort(ids.flip(0))
    y = (x[:2][order // 5] * m.scale[sorted_ids])[inverse(order)]
    return y + _of_argsort(m, x)


def _of_rows_that_mix(m: Mixture, x: Tensor) -> Tensor:
    _, ids = m.choices(x)
    sorted_ids, order = torch.sort(ids)
    return (x[order // CHOSEN] * m.scale[sorted_ids]).cumsum(0)[inverse(order)]


def _of_positions(m: Mixture, x: Tensor) -> Tensor:
    _, ids = m.choices(x)
    sorted_ids, order = torch.sort(ids)
    places = torch.arange(float(ROWS), dtype=x.dtype)[:, None]
    return (x[order // CHOSEN] * m.scale[sorted_ids] + places)[inverse(order)]


def _of_another_order(m: Mixture, x: Tensor) -> Tensor:
    _, ids = m.choices(x)
    sorted_ids, order = torch.sort(ids)
    _, other = torch.sort(ids.flip(0))
    return (x[order // CHOSEN] * m.scale[sorted_ids])[inverse(other)] + (x[other // CHOSEN])[inverse(order)]


def _of_another_quotient(m: Mixture, x: Tensor) -> Tensor:
    _, ids = m.choices(x)
    sorted_ids, order = torch.sort(ids)
    return (x[order // CHOSEN] * m.scale[sorted_ids] + x[order // 5])[inverse(order)]


def _put_back_twice(m: Mixture, x: Tensor) -> Tensor:
    _, ids = m.choices(x)
    _, order = torch.sort(ids)
    rows = x[order // CHOSEN]
    return rows[inverse(order)] * rows[order] + rows.flip(0)[inverse(order)]


SORTED: dict[str, tuple[Callable[[Mixture, Tensor], Tensor], bool]] = {
    "experts": (_of_experts, False),
    "argsort": (_of_argsort, False),
    "several_numbers": (_of_several_numbers, False),
    "rows_that_mix": (_of_rows_that_mix, True),
    "positions": (_of_positions, True),
    "another_order": (_of_another_order, True),
    "another_quotient": (_of_another_quotient, True),
    "put_back_twice": (_put_back_twice, True),
}


@pytest.mark.parametrize("name", SORTED)
def test_sorted_rows(name: str):
    """Stay sorted only where operators mix them, or orders differ."""
    function, stays = SORTED[name]
    x = torch.ones((), dtype=torch.float64)
    module = Mixture(function)
    agree(module, x)
    nodes = from_torch(module, x).graph.nodes()
    assert any(n.op == "topk" and n.attribute("k") == ROWS for n in nodes) == stays


def _every(m: Mixture, x: Tensor, of: Callable[[Tensor], Tensor], rest: float = -torch.inf) -> Tensor:
    """As Llama 4 writes it: every expert computes every token, times its score, which is 0 for those not chosen."""
    gates = x @ m.router
    values, ids = gates.topk(CHOSEN, dim=1)
    scores = torch.full_like(gates, rest).scatter_(1, ids, values).sigmoid()
    rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
    y = of(torch.bmm(rows.view(EXPERTS, -1, WIDTH), m.up)) @ m.down
    return y.reshape(EXPERTS, TOKENS, WIDTH).sum(0)


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return up * F.silu(gate)


EVERY: dict[str, tuple[Callable[[Mixture, Tensor], Tensor], bool]] = {
    "gated": (lambda m, x: _every(m, x, gated), True),
    "not_0_at_0": (lambda m, x: _every(m, x, lambda y: gated(y).sigmoid()), False),
    "shifted": (lambda m, x: _every(m, x, lambda y: gated(y + 1)), False),
    "scores_for_all": (lambda m, x: _every(m, x, gated, -1.0), False),
}


@pytest.mark.parametrize("name", EVERY)
def test_experts_that_compute_every_token(name: str):
    """Compute those tokens alone that choose them, if what is made of a row of zeros is 0."""
    function, is_routed = EVERY[name]
    x = torch.ones((), dtype=torch.float64)
    module = Mixture(function)
    agree(module, x)
    found = {n.op for n in from_torch(module, x).graph.nodes()}
    assert ("routed_matmul" in found, "batch_matmul" in found) == (is_routed, not is_routed)
