"""Initial weights that GPUs make by themselves: pieces of one whole, whatever the plan, and normal."""

from __future__ import annotations

import zlib
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unity_ir.lowering import runtime
from unity_ir.lowering.runtime.plan import Spec

MESH = (2, 3)


def loaded(micro_batches: int = 1) -> Any:
    return runtime.load(("collectives", "pieces"), MESH=MESH, WORLD=6, MICRO_BATCHES=micro_batches)


def own(of: Any, name: str, spec: Spec, place: tuple[int, ...], seed: int = 0, *most: int) -> torch.Tensor:
    ctx = SimpleNamespace(device=torch.device("cpu"), place=place, at=lambda pins: True)
    return of.own_initial(ctx, name, spec, seed, *most)


@pytest.mark.parametrize("shape", [(12, 6), (6, 6, 12), (36,), ()])
@pytest.mark.parametrize("roles", [(0, 0), (1, 0), ("copy", 1), (0, "repeat"), ("repeat", "copy")])
def test_pieces_are_those_of_the_whole(shape: tuple[int, ...], roles: tuple[int | str, ...]):
    roles = tuple(r if isinstance(r, str) or r < len(shape) else "copy" for r in roles)
    of, spec = loaded(), Spec(shape, torch.float32, roles)
    whole = own(of, "w", Spec(shape, torch.float32, ("copy", "copy")), (0, 0))
    assert whole.shape == shape
    pieces = [own(of, "w", spec, place) for place in product(*map(range, MESH))]
    found, apart = of.assemble(pieces, spec)
    assert apart == 0.0
    assert torch.equal(found, whole)
    assert whole.unique().numel() == prod(shape)


def test_how_far_copies_are_apart_is_told():
    of, one = loaded(), torch.tensor([1.0, -2.0])
    copied = Spec((2,), torch.float32, ("copy", "copy"))
    pieces = [one] * prod(MESH)
    for off in (0.25, float("nan")):
        found, apart = of.assemble([*pieces[:-1], one + torch.tensor([0.0, off])], copied)
        assert torch.equal(found, one)
        assert repr(apart) == repr(off)


def test_rows_in_parts_are_those_of_the_whole():
    """More than are made at once: rows, and elements of a row."""
    of = loaded()
    for shape in ((5, 2**8), (2**11,), (3, 2**11)):
        whole = own(of, "w", Spec(shape, torch.float64, ("copy", "copy")), (0, 0), 7, 2**10)
        wanted = of.normal(torch.arange(prod(shape)), zlib.crc32(b"w") + 7) * shape[0] ** -0.5
        assert torch.equal(whole.flatten(), wanted)
        assert bool(whole.isfinite().all())


@pytest.mark.slow
def test_they_are_normal():
    of = loaded()
    x = own(of, "w", Spec((2**11, 2**10), torch.float64, ("copy", "copy")), (0, 0)) * 2**5.5
    n = x.numel()
    assert abs(float(x.mean())) < 4 / n**0.5
    assert abs(float(x.var()) - 1) < 4 * (2 / n) ** 0.5
    assert abs(float((x**4).mean()) - 3) < 4 * (96 / n) ** 0.5
    ordered = x.flatten().sort().values
    wanted = torch.special.ndtr(ordered)
    assert float((wanted - (torch.arange(n) + 0.5) / n).abs().max()) < 2 / n**0.5
    others = [
        own(of, name, Spec((2**11, 2**10), torch.float64, ("copy", "copy")), (0, 0), seed) * 2**5.5
        for name, seed in (("v", 0), ("w", 1))
    ]
    for other in (*others, x.roll(1, 1), x.roll(1, 0), x.roll(512, 1)):
        assert abs(float((x * other).mean())) < 4 / n**0.5
