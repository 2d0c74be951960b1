"""Tiles of matrix products: their size, the order in which programs compute them, and how they are copied."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from case import Case
from kernel_checks import check, random_operands
from operator_cases import DTYPES

from unity_ir.forms.stored import with_rows
from unity_ir.kernels.launchers import Launcher, can_add, launcher
from unity_ir.kernels.triton import matmul
from unity_ir.kernels.triton.matmul import descriptor_tile, tile_of
from unity_ir.tdl.bind import bind
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound

SQUARE, LARGEST = (128, 128), (128, 256)


@pytest.mark.parametrize(
    ("m", "n", "work", "tile"),
    [
        (16384, 4096, 0, LARGEST),
        (16384, 4096, 3, LARGEST),
        # What is computed after the product would not fit registers.
        (16384, 4096, 17, SQUARE),
        # 32 of the largest tiles, or 64 square ones, are less than half of the SMs.
        (1024, 1024, 0, (128, 64)),
        # 132 square tiles are one for each SM; 66 of the largest would leave half of them without work.
        (1408, 1536, 0, SQUARE),
        (64, 4096, 0, (64, 128)),
    ],
)
def test_tile(m: int, n: int, work: int, tile: tuple[int, int]) -> None:
    sizes = {"b": 1, "m": m, "n": n, "k": 1024}
    found = tile_of(sizes, work)
    found = descriptor_tile(sizes, found, work) or found
    assert (found.m, found.n) == tile


@pytest.mark.parametrize(
    ("sizes", "copied"),
    [
        ((1024, 1024, 1024), (128, 64, 128)),
        ((1024, 2048, 1024), (128, 128, 128)),
        ((16384, 4096, 64), (128, 256, 64)),
        # Few steps, for which descriptors are not worth their making.
        ((1024, 1024, 1023), None),
        ((1023, 1024, 1024), None),
    ],
)
def test_tiles_that_descriptors_copy(sizes: tuple[int, int, int], copied: tuple[int, int, int] | None) -> None:
    given = {"b": 1, **dict(zip("mnk", sizes, strict=True))}
    found = descriptor_tile(given, tile_of(given, 0), 0)
    assert (found and (found.m, found.n, found.k)) == copied


def test_tile_of_a_batch() -> None:
    """A batch's products fill SMs together."""
    sizes = {"m": 1024, "n": 1024, "k": 1024}
    assert tile_of({**sizes, "b": 1}, 0).n < tile_of({**sizes, "b": 64}, 0).n


def product(layout: str, shapes: tuple[tuple[int, int], tuple[int, int]], after: str = "P") -> Bound:
    return bind(parse_line(f"product(x, w) out[m, n] = {after.replace('P', f'sum[k]({layout})')}"), shapes, {})


M, N, K = 1160, 264, 72
LAYOUTS: list[tuple[str, tuple[tuple[int, int], tuple[int, int]]]] = [
    ("x[m, k] * w[k, n]", ((M, K), (K, N))),
    ("x[k, m] * w[k, n]", ((K, M), (K, N))),
    ("x[m, k] * w[n, k]", ((M, K), (N, K))),
    ("x[k, m] * w[n, k]", ((K, M), (N, K))),
]


def where_there_are(made: Launcher, descriptors: bool) -> Launcher:
    """A launcher as on a GPU that has descriptors, or on one that has none."""
    asked = "DESCRIPTORS = has_descriptors()"
    assert asked in made.source
    return replace(made, source=made.source.replace(asked, f"DESCRIPTORS = {descriptors}"))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "shapes"), LAYOUTS)
