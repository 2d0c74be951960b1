"""Convolution, pooling, padding and slicing against PyTorch's own samples of them (OpInfo)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from opinfo import MOST, Use, check, infos, one, use
from torch import Tensor

from unity_ir.pcg.node import Value

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import SampleInput

Pair = tuple[int, int]


def pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))  # pyright: ignore


def conv2d(s: SampleInput) -> Use | None:
    """With its bias, spread over rows and columns; string paddings that are symmetric, samples of one image."""
    given = dict(zip(("weight", "bias", "stride", "padding", "dilation", "groups"), s.args, strict=False)) | s.kwargs
    w, bias = given["weight"], given.get("bias")
    stride, dilation = pair(given.get("stride", 1)), pair(given.get("dilation", 1))
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
        if padding == "same" and any(r % 2 for r in reach):
            return None
        padding = tuple(r // 2 for r in reach) if padding == "same" else 0
    if w.shape[0] == 0 or s.input.dim() != 4:
        return None
    attributes = {"stride": stride, "padding": pair(padding), "dilation": dilation, "groups": given.get("groups", 1)}

    def build(x: Value, w: Value, *bias: Value) -> tuple[Value, ...]:
        y = one("conv2d", x, w, **attributes)
        spread = [one("reshape", b, shape=(*b.shape, 1, 1)) for b in bias]
        return (one("add", y, *spread) if spread else y,)

    return Use((s.input, w) if bias is None else (s.input, w, bias), build)


def max_pool2d(s: SampleInput) -> Use | None:
    given = dict(s.kwargs)
    if given["return_indices"] or given["ceil_mode"]:
        return None
    kernel = pair(given["kernel_size"])
    stride = pair(given["stride"]) if given.get("stride") else kernel
    padding, dilation = pair(given["padding"]), pair(given["dilation"])
    return use("max_pool2d", s.input, kernel=kernel, stride=stride, padding=padding, dilation=dilation)


def avg_pool2d(s: SampleInput) -> Use | None:
    """Another divisor than the kernel's size is a scale."""
    names = ("kernel", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    given = dict(zip(names, s.args, strict=False)) | s.kwargs
    kernel = pair(given.get("kernel", given.get("kernel_size")))
    stride = pair(given["stride"]) if given.get("stride") else kernel
    padding = pair(given.get("padding", 0))
    sizes = zip(s.input.shape[-2:], kernel, stride, padding, strict=True)
    fits = all((size + 2 * p - k) % step == 0 for size, k, step, p in sizes)
    if (given.get("ceil_mode") and not fits) or (any(padding) and not given.get("count_include_pad", True)):
        return None
    by = kernel[0] * kernel[1] / (given.get("divisor_override") or kernel[0] * kernel[1])
    attributes = {"kernel": kernel, "stride": stride, "padding": padding}
    return Use((s.input,), lambda x: (one("scale", one("avg_pool2d", x, **attributes), by=by),))


def adaptive_avg_pool2d(s: SampleInput) -> Use | None:
    sizes = s.args[0] if isinstance(s.args[0], tuple) else (s.args[0],) * 2
    whole = tuple(size if want is None else want for want, size in zip(sizes, s.input.shape[-2:], strict=True))
    return use("adaptive_avg_pool2d", s.input, sizes=whole)


def narrow(s: SampleInput) -> Use | None:
    dim, start, size = s.args
    if isinstance(start, Tensor) or size == 0:
        return None
    dim, start = dim % s.input.dim(), start % s.input.shape[dim]
    return use("slice", s.input, dim=dim, start=start, size=size)


def pad(s: SampleInput) -> Use | None:
    """Any value: the zeros are put around what is left of the elements without it."""
    amounts, value = s.args[0], (s.args[1:] or (0.0,))[-1]
    if s.args[1:2] == ("constant",):
        value = (s.args[2:] or (0.0,))[0]
    if min(amounts) < 0 or 0 in s.input.shape:
        return None

    def build(x: Value) -> tuple[Value, ...]:
        y = one("shift", x, by=-float(value))
        for i in range(len(amounts) // 2):
            y = one("pad", y, dim=len(x.shape) - 1 - i, before=amounts[2 * i], after=amounts[2 * i + 1])
        return (one("shift", y, by=float(value)),)

    return Use((s.input,), build)


TABLE: Mapping[tuple[str, str], tuple[Callable[[SampleInput], Use | None], int]] = {
    ("nn.functional.conv2d", ""): (conv2d, 12),
    ("nn.functional.max_pool2d", ""): (max_pool2d, 12),
    ("nn.functional.avg_pool2d", ""): (avg_pool2d, 3),
    ("nn.functional.adaptive_avg_pool2d", ""): (adaptive_avg_pool2d, 10),
    ("narrow", ""): (narrow, 3),
    ("constant_pad_nd", ""): (pad, 12),
    ("nn.functional.pad", "constant"): (pad, 12),
}
"""Of each of PyTorch's operators and variants: what its samples are in ours, and how many have to be."""


@pytest.mark.parametrize(("name", "variant"), TABLE, ids=lambda part: part or "-")
def test_equals_pytorch_on_its_own_samples(name: str, variant: str):
    convert, least = TABLE[name, variant]
    info = infos(variant)[name]
    samples: Sequence[SampleInput] = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
    # Of many, some from all over.
    step = max(1, len(samples) // 200)
    converted = 0
    for sample in samples[::step] if len(samples) > 200 else samples:
        converted += check(info, sample, convert)
        if converted == MOST:
            break
    assert converted >= least, f"{converted} of {len(samples)} samples were converted"
