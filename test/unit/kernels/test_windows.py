"""Lines with windows, whole and in pieces, compute what they say; the usual ones by PyTorch's own functions."""

from typing import Any

import numpy as np
import pytest
import torch
from case import Case
from covered import bound_of, operand_dtypes
from kernel_checks import check, random_operands
from operator_cases import DTYPES

from unity_ir.forms.windows import needs_start
from unity_ir.kernels.launchers import launcher
from unity_ir.kernels.pytorch.code import torch_expression
from unity_ir.ops import operator
from unity_ir.pcg.interpret import split
from unity_ir.pcg.types import Piece, divided_type
from unity_ir.tdl.bind import bind
from unity_ir.tdl.divisibility import Analysis
from unity_ir.tdl.evaluate import evaluate
from unity_ir.tdl.parallel import Configuration, line_of_task, operand_degrees
from unity_ir.tdl.parse import parse_line
from unity_ir.tdl.syntax import Bound

WINDOWED = [
    *("avg_pool2d", "avg_pool2d_grad", "conv2d", "conv2d_data_grad", "conv2d_weight_grad"),
    *("max_pool2d", "max_pool2d_grad", "pad", "slice"),
]

PAIR = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
POOL = {"kernel": (3, 3), **PAIR}

NAMED: list[tuple[str, Any, dict[str, Any], str]] = [
    (
        "conv2d",
        ((2, 3, 8, 9), (4, 3, 3, 3)),
        PAIR,
        "torch.nn.functional.conv2d(a, b, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)",
    ),
    (
        "conv2d",
        ((2, 4, 8, 9), (6, 2, 1, 1)),
        {**PAIR, "padding": (0, 0), "stride": (2, 2), "groups": 2},
        "torch.nn.functional.conv2d(a, b, stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=2)",
    ),
    (
        "conv2d",
        ((2, 4, 8, 9), (6, 4, 1, 1)),
        {**PAIR, "padding": (0, 0)},
        "torch.nn.functional.conv2d(a, b, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)",
    ),
    (
        "conv2d_weight_grad",
        ((2, 6, 8, 9), (2, 4, 8, 9)),
        {**PAIR, "padding": (0, 0), "sizes": (1, 1)},
        "torch.nn.grad.conv2d_weight(b, (6, 4, 1, 1), a, (1, 1), (0, 0), (1, 1), 1).squeeze(3).squeeze(2)"
        "[:, :, None, None].expand(6, 4, 1, 1)",
    ),
    (
        "conv2d_data_grad",
        ((2, 4, 4, 5), (4, 3, 3, 3)),
        {**PAIR, "stride": (2, 2), "sizes": (8, 9)},
        "torch.nn.functional.conv_transpose2d(a, b, stride=(2, 2), padding=(1, 1), output_padding=(1, 0), groups=1,"
        " dilation=(1, 1))",
    ),
    (
        "conv2d_weight_grad",
        ((2, 4, 8, 9), (2, 3, 8, 9)),
        {**PAIR, "sizes": (3, 3)},
        "torch.nn.grad.conv2d_weight(b, (4, 3, 3, 3), a, (1, 1), (1, 1), (1, 1), 1)",
    ),
    ("max_pool2d", ((2, 3, 8, 9),), POOL, "torch.nn.functional.max_pool2d(a, (3, 3), (1, 1), (1, 1), (1, 1))"),
    (
        "avg_pool2d",
        ((2, 3, 8, 8),),
        {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)},
        "torch.nn.functional.avg_pool2d(a, (2, 2), (2, 2), (0, 0), divisor_override=4)",
    ),
    ("pad", ((2, 3),), {"dim": 1, "before": 1, "after": 2, "interior": 0}, "torch.nn.functional.pad(a, (1, 2))"),
    ("topk", ((2, 7),), {"k": 3}, "(a.sort(dim=-1, descending=True, stable=True)).values.narrow(-1, 0, 3)"),
]


@pytest.mark.parametrize(("name", "shapes", "attributes", "text"), NAMED)
def test_known_by_form(name: str, shapes: Any, attributes: dict[str, Any], text: str) -> None:
    one = operator(name)
    bound = one.bind(shapes, one.attributes(attributes)).bound
    assert torch_expression(bound, ["a", "b"][: len(shapes)])[0] == text


@pytest.mark.parametrize(("name", "shapes", "attributes"), [("max_pool2d_grad", ((2, 3, 8, 9),) * 2, POOL)])
def test_gradients_known_by_form(name: str, shapes: Any, attributes: dict[str, Any]) -> None:
    one = operator(name)
    bound = one.bind(shapes, one.attributes({**attributes, "sizes": shapes[1][2:]})).bound
    assert "max_pool2d_with_indices_backward(g, x, " in launcher(bound, ("f32", "f32"), "torch").source