@pytest.mark.parametrize("has", [True, False])
def test_large_products(layout: str, shapes: Any, has: bool, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Of 20 tiles by 3 programs, in groups of 8 rows and of 2, of which the last tiles are moved inside, and of a rest of
    K: as copied by descriptors, and by pointers.
    """
    monkeypatch.setattr(matmul, "SMS", 3)
    bound = product(layout, shapes, after="relu(P)")
    made = launcher(bound, ["bf16", "bf16"])
    assert [c.descriptors for c in made.compiled] == [True, False]
    assert "[(3,)]" in made.source
    made = where_there_are(made, has)
    check(bound, random_operands(bound, Case(shapes, {})), "triton", runner, "bf16", made)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "shapes"), [LAYOUTS[0], LAYOUTS[3]])
@pytest.mark.parametrize("size", [(264, 200), (264, 72)])
def test_small_tiles_by_descriptors(
    layout: str, shapes: Any, size: tuple[int, int], runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles have 128 or 64 columns and steps of 128, which do not divide K; the last tiles are moved inside."""
    monkeypatch.setattr(matmul, "SMS", 2)
    monkeypatch.setattr(matmul, "MANY_STEPS", 64)
    sizes = dict(zip((M, N, K), (*size, 136), strict=True))
    shapes = tuple(tuple(sizes[each] for each in shape) for shape in shapes)
    bound = product(layout, shapes, after="gelu(P) + gelu(P * 2.0)")
    made = launcher(bound, ["bf16", "bf16"])
    (by_descriptors, _) = made.compiled
    assert [by_descriptors.constants[f"BLOCK_{d}"] for d in "MNK"] == [128, 128 if size[1] > 128 else 64, 128]
    assert "short" in by_descriptors.expects
    made = where_there_are(made, True)
    check(bound, random_operands(bound, Case(shapes, {})), "triton", runner, "bf16", made)


BATCHES = [
    # A batch, and the columns of each head as one.
    ("product(x, w) out[b, m, n] = sum[k](x[b, m, k] * w[b, n, k])", ((3, 136, 136), (3, 136, 136))),
    ("product(x, w) out[h, m, n] = sum[k](x[m, k] * w[k, h, n])", ((136, 136), (136, 3, 136))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "shapes"), BATCHES)
def test_batches_by_descriptors(line: str, shapes: Any, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs compute the 4 tiles of each product; the last tiles are moved inside."""
    monkeypatch.setattr(matmul, "SMS", 6)
    monkeypatch.setattr(matmul, "MANY_STEPS", 64)
    bound = bind(parse_line(line), shapes, {})
    made = launcher(bound, ["bf16", "bf16"])
    assert [c.descriptors for c in made.compiled] == [True, False]
    assert "[(2, 3)]" in made.source
    made = where_there_are(made, True)
    check(bound, random_operands(bound, Case(shapes, {})), "triton", runner, "bf16", made)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1024, 1024, 1024), True),
        ((1, 1024, 1024, 1023), False),
        ((1, 1023, 4096, 4096), False),
        # Columns of 8 heads, and of one.
        ((8, 4096, 128, 1024), True),
        ((2, 4096, 64, 1024), False),
        ((512, 512, 512, 64), False),
    ],
)
def test_large(sizes: tuple[int, int, int, int], expected: bool) -> None:
    assert matmul.is_large(dict(zip("bmnk", sizes, strict=True))) == expected


def test_a_batch_of_unaligned_products_is_copied_by_pointers() -> None:
    line = parse_line("product(x, w) out[b, m, n] = sum[k](x[b, m, k] * w[b, k, n])")
    ((b, m, k), n) = (8, 512, 1024), 516
    made = launcher(bind(line, ((b, m, k), (b, k, n)), {}), ["bf16", "bf16"])
    assert [(c.descriptors, "short" in c.expects) for c in made.compiled] == [(None, False)]
    line = parse_line("product(x, w) out[b, m, n] = sum[k](x[b, k, m] * w[b, k, n])")
    made = launcher(bind(line, ((b, k, m), (b, k, 512)), {}), ["bf16", "bf16"])
    assert [(c.descriptors, "short" in c.expects) for c in made.compiled] == [(True, True), (False, True)]


@pytest.mark.parametrize(("columns", "tile"), [(4096, 256), (4097, 128)])
def test_results_stored_element_by_element_need_registers(columns: int, tile: int) -> None:
    """Two float32 results of 128 x 256 with unaligned rows would not fit."""
    product = "sum[k](x[m, k] * w[n, k])"
    line = parse_line(f"f(x, w, b) out[m, n] = {product} + b[n]; s[m, n] = {product} + b[n]")
    bound = bind(line, ((4096, 1024), (columns, 1024), (columns,)), {})
    bound = replace(bound, results=tuple(replace(each, dtype="f32") for each in bound.results))
    made = launcher(bound, ["bf16"] * 3)
    assert made.compiled[0].constants["BLOCK_N"] == tile


@pytest.mark.parametrize(("added", "tile"), [("a[n]", 256), ("a[m, n]", 128)])
def test_matrices_read_beside_float8_need_registers(added: str, tile: int) -> None:
    """With two of them the largest tile spilled in DeepSeek-V3's step."""
    line = parse_line(f"f(x, w, r, a) out[m, n] = sum[k](float8(x[m, k]) * float8(w[k, n])) + r[m, n] + {added}")
    shapes = ((4096, 2048), (2048, 7168), (4096, 7168), (4096, 7168)[-added.count(",") - 1 :])
    made = launcher(bind(line, shapes, {}), ["bf16"] * 4)
    (product,) = [c for c in made.compiled if c.descriptors]
    assert product.constants["BLOCK_N"] == tile


def test_padded_rows(runner: Any) -> None:
    """Tiles by descriptors are stored up to a multiple of 16 columns where rows have room; no bias is read there."""
    line = parse_line("product(x, w, b) out[m, n] = sum[k](x[m, k] * w[n, k]) + b[n]")
    shapes = ((M, K), (301, K), (301,))
    whole = bind(line, shapes, {})
    made = launcher(with_rows(whole, {}, [320]), ["bf16"] * 3)
    assert (
        "tl.store(out_ptr + m[:, None] * out_m + n[None, :] * out_n, value, mask=m_inside)"
        in made.kernels[made.compiled[0].kernel]
    )
    operands = [torch.from_numpy(a).to(torch.bfloat16) for a in random_operands(whole, Case(shapes, {}))]
    (got,) = runner.run(where_there_are(made, True), operands)
    assert (got.shape, got.stride()) == ((M, 301), (320, 1))
    (expected,) = evaluate(whole, [t.double().numpy() for t in operands])
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1.6e-2, atol=0.2)


@pytest.mark.parametrize(("layout", "rows"), [("x[m, k] * w[k, n]", (0, 320)), ("x[k, m] * w[n, k]", (320, 0))])
def test_tiles_may_begin_anywhere(layout: str, rows: tuple[int, int], runner: Any) -> None:
    """In the interpreter programs use no descriptors, whose tiles begin at multiples of 16 bytes there."""
    m, n = (257, 264) if rows[0] else (256, 301)
    shapes = ((K, m), (n, K)) if rows[0] else ((m, K), (K, n))
    whole = product(layout, shapes)
    made = launcher(with_rows(whole, dict(zip("xw", rows, strict=True)), [0]), ["bf16"] * 2)
    assert made.compiled[0].descriptors
    given = [torch.from_numpy(a).to(torch.bfloat16) for a in random_operands(whole, Case(shapes, {}))]
    stored = [torch.nn.functional.pad(x, (0, row and row - x.shape[1])) for x, row in zip(given, rows, strict=True)]
    (got,) = runner.run(made, [s[:, : x.shape[1]] for s, x in zip(stored, given, strict=True)], within=stored)
    (expected,) = evaluate(whole, [t.double().numpy() for t in given])
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=1.6e-2, atol=0.2)


