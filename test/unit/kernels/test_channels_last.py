"""Kernels of images that are stored with the channels last compute what the lines say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from case import Case
from covered import bound_of
from extent import examples
from kernel_checks import check, random_operands

from unity_ir.forms.compose import Part, composed
from unity_ir.forms.moments import Moments, moments
from unity_ir.forms.rewrite import simplified
from unity_ir.forms.stored import channels_last, with_channels_last
from unity_ir.kernels.launchers import launcher
from unity_ir.tdl.syntax import Bound

OF_IMAGES = [
    *("conv2d", "conv2d_data_grad", "conv2d_weight_grad", "max_pool2d", "max_pool2d_grad", "avg_pool2d"),
    *("batch_mean", "batch_stats", "batch_norm", "batch_norm_data_grad", "batch_norm_weight_grad", "batch_norm_grad"),
    *("avg_pool2d_grad", "adaptive_avg_pool2d"),
]
CONVOLUTIONS = OF_IMAGES[:3]


def turned(bound: Bound, weights: bool) -> tuple[Bound, list[bool]]:
    """A line whose images are stored with the channels last, weights of convolutions with or without; and which are."""
    images = [len(a) == 4 for a in shapes_of(bound)]
    if bound.operator in CONVOLUTIONS and not weights:
        images = [is_image and name != "w" for is_image, name in zip(images, names(bound), strict=True)]
    results = [len(r.indices) == 4 and bound.operator != "conv2d_weight_grad" for r in bound.results]
    last = {name for name, is_image in zip(names(bound), images, strict=True) if is_image}
    return with_channels_last(bound, last, results), images


def names(bound: Bound) -> list[str]:
    return [p.name for p in bound.operands]


def shapes_of(bound: Bound) -> list[tuple[int, ...]]:
    """The dims of each operand, by what reads it; () for one that nothing reads."""
    read = {a.tensor: a.indices for r in bound.results for a in r.accesses}
    return [tuple(range(len(read.get(name, ())))) for name in names(bound)]


def _corrupts(name: str, case: Case) -> bool:
    """
    Whether PyTorch's gradient of a weight (2.13 on CPUs with AVX2, in float32) may write beyond it, and the process end
    long after: of one tap, of images whose last rows or columns it leaves out, of fewer than 8 channels.
    """
    how = case.attributes
    return name == "conv2d_weight_grad" and how["sizes"] == (1, 1) and how["stride"] != (1, 1)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_operators(name: str, impl: str, drawn: Any, runner: Any) -> None:
    """Operators that networks of images have, at any shapes, in both implementations."""
    tried = 0
    for number, case in enumerate(drawn(name, examples(40))):
        bound = bound_of(name, case)
        if not any(len(shape) == 4 for shape in case.shapes) or (impl == "torch" and _corrupts(name, case)):
            continue
        tried += 1
        line, images = turned(bound, weights=bool(number % 2))
        arrays = [
            np.ascontiguousarray(a.transpose(channels_last((0, 1, 2, 3)))) if is_image else a
            for a, is_image in zip(random_operands(bound, case), images, strict=True)
        ]
        check(line, arrays, impl, runner)
    assert tried


def test_convolutions_are_pytorchs_and_triton_s(drawn: Any) -> None:
    for name in CONVOLUTIONS:
        for case in drawn(name, examples(40)):
            bound = bound_of(name, case)
            line, _ = turned(bound, weights=True)
            text = launcher(line, ("f32", "f32"), "torch").source
            assert "conv" in text or "@" in text or not line.has_windows, text
            if any("convolution" in k for k in launcher(bound, ("f32", "f32")).kernels):
                assert any("convolution" in k for k in launcher(line, ("f32", "f32")).kernels)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_names_tell_the_orders_of_dims_apart(impl: str) -> None:
    """The same convolution gets another name for each order of dims of its operand and its result."""
    of_one_tap = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    bound = bound_of("conv2d", Case(((8, 7, 7, 7), (4, 7, 1, 1)), of_one_tap))
    lines = [with_channels_last(bound, x, [made]) for x in ((), {"x"}) for made in (False, True)]
    assert len({launcher(line, ("f32", "f32"), impl).name for line in lines}) == len(lines)


@pytest.mark.parametrize(("channels", "rows"), [(3, 9), (64, 32), (70, 33)])
def test_moments_are_taken_in_one_pass(channels: int, rows: int, runner: Any) -> None:
    """One kernel for 3 channels, two for 64 and 70, each of which reads the samples once."""
    shape = (8, channels, rows, rows)
    mean, stats = (
        bound_of(n, Case(s, a))
        for n, s, a in (("batch_mean", (shape,), {"groups": 1}), ("batch_stats", (shape, (1, channels)), {}))
    )
    parts = [Part(with_channels_last(mean, {"x"}, [False]), (0,), (1,), {})]
    parts.append(Part(with_channels_last(stats, {"x"}, [False, False]), (0, 1), (2, 3), {}))
    found = composed(parts, [1, 2, 3])
    assert found is not None
    line = found.line
    assert isinstance(moments(simplified(line, {})), Moments)
    x = np.random.default_rng(0).standard_normal((8, rows, rows, channels)) + 5
    check(line, [x], "triton", runner)
    assert len(launcher(line, ("f32",)).work) == (2 if channels > 3 else 1)
