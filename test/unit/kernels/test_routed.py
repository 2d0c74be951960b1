"""Products of rows with the one weight that integers pick for each, whole and in pieces of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covered import operand_dtypes
from kernel_checks import TOLERANCES
from operator_cases import DTYPES
from operator_twins import TORCH
from torch import Tensor

from unity_ir.kernels import launchers
from unity_ir.kernels.launchers import launcher
from unity_ir.ops import operator
from unity_ir.tdl.parallel import Configuration, line_of_task

TOKENS, EXPERTS, K, N = 45, 6, 36, 20
"""No multiples of a block."""

ROUTES = {
    "spread": torch.arange(TOKENS) * 5 % 11 % EXPERTS,
    "one expert": torch.full((TOKENS,), 4),
    "most to nobody": torch.where(torch.arange(TOKENS) < 3, 1, 5),
    "in two dims": torch.arange(TOKENS).reshape(9, 5) % 4,
}
"""Which expert each token goes to; some have none."""


def operands(name: str, e: Tensor, dtype: str) -> list[Tensor]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(DTYPES[dtype])

    x = drawn(*e.shape, K)
    match name:
        case "routed_matmul":
            return [x, drawn(EXPERTS, K, N), e]
        case "routed_matmul_nt":
            return [x, drawn(EXPERTS, N, K), e]
        case _:
            return [x, drawn(*e.shape, N), e]


NAMES = ("routed_matmul", "routed_matmul_nt", "routed_matmul_tn")


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_the_experts(name: str, impl: str, route: str, dtype: str, parts: int, runner: Any) -> None:
    """A piece computes what goes to its experts, 0 for all else: added up, or side by side, they are the whole."""
    one, tensors = operator(name), operands(name, ROUTES[route], dtype)
    of_weights = name == "routed_matmul_tn"
    attributes = {"size": EXPERTS, "degrees": (1,)} if of_weights else {}
    bound = one.bind(tuple(t.shape for t in tensors), one.attributes(attributes)).bound
    part = line_of_task(bound, Configuration({"v": parts} if parts > 1 else {}))
    made = launcher(part, operand_dtypes(part, dtype), impl, ("v",) if parts > 1 else ())
    if impl == "triton":
        assert list(made.kernels) == ["routed_weight_kernel" if of_weights else "routed_kernel"]
    found: list[Tensor] = []
    for start in range(0, EXPERTS, EXPERTS // parts):
        own = tensors if of_weights else [tensors[0], tensors[1][start : start + EXPERTS // parts], tensors[2]]
        (result,) = runner.run(made, own, *([start] if parts > 1 else []))
        assert result.dtype == DTYPES[dtype]
        found.append(result.double())
    got = torch.cat(found) if of_weights else torch.stack(found).sum(0)
    floats = [t.double() if t.is_floating_point() else t for t in tensors]
    want = TORCH[name](*floats, **attributes)
    assert isinstance(want, Tensor)
    scale = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("name", NAMES)
def test_positions_beyond_32_bits(name: str, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "needs_int64", lambda bound: True)
    # Nor does it remember the launchers of narrow positions, or others those of wide ones.
    monkeypatch.setattr(launchers, "_launcher", launchers._launcher.__wrapped__)
    test_pieces_of_the_experts(name, "triton", "in two dims", "f32", 2, runner)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_ids_of_nobody(impl: str, runner: Any) -> None:
    """Rows before the first and behind the last expert of a piece, all of them, are 0; so is the gradient."""
    for name in NAMES:
        tensors = operands(name, torch.arange(TOKENS) % 2 * 100, "f32")
        of_weights = name == "routed_matmul_tn"
        one = operator(name)
        attributes = one.attributes({"size": EXPERTS, "degrees": (1,)} if of_weights else {})
        bound = one.bind(tuple(t.shape for t in tensors), attributes).bound
        made = launcher(bound, operand_dtypes(bound), impl, ("v",))
        (result,) = runner.run(made, tensors, 40)
        assert result.shape == bound.result_shapes[0]
        assert not result.any()


def test_there_are_as_many_tiles_as_there_could_be(runner: Any) -> None:
    """Each expert, and what lies before and behind them, has one row more than a tile: two tiles each."""
    tile = 64
    e = torch.arange((EXPERTS + 2) * (tile + 1)) % (EXPERTS + 2) - 1
    x, w, _ = operands("routed_matmul", e, "f32")
    bound = operator("routed_matmul").bind((x.shape, w.shape, e.shape), ()).bound
    made = launcher(bound, operand_dtypes(bound))
    assert made.compiled[0].constants["BLOCK_M"] == tile
    assert f"routed_kernel[({2 * (EXPERTS + 2)},)]" in made.source
    (result,) = runner.run(made, [x, w, e])
    there = (e >= 0) & (e < EXPERTS)
    want = torch.where(there[:, None], TORCH["routed_matmul"](x.double(), w.double(), e * there), 0)
    torch.testing.assert_close(result.double(), want, rtol=1e-5, atol=1e-4)
