"""`run_schedule` tells each part its micro-batch, and whether that is the last one that it runs for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unity_ir.lowering import runtime

Seen = tuple[str, int, bool]


def seen_by(order: str, names: tuple[str, ...], micro_batches: int) -> list[Seen]:
    """The parts that a rank runs by its order: each by its name, with its micro-batch and `is_last`."""
    ctx = SimpleNamespace(ways={"F": None, "B": None}, micro_batch=0, is_last=False, index=lambda axes: 0)
    found: list[Seen] = []

    def part(name: str) -> Any:
        return lambda ctx, *_: found.append((name, ctx.micro_batch, ctx.is_last))

    plan: dict[str, Any] = {"SCHEDULE": (order,), "PIPELINE": (0,), "MICRO_BATCHES": micro_batches, "RANK_OF": (0,)}
    plan |= {"PARTS": {name: part(name) for name in names}, "RECEIVES": {}, "MESH": (1,)}
    runtime.load(("pipeline",), **plan).run_schedule(ctx, {}, {}, {}, {})
    return found


@pytest.mark.parametrize(
    ("order", "names", "last"),
    [
        ("0F0 0F1 0B0 0F2 0B1 0B2", ("0F", "0B"), {("0F", 2), ("0B", 2)}),
        # Neither the number of a micro-batch nor how far the rank is counts, but what it has done of a kind.
        ("0F2 0F0 0F1 0B2 0B1 0B0", ("0F", "0B"), {("0F", 1), ("0B", 0)}),
        # Half of a backward may come last much later; a whole one is both halves.
        ("0F0 0F1 0I0 0I1 0W0 0F2 0B2 0W1", ("0F", "0I", "0W"), {("0F", 2), ("0I", 2), ("0W", 1)}),
    ],
)
def test_the_last_of_each_part_is_told_that_it_is(order: str, names: tuple[str, ...], last: set[tuple[str, int]]):
    found = seen_by(order, names, 3)
    assert sorted((name, k) for name, k, _ in found) == sorted((name, k) for name in names for k in range(3))
    assert {(name, k) for name, k, is_last in found if is_last} == last
