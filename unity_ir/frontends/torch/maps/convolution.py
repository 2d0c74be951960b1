"""
Map convolutions and pools from ATen operators to the compiler's; those over one dim are computed over two, the first of
size 1. Each mapping gets the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen
arguments, and returns the result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import add, mul
from unity_ir.frontends.torch.site import CallSite, maps
from unity_ir.frontends.torch.values import Operand, Shape, op, reshape
from unity_ir.pcg.graph import Value

Ints = int | Sequence[int]


def pair(x: Ints, last: int = 2) -> tuple[int, ...]:
    """
    Return a size given per dim as a tuple: a number `x`, or a sequence of one, repeated `last` times, once for each of
    the last dims; any other sequence as it is.
    """
    x = [x] if isinstance(x, int) else list(x)
    return tuple(x) * last if len(x) == 1 else tuple(x)


@maps("conv2d", "conv1d")
def conv(
    site: CallSite,
    x: Value,
    weight: Operand,
    bias: Operand | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Value:
    """
    Map PyTorch's convolution over one or two dims of `x` [batch, channels, ..] by `weight` [out, channels / groups,
    ..], in `groups` groups of channels. `stride`, `padding` and `dilation` are per dim, or one number for all;
    `padding` may be "valid" or "same".

    Raises `UnityError` for three dims, for `x` without a batch dim, and for "same" that pads unevenly.
    """
    w = site.value(weight, site.dtype)
    dims = len(w.shape) - 2
    if dims not in (1, 2):
        raise UnityError(f"a convolution of {dims} dims has no operator; of 1 or 2 there is one")
    if len(x.shape) != len(w.shape):
        raise UnityError(f"its operand is {list(x.shape)}, without a batch; add one")
    step, spread = pair(stride, dims), pair(dilation, dims)
    if padding == "valid":
        padding = 0
    elif isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(spread, w.shape[2:], strict=True)]
        if any(r % 2 for r in reach):
            raise UnityError("padding 'same' of an even kernel is not the same on both sides; pad before it")
        padding = [r // 2 for r in reach]
    edge = pair(padding, dims)
    if dims == 1:
        x, w = (reshape(v, (*v.shape[:2], 1, v.shape[2])) for v in (x, w))
        step, edge, spread = (1, *step), (0, *edge), (1, *spread)
    out = op("conv2d", x, w, stride=step, padding=edge, dilation=spread, groups=groups)
    out = reshape(out, site.shape)
    if bias is None:
        return out
    return add(site, out, reshape(site.value(bias, site.dtype), (site.shape[1], *(1,) * dims)))


@maps("convolution", "_convolution")
def convolution(
    site: CallSite,
    x: Value,
    weight: Operand,
    bias: Operand | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    *_: object,
) -> Value:
    """
    Map `aten.convolution`, over one or two dims, as `conv` does. Raises `UnityError` for a transposed one; else
    `output_padding` and the options that follow `groups` have no effect.
    """
    del output_padding
    if transposed:
        raise UnityError("a transposed convolution has no operator")
    return conv(site, x, weight, bias, stride, padding, dilation, groups)


def _check_floor(site: CallSite, sizes: Shape, kernel: Shape, stride: Shape, edge: Shape, spread: Shape) -> None:
    """
    Raise `UnityError` if PyTorch's result at `site` has windows that reach beyond the padded edge, as `ceil_mode` of a
    pooling may add.

    All are per pooled dim: `sizes` of the input, `kernel`, `stride`, `edge` (the padding) and `spread` (the dilation).
    """
    for size, k, s, p, d, out in zip(sizes, kernel, stride, edge, spread, site.shape[-2:], strict=True):
        if (size + 2 * p - d * (k - 1) - 1) // s + 1 != out:
            raise UnityError("ceil_mode makes windows that reach beyond the edge; pad before it")


@maps("max_pool2d")
def max_pool(
    site: CallSite,
    x: Value,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Value:
    """
    Map PyTorch's max pooling over the last two dims of [batch, channels, height, width]; `kernel`, `stride` (by default
    the kernel's), `padding` and `dilation` are a number for both dims, or (height, width). Raises `UnityError` where
    `ceil_mode` has an effect.
    """
    del ceil_mode
    k, p, d = pair(kernel), pair(padding), pair(dilation)
    s = pair(stride) or k
    _check_floor(site, x.shape[-2:], k, s, p, d)
    return op("max_pool2d", x, kernel=k, stride=s, padding=p, dilation=d)


@maps("max_pool2d_with_indices")
def max_pool_with_indices(site: CallSite, x: Value, *rest: Ints) -> tuple[Value | None, ...]:
    """
    Map PyTorch's max pooling as `max_pool` does, with the arguments `rest` (kernel, stride, ..); return (result, None):
    the indices, PyTorch's second result, have no mapping.
    """
    return max_pool(site, x, *rest), None


@maps("avg_pool2d")
def avg_pool(
    site: CallSite,
    x: Value,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """
    Map PyTorch's mean pooling over the last two dims of [batch, channels, height, width]; `kernel`, `stride` (by
    default the kernel's) and `padding` are a number for both dims, or (height, width). Raises `UnityError` where
    `ceil_mode` has an effect.

    `count_include_pad` counts padding as zeros; `divisor_override` divides windows' sums by that number instead of by
    their elements.
    """
    del ceil_mode
    k, p = pair(kernel), pair(padding)
    s = pair(stride) or k
    _check_floor(site, x.shape[-2:], k, s, p, (1, 1))
    out = op("avg_pool2d", x, kernel=k, stride=s, padding=p)
    if divisor_override:
        return mul(site, out, prod(k) / divisor_override)
    if not count_include_pad and any(p):
        ones = torch.ones(1, *x.shape[-2:], dtype=torch.float64)
        return mul(site, out, 1 / torch.nn.functional.avg_pool2d(ones, k, s, p)[0])
    return out


@maps("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def adaptive_avg_pool(site: CallSite, x: Value, sizes: Ints) -> Value:
    """
    Map PyTorch's adaptive mean pooling of [batch, channels, height, width] to images of the size (height, width) of
    PyTorch's result, which `sizes` gave.
    """
    del sizes
    return op("adaptive_avg_pool2d", x, sizes=site.shape[-2:])


@maps("adaptive_avg_pool1d")
def adaptive_avg_pool1d(site: CallSite, x: Value, sizes: Ints) -> Value:
    """
    Map PyTorch's adaptive mean pooling of [batch, channels, length] to the length of PyTorch's result, which `sizes`
    gave.
    """
    del sizes
    x = reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    return reshape(op("adaptive_avg_pool2d", x, sizes=(1, site.shape[-1])), site.shape)


@maps("avg_pool1d")
def avg_pool1d(
    site: CallSite,
    x: Value,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Value:
    """
    Map PyTorch's mean pooling over the last dim of [batch, channels, length], with `kernel`, `stride` (by default the
    kernel's) and `padding` along it. Raises `UnityError` for `ceil_mode`, and for padding that the mean does not count
    (`count_include_pad` False).
    """
    if ceil_mode or (not count_include_pad and any(pair(padding, 1))):
        raise UnityError("ceil_mode and count_include_pad=False have no operator in one dim; use avg_pool2d")
    k, p = pair(kernel, 1), pair(padding, 1)
    x = reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    out = op("avg_pool2d", x, kernel=(1, *k), stride=(1, *(pair(stride, 1) or k)), padding=(0, *p))
    return reshape(out, site.shape)
