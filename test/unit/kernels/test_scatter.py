"""Gradients of tables: all patterns of dims of size 1, ids out of range, places that have most of the positions."""

import itertools
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from covered import operand_dtypes
from extent import sample

from unity_ir.kernels.launchers import Launcher, launcher
from unity_ir.kernels.triton.scatter import SHORT
from unity_ir.ops import operator
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line

TOLERANCES = {"f64": 1e-12, "f32": 1e-5, "bf16": 1.6e-2}
"""The interpreter cuts bfloat16 off where it should round."""

BAGS = ("embedding_grad", "embedding_bag_grad")


def made(name: str, ids: tuple[int, ...], rows: int, width: int, dtype: str = "f32", start: bool = False) -> Launcher:
    """The gradient of a table of `rows` by `width`, of which ids of this shape were read."""
    one = operator(name)
    grad = (*(ids if name == "embedding_grad" else ids[:-1]), width)
    bound = one.bind((grad, ids), one.attributes({"size": rows, "degrees": (1,)})).bound
    return launcher(bound, operand_dtypes(bound, dtype), offsets=("v",) if start else ())


def in_double(one: Launcher) -> Launcher:
    """The same lines in double precision."""

    def double(text: str) -> str:
        return text.replace(".float32", ".float64")

    return replace(one, source=double(one.source), kernels={k: double(t) for k, t in one.kernels.items()})


def gradient(name: str, g: torch.Tensor, ids: torch.Tensor, rows: int, start: int = 0) -> torch.Tensor:
    """By autograd of PyTorch's indexing, of the ids that a piece has."""
    flat = ids.flatten()
    each = g if name == "embedding_grad" else g[..., None, :].expand(*ids.shape, g.shape[-1])
    inside = (flat >= start) & (flat < start + rows)
    table = torch.zeros(rows, g.shape[-1], dtype=torch.float64, requires_grad=True)
    table[flat[inside] - start].backward(each.reshape(-1, g.shape[-1])[inside].double())
    assert table.grad is not None
    return table.grad


def check(name: str, ids: torch.Tensor, rows: int, width: int, runner: Any, dtype: str = "f32", start: int = 0) -> None:
    one = made(name, tuple(ids.shape), rows, width, "f32" if dtype == "f64" else dtype, start > 0)
    kind = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    shape = (*(ids.shape if name == "embedding_grad" else ids.shape[:-1]), width)
    g = torch.from_numpy(np.random.default_rng(1).standard_normal(shape)).to(kind)
    more = [start] if start else []
    (got,) = runner.run(in_double(one) if dtype == "f64" else one, [g, ids], *more)
    expected = gradient(name, g, ids, rows, start)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("shape", [s for n in (1, 2, 3) for s in itertools.product((1, 7), repeat=n)])
