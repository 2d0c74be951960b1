"""Rows go to the ranks of their experts, in order of ranks and experts, and come back as they left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unity_ir.lowering import runtime
from unity_ir.pcg.collectives import COLLECTIVES

WAYS, EXPERTS, ROWS = 3, 2, 6
RUNTIME = runtime.load(("collectives",), MESH=(WAYS,))
LAYER = "experts"


class Refused(Exception):
    """Stands for the end of a run."""


def refuse(message: str) -> None:
    raise Refused(message)


def everywhere(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """What every rank gets when each starts a collective with arguments of its own."""
    gathered: list[tuple[Tensor, Tensor]] = []
    sent: list[tuple[Tensor, Tensor, list[int], list[int]]] = []

    def gather(out: Tensor, mine: Tensor, **_: Any) -> SimpleNamespace:
        gathered.append((out, mine))
        return SimpleNamespace(wait=lambda: None)

    def exchange(out: Tensor, x: Tensor, come: list[int], to: list[int], **_: Any) -> SimpleNamespace:
        assert x.shape[0] == sum(to)
        assert out.shape[0] == sum(come)
        assert out.is_contiguous()
        sent.append((out, x, come, to))
        return SimpleNamespace(wait=lambda: None)

    scope = function.__globals__
    scope.update(_all_gather=gather, fail=refuse, dist=SimpleNamespace(all_to_all_single=exchange))
    ranks = [SimpleNamespace(groups={(0,): None}, index=lambda _, rank=rank: rank) for rank in range(WAYS)]
    pending = [function(ctx, *own, (0,)) for ctx, own in zip(ranks, arguments, strict=True)]
    for out, _ in gathered:
        out.copy_(torch.cat([mine for _, mine in gathered]))
    parts = [x.split(to) for _, x, _, to in sent]
    for rank, (out, _, come, _) in enumerate(sent):
        own = [part[rank] for part in parts]
        assert [len(part) for part in own] == come
        out.copy_(torch.cat(own))
    return [p.wait() for p in pending]


@given(
    st.lists(st.lists(st.integers(0, WAYS * EXPERTS - 1), min_size=ROWS, max_size=ROWS), min_size=WAYS, max_size=WAYS)
)
@settings(max_examples=60)
def test_rows_go_where_their_experts_are_and_come_back(chosen: list[list[int]]):
    experts = [torch.tensor([sorted(own)]) for own in chosen]
    counts = everywhere(RUNTIME.count_rows, [(e, EXPERTS, WAYS * ROWS, LAYER) for e in experts])
    for rank, (to, come) in enumerate(counts):
        assert to == [sum(e // EXPERTS == other for e in chosen[rank]) for other in range(WAYS)]
        assert come == [sum(e // EXPERTS == rank for e in own) for own in chosen]
    rows = [torch.randn(1, ROWS, 4) for _ in range(WAYS)]
    room = max(sum(come) for _, come in counts) + 1
    found = everywhere(RUNTIME.send_rows, [(e, c, room) for e, c in zip(experts, counts, strict=True)])
    there = everywhere(RUNTIME.send_rows, [(x, c, room) for x, c in zip(rows, counts, strict=True)])
    every, of = torch.cat(rows, 1)[0], torch.cat(experts, 1)[0]
    for rank in range(WAYS):
        own, (numbers,), (x,) = of // EXPERTS == rank, found[rank], there[rank]
        count = int(own.sum())
        assert torch.equal(x[:count], every[own])
        assert torch.equal(numbers[:count], of[own])
        assert not x[count:].any()
        assert (numbers[count:] == -1).all()
    back = everywhere(RUNTIME.return_rows, [(x, c) for x, c in zip(there, counts, strict=True)])
    assert all(map(torch.equal, back, rows))


def test_an_even_routing_moves_what_is_priced():
    """Elements that ranks receive of others, against those of the row in the table of collectives."""
    experts = [torch.arange(WAYS * EXPERTS)[None] for _ in range(WAYS)]
    counts = everywhere(RUNTIME.count_rows, [(e, EXPERTS, ROWS, LAYER) for e in experts])
    received = sum(4 * sum(come[:rank] + come[rank + 1 :]) for rank, (_, come) in enumerate(counts))
    for kind in ("send_rows", "return_rows"):
        formula = COLLECTIVES[kind].received
        assert formula is not None
        assert received == formula(WAYS, 4 * ROWS)


def test_more_rows_than_there_is_room_for_are_refused():
    experts = [torch.zeros(1, ROWS, dtype=torch.int64) for _ in range(WAYS)]
    given = [(e, EXPERTS, WAYS * ROWS - 1, LAYER) for e in experts]
    with pytest.raises(
        Refused, match=f"^{LAYER}: {WAYS * ROWS} rows go to the experts of one rank, which has room for"
    ):
        everywhere(RUNTIME.count_rows, given)