LINES: list[tuple[str, Any]] = [
    # No function of PyTorch does these.
    ("lines(x)  out[a, y] = max[i](x[a, y + 2*i - 1])  where size(y) = 6, size(i) = 3", ((3, 9),)),
    ("least(x)  out[y] = min[i](x[2*y + i - 2])  where size(y) = 4, size(i) = 3", ((7,),)),
    ("products(x)  out[y] = prod[i](x[y + i - 1])  where size(y) = 7, size(i) = 3", ((7,),)),
    ("powers(x)  out[y] = sum[i](exp(x[y + i - 1]))  where size(y) = 7, size(i) = 3", ((7,),)),
    ("means(x)  out[y] = sum[i](x[y + 2*i - 1] / 3)  where size(y) = 5, size(i) = 3", ((7,),)),
    (
        "three(x)  out[y] = sum[i, j](x[y + 2*i + 3*j - 1] * x[y + j])  where size(y) = 4, size(i) = 2, size(j) = 2",
        ((8,),),
    ),
    (
        "conv1d(x, w)  out[n, o, y] = sum[c, i](x[n, c, 2*y + i - 1] * w[o, c, i])  where size(y) = 4",
        ((2, 3, 8), (5, 3, 3)),
    ),
    (
        "conv3d(x, w)  out[o, y, z, u] = sum[c, i, j, k](x[c, y + i - 1, z + j, 2*u + k] * w[o, c, i, j, k])"
        "  where size(y) = 4, size(z) = 3, size(u) = 2",
        ((2, 4, 4, 5), (3, 2, 3, 2, 2)),
    ),
    (
        "last(x, w)  out[n, y, o] = sum[c, i](x[n, y + i - 1, c] * w[i, c, o])  where size(y) = 6",
        ((2, 6, 3), (3, 3, 4)),
    ),
    ("gated(x, w)  out[y] = relu(sum[i](x[y + i - 1] * w[i]) + x[y])  where size(y) = 6", ((6,), (3,))),
    ("bank(x, w)  out[q, y] = sum[i](x[q, y + i - 1] * w[q, i])  where size(y) = 6", ((4, 6), (4, 3))),
    # What is written where windows overlap, beside the dim, or with holes.
    ("spread(x)  out[2*y + i - 1] = x[y, i]  where size(2*y + i - 1) = 9", ((4, 3),)),
    ("holes(x)  out[3*y + 1] = x[y]  where size(3*y + 1) = 14", ((4,),)),
    ("cut(x)  out[a, y - 2] = x[a, y]  where size(y - 2) = 3", ((3, 7),)),
    ("one(x)  out[2*y - 4] = x[y]  where size(2*y - 4) = 1", ((5,),)),
    ("both(x, w)  out[n, y + i - 1] = sum[c](x[n, c, y] * w[c, i])  where size(y + i - 1) = 6", ((2, 3, 6), (3, 3))),
    (
        "copies(x)  out[y + i, z + j] = x[y, z]  where size(i) = 2, size(j) = 3, size(y + i) = 6, size(z + j) = 5",
        ((5, 3),),
    ),
]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("line", "shapes"), LINES)
def test_lines_no_operator_has(line: str, shapes: Any, impl: str, runner: Any) -> None:
    bound = bind(parse_line(line), shapes, {})
    check(bound, random_operands(bound, Case(shapes, {})), impl, runner)


def pieces(bound: Bound) -> list[Configuration]:
    """Every variable by 2 and by itself, and all that can be at once."""
    splittable = [v for v in Analysis(bound).splittable if bound.extents[v] % 2 == 0]
    ways = [{v: 2} for v in splittable] + ([dict.fromkeys(splittable, 2)] if len(splittable) > 1 else [])
    ways += [{v: bound.extents[v]} for v in splittable]
    return [Configuration(way) for way in ways]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("name", WINDOWED)
def test_pieces(name: str, impl: str, drawn: Any, runner: Any) -> None:
    """Every piece, with its halo, at either end and in the middle."""
    rng = np.random.default_rng(0)
    tried = 0
    for case in drawn(name, 25 if impl == "torch" else 8):
        bound = bound_of(name, case)
        for configuration in pieces(bound):
            local = line_of_task(bound, configuration)
            degrees = operand_degrees(Analysis(bound), configuration)
            if not any(d.halo for d in degrees) and tried % 5:
                continue
            tried += 1
            divided = [v for v in configuration.degrees if needs_start(local, v)]
            dtypes = operand_dtypes(bound)
            made = launcher(local, dtypes, impl, divided)
            # Few different numbers, so that maxima are ties.
            whole = [rng.integers(-3, 4, shape).astype(float) for shape in case.shapes]
            types = [divided_type(shape, "f64", d) for shape, d in zip(case.shapes, degrees, strict=True)]
            parts = [split(array, type) for array, type in zip(whole, types, strict=True)]
            for at in {0, 1, *(d - 1 for d in configuration.degrees.values())}:
                offsets = {v: at % d * local.extents[v] for v, d in configuration.degrees.items()}
                arrays = [p[Piece(tuple(at % d for d in t.degrees))] for p, t in zip(parts, types, strict=True)]
                expected = evaluate(local, arrays, offsets)
                tensors = [torch.from_numpy(a.copy()).to(DTYPES[d]) for a, d in zip(arrays, dtypes, strict=True)]
                got = runner.run(made, tensors, *(offsets[v] for v in divided))
                for one, reference in zip(got, expected, strict=True):
                    np.testing.assert_allclose(one.double().numpy(), reference, rtol=1e-5, atol=1e-4)
    assert tried