def test_dims_of_size_1(name: str, shape: tuple[int, ...], runner: Any) -> None:
    """Of ids, rows and columns; ids of -1 and of one too many give nothing."""
    for rows, width in itertools.product((1, 9), (1, 6)):
        ids = torch.from_numpy(np.random.default_rng(0).integers(-1, rows + 1, shape))
        check(name, ids, rows, width, runner)


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("shape", [s for n in (1, 2, 3) for s in itertools.product((1, 4096), repeat=n) if prod(s) > 1])
def test_no_element_of_a_table_looks_at_every_position(name: str, shape: tuple[int, ...]) -> None:
    """Whatever dims are of size 1, a program makes a part of one row, after the positions are sorted."""
    rows, width = 128, 768
    one = made(name, shape, rows, width)
    assert "argsort" in one.source
    *chunks, places = one.work
    assert places.programs == rows * -(-width // 256)
    assert sum(launch.programs for launch in chunks) <= 3 * prod(shape) // 64


def test_a_long_table_has_a_program_for_each_position() -> None:
    # One for each of a million rows took 7 ms on an H100 for eight tables of which 1,024 positions were read.
    one = made("embedding_bag_grad", (1024, 1), 1_000_000, 64)
    *_, places = one.work
    assert places.programs == 1024
    assert ".new_zeros(" in one.source


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", [0, 3000])
@pytest.mark.parametrize(("count", "different"), [(40, 40), (40, 3), (1500, 4), (1500, 900)])
def test_long_tables(count: int, different: int, start: int, runner: Any) -> None:
    """Few rows are read, once or often, or by positions enough for chunks; a piece is given others' ids, too."""
    rng = np.random.default_rng(4)
    ids = rng.choice(rng.choice(10_000, different, replace=False), count)
    check("embedding_grad", torch.from_numpy(ids), 4000, 3, runner, start=start)


@pytest.mark.parametrize(("count", "chunk"), [(SHORT, None), (1024, 32), (8192, 128), (16384, 128), (10**6, 1024)])
def test_a_row_of_many_positions_is_made_by_many_programs(count: int, chunk: int | None) -> None:
    """Those of token types are in a table of two rows."""
    one = made("embedding_grad", (2, count // 2), 2, 1024)
    *chunks, places = one.compiled
    assert places.constants.get("CHUNK") == chunk
    assert [c.constants["CHUNK"] for c in chunks] == [chunk] * (chunk is not None)
    if chunk is not None:
        assert one.work[0].programs == count // chunk * 4
        # In turn a program reads what is not of whole chunks, at most two of them, and the sums of the others.
        assert 2 * chunk + count // chunk <= 5 * count**0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("often", "rows", "dtype"),
    sample(list(itertools.product((0.0, 0.5, 0.97, 1.0), (1, 2, 300), ("f32", "f64", "bf16"))), 2),
)
def test_frequent_ids(often: float, rows: int, dtype: str, runner: Any) -> None:
    """Of 1,501 positions, a part in one row; others anywhere, some out of range."""
    rng = np.random.default_rng(7)
    ids = np.where(rng.random(1501) < often, rows // 2, rng.integers(-3, rows + 3, 1501))
    check("embedding_grad", torch.from_numpy(ids), rows, 5, runner, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3, 300])
def test_widths(width: int, runner: Any) -> None:
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, 2, (1, 4400)))
    check("embedding_grad", ids, 2, width, runner)


@pytest.mark.parametrize("count", [513, 576, 640, 1023, 1024, 1025])
def test_chunks_at_every_place(count: int, runner: Any) -> None:
    """Rows that begin and end before, at and after the ends of chunks."""
    lengths = [0, 1, 31, 32, 33, 64, 95, 96, 0, 3]
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.concatenate([ids, np.full(count - len(ids), len(lengths))])
    np.random.default_rng(5).shuffle(ids)
    check("embedding_grad", torch.from_numpy(ids), len(lengths) + 2, 2, runner)


def test_a_piece_of_the_rows(runner: Any) -> None:
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, 12, (1, 1200)))
    for start in (4, 8):
        check("embedding_grad", ids, 4, 3, runner, start=start)


def test_the_same_bits_every_time(runner: Any) -> None:
    one = made("embedding_grad", (2000,), 2, 3)
    rng = np.random.default_rng(2)
    g = torch.from_numpy(rng.standard_normal((2000, 3))).float()
    ids = torch.from_numpy(rng.integers(0, 2, 2000))
    first, second = (runner.run(one, [g, ids])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_values_that_are_not_loaded(runner: Any) -> None:
    """Beyond the last position there is nothing to add, whatever the expression is there."""
    line = parse_line("count(g, t: int)  out[v, e] = sum[b](where(eq(v, t[b]), exp(g[e]), 0))  where size(v) = 3")
    g, t = torch.randn(4), torch.from_numpy(np.random.default_rng(4).integers(0, 3, 1100))
    (got,) = runner.run(launcher(bind(line, ((4,), (1100,)), {}), ("f32", "i64")), [g, t])
    torch.testing.assert_close(got, torch.bincount(t)[:, None] * g.exp(), rtol=2e-5, atol=0.0)
