"""Products of operands in 8 bits: each row has a scale of its own, and the rest is a product as any other."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import Runner

from unity_ir.forms.float8 import LARGEST, TINY
from unity_ir.kernels.launchers import Launcher, can_add, launcher
from unity_ir.ops import operator
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line

PRODUCTS = ("float8_matmul", "float8_matmul_nt", "float8_matmul_tn")


def made(name: str, x: torch.Tensor, w: torch.Tensor, impl: str = "triton", dtype: str = "bf16") -> Launcher:
    bound = operator(name).bind((tuple(x.shape), tuple(w.shape)), ()).bound
    return launcher(bound, [dtype] * 2, impl)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The rows of a matrix as float8 has them, as float32."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=TINY) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def in_rows(name: str, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands such that elements that are summed are in rows."""
    if name.endswith("_tn"):
        return x.flatten(0, -2).T, w.flatten(0, -2).T
    return x, w if name.endswith("_nt") else w.T


def expected(name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = map(rounded, in_rows(name, x, w))
    return a @ b.T


def operands(name: str, lead: tuple[int, ...], k: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose rows differ in size by a million, so that one scale would not do for two of them."""
    of = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> torch.Tensor:
        sizes = 10.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=of)
        return (torch.randn(shape, generator=of) * sizes).to(torch.bfloat16)

    if name.endswith("_tn"):
        return rows(k, prod(lead)).T.contiguous().view(*lead, k), rows(n, prod(lead)).T.contiguous().view(*lead, n)
    w = rows(n, k)
    return rows(*lead, k), w if name.endswith("_nt") else w.T.contiguous()


def distance(name: str, found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """The largest distance of an element from the rounded one, in parts of its row's and column's norms."""
    a, b = in_rows(name, x, w)
    norms = a.float().norm(dim=-1, keepdim=True) * b.float().norm(dim=-1)
    return float(((found.float() - expected(name, x, w)).abs() / norms).max())


@pytest.mark.parametrize("name", PRODUCTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_pytorch_rounds_rows(name: str, runner: Runner, data: st.DataObject) -> None:
    lead = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    k, n = data.draw(st.sampled_from([16, 32, 48])), data.draw(st.sampled_from([16, 32, 80]))
    x, w = operands(name, (*lead, 16), k, n, data.draw(st.integers(0, 99)))
    (found,) = runner.run(made(name, x, w, "torch"), [x, w])
    torch.testing.assert_close(found.float(), expected(name, x, w), rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", [((2, 16), 64, 48), ((40,), 96, 32), ((5,), 24, 40)])
def test_kernels_round_rows(name: str, shape: tuple[tuple[int, ...], int, int], runner: Runner) -> None:
    """The interpreter makes 384 of the largest number, 448, so results are further off than a GPU's."""
    x, w = operands(name, *shape)
    one = made(name, x, w)
    assert [each.kind for each in one.work] == ["product"]
    assert one.roundings == 2
    (found,) = runner.run(one, [x, w])
    assert distance(name, found, x, w) < 0.2


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_rows_of_zeros_are_zeros(impl: str, runner: Runner) -> None:
    x, w = torch.zeros(32, 64, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)
    (found,) = runner.run(made("float8_matmul", x, w, impl), [x, w])
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_longer_types_are_not_rounded(impl: str, runner: Runner) -> None:
    x, w = (each.float() for each in operands("float8_matmul", (32,), 64, 32))
    one = made("float8_matmul", x, w, impl, "f32")
    assert one.roundings == 0
    (found,) = runner.run(one, [x, w])
    torch.testing.assert_close(found, x @ w, rtol=1e-4, atol=1e-3)


def test_what_follows_is_in_the_products_kernel(runner: Runner) -> None:
    """With a residual in the kernel, and a bias; nothing can be added to a running total, since it launches thrice."""
    line = "f(x, w, b, r)  out[m, n] = relu(sum[k](float8(x[m, k]) * float8(w[k, n])) + b[n]) + r[m, n]"
    x, w = operands("float8_matmul", (32,), 64, 48)
    b, r = torch.randn(48).to(torch.bfloat16), torch.randn(32, 48).to(torch.bfloat16)
    given_: list[Any] = [x, w, b, r]
    bound = bind(parse_line(line), tuple(tuple(each.shape) for each in given_), {})
    one = launcher(bound, ["bf16"] * 4)
    assert [each.kind for each in one.work] == ["product"]
    assert not can_add(bound, ["bf16"] * 4, "triton")
    (found,) = runner.run(one, given_)
    wanted = torch.relu(expected("float8_matmul", x, w) + b.float()) + r.float()
    norms = x.float().norm(dim=1, keepdim=True) * w.float().norm(dim=0)
    assert float(((found.float() - wanted).abs() / norms.clamp(min=1)).max()) < 0.1


@pytest.mark.parametrize(("k", "n"), [(24, 32), (32, 24)])
def test_pytorch_leaves_unaligned_sizes_in_16_bits(k: int, n: int, runner: Runner) -> None:
    """Pieces of ranks may have any size, and `torch._scaled_mm` takes multiples of 16."""
    x, w = operands("float8_matmul", (8,), k, n)
    one = made("float8_matmul", x, w, "torch")
    assert "float8_product" not in one.source
    (found,) = runner.run(one, [x, w])
    torch.testing.assert_close(found, x @ w)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    "line",
    [
        "f(x, w)  out[n, m] = sum[k](float8(x[m, k]) * float8(w[k, n]))",
        "f(x, w)  out[m, n] = sum[k](float8(w[k, n]) * float8(x[m, k]))",
    ],
)
def test_results_in_other_orders(line: str, impl: str, runner: Runner) -> None:
    x, w = operands("float8_matmul", (32,), 64, 48)
    one = launcher(bind(parse_line(line), ((32, 64), (64, 48)), {}), ["bf16"] * 2, impl)
    (found,) = runner.run(one, [x, w])
    found = found.T if "n, m" in line else found
    assert distance("float8_matmul", found, x, w) < 0.2


def test_an_operand_of_a_batch_is_rounded_once(runner: Runner) -> None:
    """Columns of each head are a product of a batch, with the same rows."""
    line = "f(x, w)  out[b, h, s, d] = sum[k](float8(x[b, s, k]) * float8(w[k, (h d)])) where size(d) = 16"
    x, w = operands("float8_matmul", (1, 32), 64, 64)
    one = launcher(bind(parse_line(line), ((1, 32, 64), (64, 64)), {}), ["bf16"] * 2)
    assert "new_empty((32, 64), dtype=torch.float8_e4m3fn)" in one.source
    (found,) = runner.run(one, [x, w])
    assert distance("float8_matmul", found.permute(0, 2, 1, 3).flatten(2), x, w) < 0.2


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_gradients_of_weights_may_be_in_float32(impl: str, runner: Runner) -> None:
    x, y = operands("float8_matmul_tn", (64,), 32, 48)
    bound = operator("float8_matmul_tn").bind(((64, 32), (64, 48)), ()).bound
    bound = replace(bound, results=tuple(replace(r, dtype="f32") for r in bound.results))
    (found,) = runner.run(launcher(bound, ["bf16"] * 2, impl), [x, y])
    assert found.dtype == torch.float32
    assert distance("float8_matmul_tn", found, x, y) < 0.2


@pytest.mark.parametrize("shape", [(256, 512, 384), (64, 20000, 48), (4096, 4096, 4096)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_two_launches_round(name: str, shape: tuple[int, int, int]) -> None:
    """Also where rows are few or long, and are split over programs otherwise."""
    m, k, n = shape
    sizes = {"float8_matmul": ((m, k), (k, n)), "float8_matmul_nt": ((m, k), (n, k))}.get(name, ((k, m), (k, n)))
    one = launcher(operator(name).bind(sizes, ()).bound, ["bf16"] * 2)
    assert one.roundings == 2
    assert [each.kind for each in one.work] == ["product"]
