"""Rows so long that they are read in loops: how often, and by how many programs, where there are few of them."""

import re
from typing import Any

import pytest
from case import Case
from covered import bound_of, operand_dtypes
from kernel_checks import check, random_operands

from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.triton.tiling import AT_WORK, LOOPED
from unity_ir.tdl.bind import bind
from unity_ir.tdl.parse import parse_line

LINES: list[tuple[str, Any]] = [
    # What the whole expression's sum is of needs a sum of its own over all of the row, not over a program's part.
    ("distance(x)  out[] = sum[n]((x[n] - max[m](x[m])) / size(n))", ((70001,),)),
    ("distances(x)  out[c] = sum[n]((x[n, c] - max[m](x[m, c])) / size(n))", ((9000, 5),)),
    ("spread(x)  out[c] = sum[n](x[c, n] * x[c, n] / size(n)) - max[m](x[c, m])", ((3, 70001),)),
    ("columns(x, y)  out[n, c] = x[n, c] * sum[m](x[m, c] * y[m, c] / size(m))", ((17000, 5), (17000, 5))),
    # A result that others are made of.
    (
        "both(x)  mean[c] = sum[n](x[c, n] / size(n));  off[c, n] = x[c, n] - sum[m](x[c, m] / size(m));"
        " top[c] = max[n](x[c, n])",
        ((3, 70001),),
    ),
    # Narrow tiles are so many that their parts are, too.
    ("narrow(x)  out[c] = sum[n](x[n, c])", ((70000, 8),)),
    ("many(x)  out[b, c] = exp(x[b, c] - max[k](x[b, k]))", ((300, 16500),)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "shapes"), LINES)
def test_lines(line: str, shapes: Any, runner: Any) -> None:
    bound = bind(parse_line(line), shapes, {})
    check(bound, random_operands(bound, Case(shapes, {}, max(bound.extents.values()))), "triton", runner)


IMAGES = (6, 3, 71, 73)
OPERATORS: list[tuple[str, Case]] = [
    ("batch_stats", Case((IMAGES, (1, 3)), {})),
    ("batch_norm_grad", Case((IMAGES, IMAGES, *((1, 3),) * 3, (3,)), {}, lift=(0, 0, 0, 60))),
    ("batch_stats_grad", Case(((2, 3), (2, 3), IMAGES, (2, 3)), {})),
    ("log_softmax", Case(((2, 20011),), {})),
    ("log_softmax_grad", Case(((2, 20011),) * 2, {})),
    ("layer_norm_grad", Case((*((2, 20011),) * 2, (20011,)), {})),
    ("cross_entropy", Case(((3, 20011), (3,)), {}, 20011)),
    ("cross_entropy_grad", Case(((), (3, 20011), (3,)), {}, 20011)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), OPERATORS)
def test_operators(name: str, case: Case, runner: Any) -> None:
    bound = bound_of(name, case)
    check(bound, random_operands(bound, case), "triton", runner)


def test_one_pass_serves_all_that_needs_no_other() -> None:
    """Of a batch norm's gradient over enough channels: one over both operands for all sums, one for the images'."""
    images = (64, 1024, 17, 17)
    bound = bound_of("batch_norm_grad", Case((images, images, *((1, 1024),) * 3, (1024,)), {}))
    made = launcher(bound, ("f32",) * 6)
    assert [each.passes for each in made.work] == [2]
    (text,) = made.kernels.values()
    assert text.count(" in range(") == 2
    assert text.count("tl.load(x_ptr") == 1


@pytest.mark.parametrize(
    ("name", "case", "launches"),
    [
        # The images' gradient by itself, parts of both sums, these, what is made of them.
        ("batch_norm_grad", Case((IMAGES, IMAGES, *((1, 3),) * 3, (3,)), {}), 4),
        # Parts of the maximum, it, parts of the sum, it, the rows' losses with what is picked, their sum.
        ("cross_entropy", Case(((3, 50257), (3,)), {}, 50257), 6),
    ],
)
def test_what_is_split_is_read_once(name: str, case: Case, launches: int) -> None:
    bound = bound_of(name, case)
    made = launcher(bound, operand_dtypes(bound))
    assert [each.passes for each in made.work] == [1] * launches


@pytest.mark.parametrize(
    ("line", "shapes", "least"),
    [
        # Under other names, over rows that are neighbours in memory.
        ("two(x)  mean[c] = sum[n](x[c, n]);  top[c] = max[m](x[c, m])", ((3, 70001),), 3 * 35),
        ("columns(x)  out[n, c] = x[n, c] * sum[m](x[m, c])", ((17000, 512),), 8 * 16),
    ],
)
def test_whatever_is_long_is_split(line: str, shapes: Any, least: int) -> None:
    made = launcher(bind(parse_line(line), shapes, {}), ("f32",))
    assert max(each.programs for each in made.work if each.kind == "rows") >= least
    assert all(each.passes == 1 for each in made.work)


def test_positions_after_the_last_part_fit() -> None:
    """A loop's end is computed before it is cut to the row's."""
    line = parse_line("total(x)  out[] = sum[n](x[n])")
    for size in (2**31 - 2**17, 2**31 - 2**20):
        first, _ = launcher(bind(line, ((size,),), {}), ("f32",)).compiled
        (text,) = (t for n, t in launcher(bind(line, ((size,),), {}), ("f32",)).kernels.items() if n == first.kernel)
        span = int(re.findall(r"\(part \+ 1\) \* (\d+)", text)[0])
        parts = -(-size // span)
        assert "tl.int64" in text or max(parts, AT_WORK // LOOPED) * span < 2**31


def test_few_rows_are_split_over_programs() -> None:
    for rows in (1, AT_WORK // LOOPED - 1, AT_WORK // LOOPED):
        bound = bind(parse_line("row(x)  out[b, c] = x[b, c] - max[k](x[b, k])"), ((rows, 50257),), {})
        (first, *others) = launcher(bound, ("f32",)).work
        if rows * LOOPED < AT_WORK:
            # The kernels of parts, of their maximum, and of the elements.
            assert len(others) == 2
            assert first.programs == min(-(-50257 // LOOPED), -(-AT_WORK // (rows * LOOPED))) * rows
        else:
            assert not others