def test_descriptors_are_for_gpus_with_room_for_large_tiles() -> None:
    made = launcher(product(*LAYOUTS[0]), ["bf16"] * 2)
    targets = ("cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942")
    found = {t: [c.descriptors for c in made.compiled if c.is_for(t)] for t in targets}
    assert found == {t: [t in ("cuda:90", "cuda:100")] for t in targets}


ADDED = [
    # (shapes, (m, n)): by descriptors, by pointers in full tiles, and in tiles that end beyond the product.
    ((64, 128), (64, 256)),
    ((64, 128), (64, 128)),
    ((K, 24), (K, 40)),
]


@pytest.mark.parametrize("shapes", ADDED)
@pytest.mark.parametrize(
    ("impl", "dtype"), [("triton", "bf16"), ("triton", "f32"), ("torch", "bf16"), ("torch", "f32")]
)
def test_products_are_added_in_place(
    shapes: Any, impl: str, dtype: str, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whatever the operands; to nothing, too."""
    monkeypatch.setattr(matmul, "SMS", 1)
    bound = bind(parse_line("product(x, w) out[m, n] = sum[k](x[k, m] * w[k, n])"), shapes, {})
    bound = replace(bound, results=(replace(bound.results[0], dtype="f32"),))
    assert can_add(bound, [dtype] * 2, impl)
    made = launcher(bound, [dtype] * 2, impl, adds=True)
    assert any(c.descriptors for c in made.compiled) == ((impl, dtype, shapes[1][1]) == ("triton", "bf16", 256))
    operands = [torch.from_numpy(a).to(DTYPES[dtype]) for a in random_operands(bound, Case(shapes, {}))]
    (expected,) = evaluate(bound, [t.double().numpy() for t in operands])
    versions = [made]
    if any(c.descriptors for c in made.compiled):
        versions = [where_there_are(made, has) for has in (True, False)]
    for version in versions:
        (total,) = runner.run(version, operands, None)
        assert total.dtype == torch.float32
        np.testing.assert_allclose(total.numpy(), expected, rtol=1e-4, atol=1e-4)
        (again,) = runner.run(version, operands, total, within=[total])
        assert again is total
        np.testing.assert_allclose(total.numpy(), 2 * expected, rtol=1e-4, atol=1e-4)


def test_products_whose_tiles_overlap_are_not_added() -> None:
    """The last tiles are moved inside, and would add what they share with others twice."""
    for m, n in ((1160, 264), (136, 128)):
        bound = product("x[k, m] * w[k, n]", ((64, m), (64, n)))
        assert not can_add(bound, ["bf16"] * 2, "triton")
        assert can_add(bound, ["bf16"] * 2, "torch")
