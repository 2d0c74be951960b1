"""Moments of long rows in one pass, and sums of long rows in the kernel that makes what is summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from unity_ir.forms.compose import Part, composed
from unity_ir.forms.moments import moments
from unity_ir.forms.rewrite import simplified
from unity_ir.forms.row_sums import with_row_variables
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton import tiling
from unity_ir.ops import operator
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound

SHAPES = {
    # Rows of 25 tiles and a bit, in parts, the last of which is empty.
    "split": (7, 3, 61, 61),
    # So many rows that none is split, of 16 tiles and a bit.
    "whole": (5, 528, 57, 58),
    "groups": (6, 3, 91, 91),
}


def statistics(shape: tuple[int, ...], groups: int = 1) -> Bound:
    """The line of a batch's center, and of the distances to it."""
    mean = operator("batch_mean").bind((shape,), (("groups", groups),)).bound
    stats = operator("batch_stats").bind((shape, (groups, shape[1])), ()).bound
    found = composed([Part(mean, (0,), (1,), {}), Part(stats, (0, 1), (2, 3), {})], [1, 2, 3])
    assert found is not None
    return replace(found.line, operator="batch_mean + batch_stats")


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("name", SHAPES)
def test_moments_lose_no_digits(name: str, mean: float, runner: Any) -> None:
    shape, groups = SHAPES[name], 3 if name == "groups" else 1
    made = launcher(statistics(shape, groups), ("f32",))
    assert [each.passes for each in made.work] == [1] * (1 if name == "whole" else 2)
    (text, *_) = made.kernels.values()
    assert text.count(" in range(") == 1
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + mean
    # The first number of a row, to which others are relative, may be far from all.
    x[0, 0, 0, 0] += 9
    center, shift, square = (t.double() for t in runner.run(made, [x]))
    rows = x.double().unflatten(0, (groups, -1)).movedim(2, 1).flatten(2)
    var, average = torch.var_mean(rows, 2, correction=0)
    scale = var.sqrt()
    assert float(((center + shift - average) / scale).abs().max()) < 1e-6
    assert float((square - shift.square() - var).div(var).abs().max()) < 2e-6


def test_distances_are_to_the_center_that_is_stored(runner: Any) -> None:
    made = launcher(statistics(SHAPES["split"]), ("bf16",))
    x = (torch.randn(SHAPES["split"], generator=torch.Generator().manual_seed(0)) + 9.3).bfloat16()
    x[:, 0] = 300.0 + torch.arange(7 * 61 * 61).view(7, 61, 61) % 3
    center, shift, square = (t.double() for t in runner.run(made, [x]))
    assert float(shift.abs().max()) > 1e-3
    # 8 bits of the distance, which is 8 bits of the mean.
    average = x.double().mean((0, 2, 3))
    assert float((center + shift - average).abs().max()) < 3e-3
    expected = (x.double() - center.view(1, 3, 1, 1)).square().mean((0, 2, 3))
    torch.testing.assert_close(square, expected[None], rtol=8e-3, atol=0)


@pytest.mark.parametrize(
    "line",
    [
        "half(x)  m[c] = sum[n](x[n, c] / 2); s[c] = sum[n]((x[n, c] - sum[k](x[k, c] / 2)) / 2);"
        " q[c] = sum[n]((x[n, c] - sum[k](x[k, c] / 2)) * (x[n, c] - sum[k](x[k, c] / 2)) / 2)",
        "cube(x)  m[c] = sum[n](x[n, c] / 5); s[c] = sum[n]((x[n, c] - sum[k](x[k, c] / 5)) / 5);"
        " q[c] = sum[n]((x[n, c] - sum[k](x[k, c] / 5)) * x[n, c] / 5)",
        "two(x)  m[c] = sum[n](x[n, c] / 5); s[c] = sum[n]((x[n, c] - sum[k](x[k, c] / 5)) / 5)",
    ],
)
def test_other_lines_are_no_moments(line: str) -> None:
    assert moments(simplified(bind(parse_line(line), ((5, 3),), {}), {})) is None


MASKED = (
    "masked(g, o, x)  y[n, c, s] = where(gt(o[n, c, s], 0), g[n, c, s], 0);"
    "  w[d] = sum[m, r](where(gt(o[m, d, r], 0), g[m, d, r], 0) * x[m, d, r]);"
    "  b[d] = sum[m, r](where(gt(o[m, d, r], 0), g[m, d, r], 0))"
)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(7, 3, 3721), (5, 528, 3306)])
def test_sums_of_what_is_stored(shape: tuple[int, ...], runner: Any) -> None:
    joined = with_row_variables(bind(parse_line(MASKED), (shape,) * 3, {}), {})
    assert joined is not None
    made = launcher(joined[0], ("f32",) * 3)
    assert [each.kind for each in made.work] == ["rows"] * (2 if shape[1] == 3 else 1)
    (text, *_) = made.kernels.values()
    assert text.count(" in range(") == 1
    assert [text.count(f"tl.load({t}_ptr") for t in "gox"] == [1, 1, 1]
    g, o, x = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0))
    y, w, b = runner.run(made, [g, o, x])
    expected = g * (o > 0)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(w, (expected * x).double().sum((0, 2)).float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(b, expected.double().sum((0, 2)).float(), rtol=1e-5, atol=1e-3)


def test_equal_sizes_do_not_make_rows_columns() -> None:
    """A sum over the first of two equal dims keeps the second one."""
    line = bind(parse_line("turned(g)  y[a, b] = exp(g[a, b]); s[d] = sum[m](exp(g[m, d]))"), ((8, 8),), {})
    joined = with_row_variables(line, {})
    assert joined is not None
    _, total = joined[0].results
    assert [index.name for index in total.indices] == ["b"]


def test_what_reads_something_else_is_no_row_sum() -> None:
    line = bind(parse_line("apart(g, x)  y[a, b] = exp(g[a, b]); s[d] = sum[m](x[d, m])"), ((8, 9), (8, 9)), {})
    assert with_row_variables(line, {}) is None


def test_short_rows_are_left_to_other_kernels() -> None:
    assert tiling.LONGEST_ROW > 4 * 49
    assert [each.kind for each in launcher(statistics((4, 8, 7, 7)), ("f32",)).work] == ["rows"]