WIDE = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}
TILES: list[tuple[str, Case]] = [
    # Several tiles either way, in two groups, none of them full.
    ("conv2d", Case(((2, 6, 13, 11), (140, 3, 3, 3)), WIDE)),
    ("conv2d", Case(((3, 20, 9, 7), (33, 20, 1, 1)), {**PAIR, "padding": (0, 0)})),
    ("conv2d_data_grad", Case(((2, 12, 7, 11), (12, 70, 3, 3)), {**WIDE, "sizes": (13, 11)})),
    ("conv2d_data_grad", Case(((2, 5, 4, 4), (5, 3, 1, 1)), {**PAIR, "padding": (0, 0), "sizes": (4, 4)})),
    # Sums long enough to be cut into parts.
    ("conv2d_weight_grad", Case(((7, 140, 7, 11), (7, 6, 13, 11)), {**WIDE, "sizes": (3, 3)})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), TILES)
def test_tiles(name: str, case: Case, runner: Any) -> None:
    bound = bound_of(name, case)
    kernels = launcher(bound, ("f32", "f32")).kernels
    assert any("convolution" in k for k in kernels) == bound.has_windows
    check(bound, random_operands(bound, case), "triton", runner)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("name", "shapes", "sizes"),
    [
        ("conv2d", ((2, 4, 1, 1), (3, 4, 1, 3)), {}),
        ("conv2d_data_grad", ((2, 3, 1, 1), (3, 4, 1, 3)), {"sizes": (1, 1)}),
        ("conv2d_weight_grad", ((1, 3, 1, 1), (1, 4, 1, 1)), {"sizes": (1, 3)}),
        ("conv2d_weight_grad", ((1, 3, 1, 5), (1, 4, 1, 5)), {"sizes": (1, 3)}),
    ],
)
def test_images_of_one_row(name: str, shapes: Any, sizes: Any, impl: str, runner: Any) -> None:
    """One of the two windows has no variable; only the other leaves the tensor."""
    case = Case(shapes, {**PAIR, "padding": (0, 1), **sizes})
    bound = bound_of(name, case)
    check(bound, random_operands(bound, case), impl, runner)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("rows", [2, 3])
def test_images_of_one_position(rows: int, impl: str, runner: Any) -> None:
    """Neither window has a variable: they are equal if the image is a square, and yet of two dims."""
    case = Case(((2, 3, 1, 1), (3, 4, 1, 1)), {**PAIR, "padding": (0, 0), "stride": (2, 2), "sizes": (rows, 2)})
    bound = bound_of("conv2d_data_grad", case)
    check(bound, random_operands(bound, case), impl, runner)


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d", "slice", "max_pool2d_grad", "avg_pool2d_grad", "pad"])
def test_reads_and_writes_of_windows_are_generated(name: str, drawn: Any) -> None:
    for case in drawn(name, 8):
        bound = bound_of(name, case)
        assert launcher(bound, operand_dtypes(bound)).kernels


def test_long_sums_are_cut(runner: Any) -> None:
    name, case = TILES[-1]
    made = launcher(bound_of(name, case), ("f32", "f32"))
    assert ".sum(0)" in made.source


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("conv2d", Case(((2, 4, 6, 5), (6, 2, 3, 3)), {**PAIR, "groups": 2})),
        ("conv2d_data_grad", Case(((2, 4, 6, 5), (4, 3, 3, 3)), {**PAIR, "sizes": (6, 5)})),
        ("conv2d_weight_grad", Case(((2, 4, 6, 5), (2, 3, 6, 5)), {**PAIR, "sizes": (3, 3)})),
        ("max_pool2d", Case(((2, 3, 6, 5),), POOL)),
        ("max_pool2d_grad", Case(((2, 3, 6, 5),) * 2, {**POOL, "sizes": (6, 5)})),
        (
            "avg_pool2d_grad",
            Case(
                ((2, 3, 3, 2),),
                {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "sizes": (6, 5), "degrees": (1, 1)},
            ),
        ),
    ],
)
def test_half(name: str, case: Case, impl: str, dtype: str, runner: Any) -> None:
    bound = bound_of(name, case)
    check(bound, random_operands(bound, case), impl, runner, dtype)
