"""
Map convolutions and pools from ATen operators to the compiler's; those over one dim are computed over two, the first of
size 1. Each mapping gets the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen
arguments, and returns the result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import add, mul
from unity_ir.frontends.torch.site import CallSite, finite, maps
from unity_ir.frontends.torch.values import Operand, Shape, constant, cut, op, permute, reshape
from unity_ir.pcg.node import Value

Ints = int | Sequence[int]


def pair(x: Ints, last: int = 2) -> tuple[int, ...]:
    """
    Return a size, stride or the like as a tuple with one number for each of `last` dims (a convolution's or pool's dims
    after batch and channels). A number, or a sequence of one number, is repeated; any other sequence is returned as it
    is.
    """
    x = [x] if isinstance(x, int) else list(x)
    return tuple(x) * last if len(x) == 1 else tuple(x)


@maps("conv2d", "conv1d", "conv3d")
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
    Map PyTorch's convolution over one to three dims of `x` [batch, channels, ..] by `weight` [out, channels / groups,
    ..], in `groups` groups of channels. `stride`, `padding` and `dilation` are per dim, or one number for all;
    `padding` may be "valid" or "same".

    Raises `UnityError` for `x` without a batch dim, and for "same" that pads unevenly.
    """
    w = site.value(weight, site.dtype)
    dims = len(w.shape) - 2
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
    if dims == 3:
        out = _by_slices(x, w, site.shape[2], step, edge, spread, groups)
    else:
        out = op("conv2d", x, w, stride=step, padding=edge, dilation=spread, groups=groups)
    out = reshape(out, site.shape)
    if bias is None:
        return out
    return add(site, out, reshape(site.value(bias, site.dtype), (site.shape[1], *(1,) * dims)))


def _by_slices(x: Value, w: Value, depth: int, stride: Shape, edge: Shape, spread: Shape, groups: int) -> Value:
    """
    Return the convolution of `x` [batch, channels, depth, height, width] by `w` [out, channels / groups, k, ..] over
    three dims: for each of the k slices of the kernel a convolution of two, whose samples are the slices of `x` that it
    meets, all added up.
    """
    if edge[0]:
        x = op("pad", x, dim=2, before=edge[0], after=edge[0])
    more = {"stride": stride[1:], "padding": edge[1:], "dilation": spread[1:], "groups": groups}
    total: Value | None = None
    for at in range(w.shape[2]):
        met = permute(cut(x, 2, at * spread[0], depth, stride[0]), (0, 2, 1, 3, 4))
        kernel = reshape(cut(w, 2, at, 1), (*w.shape[:2], *w.shape[3:]))
        part = op("conv2d", reshape(met, (prod(met.shape[:2]), *met.shape[2:])), kernel, **more)
        total = part if total is None else op("add", total, part)
    assert total is not None
    return permute(reshape(total, (x.shape[0], depth, *total.shape[1:])), (0, 2, 1, 3, 4))


@maps("conv_transpose2d", "conv_transpose1d")
def transposed_conv(
    site: CallSite,
    x: Value,
    weight: Operand,
    bias: Operand | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Value:
    """
    Map PyTorch's transposed convolution over one or two dims of `x` [batch, channels, ..] by `weight` [channels, out /
    groups, ..], computed as the gradient of a convolution with respect to its input. The result has the shape that
    PyTorch recorded at `site`, so `output_padding`, which only determines that shape, is not read.

    Raises `UnityError` for three dims.
    """
    del output_padding
    w = site.value(weight, site.dtype)
    dims = len(w.shape) - 2
    if dims not in (1, 2):
        raise UnityError(f"a transposed convolution of {dims} dims has no operator; of 1 or 2 there is one")
    step, edge, spread = pair(stride, dims), pair(padding, dims), pair(dilation, dims)
    sizes = site.shape[-dims:]
    x = reshape(x, (*site.shape[:-dims][:-1], x.shape[-dims - 1], *x.shape[-dims:]))
    if dims == 1:
        x, w = (reshape(v, (*v.shape[:-1], 1, v.shape[-1])) for v in (x, w))
        step, edge, spread, sizes = (1, *step), (0, *edge), (1, *spread), (1, *sizes)
    x = reshape(x, (prod(x.shape[:-3]), *x.shape[-3:]))
    more = {"stride": step, "padding": edge, "dilation": spread, "groups": groups, "sizes": sizes}
    out = reshape(op("conv2d_data_grad", x, w, **more), site.shape)
    if bias is None:
        return out
    return add(site, out, reshape(site.value(bias, site.dtype), (site.shape[-dims - 1], *(1,) * dims)))


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
    Map `aten.convolution`, as `transposed_conv` does if `transposed`, else as `conv` does. The options after `groups`
    (ATen's about cuDNN) have no effect.
    """
    if transposed:
        return transposed_conv(site, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(site, x, weight, bias, stride, padding, dilation, groups)


def _overhang(site: CallSite, sizes: Shape, kernel: Shape, stride: Shape, edge: Shape, spread: Shape) -> Shape:
    """
    Return by how much the windows of PyTorch's result at `site` reach beyond the padded end of each pooled dim, as
    those that `ceil_mode` adds do.

    All are per pooled dim: `sizes` of the input, `kernel`, `stride`, `edge` (the padding) and `spread` (the dilation).
    """
    dims = zip(sizes, kernel, stride, edge, spread, site.shape[-len(sizes) :], strict=True)
    return tuple(max((out - 1) * s + d * (k - 1) + 1 - (n + 2 * p), 0) for n, k, s, p, d, out in dims)


def _lengthened(x: Value, over: Shape, value: float) -> Value:
    """Return `x` with as many elements `value` after its last dims as `over` says."""
    for dim, count in enumerate(over, len(x.shape) - len(over)):
        if count:
            shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
            x = op("concat", x, constant(value, shape, x.type.dtype), dim=dim)
    return x


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
    the kernel's), `padding` and `dilation` are a number for both dims, or (height, width). `ceil_mode` adds windows
    that reach beyond the padded input; they take the maximum of the elements that they do cover.
    """
    del ceil_mode
    k, p, d = pair(kernel), pair(padding), pair(dilation)
    s = pair(stride) or k
    over = _overhang(site, x.shape[-2:], k, s, p, d)
    x = _lengthened(x, over, finite(-math.inf, site.result.dtype))
    return _first(op("max_pool2d", x, kernel=k, stride=s, padding=p, dilation=d), site.shape)


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
    default the kernel's) and `padding` are a number for both dims, or (height, width).

    With `count_include_pad`, means count the padding as zeros. `ceil_mode` adds windows that reach beyond the padded
    input; what lies beyond it does not count. `divisor_override` divides each window's sum by that number instead of by
    its count of elements.
    """
    k, p = pair(kernel), pair(padding)
    s = pair(stride) or k
    over = _overhang(site, x.shape[-2:], k, s, p, (1, 1))
    out = _first(op("avg_pool2d", _lengthened(x, over, 0.0), kernel=k, stride=s, padding=p), site.shape)
    if not any(over) and not divisor_override and (count_include_pad or not any(p)):
        return out
    # Each window's mean of ones, as PyTorch counts, in units of it as the operator does.
    ones = torch.ones(1, 1, *x.shape[-2:], dtype=torch.float64)
    pool = torch.nn.functional.avg_pool2d
    wanted = pool(ones, k, s, p, ceil_mode, count_include_pad, divisor_override)
    height, width = wanted.shape[-2:]
    longer = torch.nn.functional.pad(ones, (0, over[1], 0, over[0]))
    return mul(site, out, (wanted / pool(longer, k, s, p)[..., :height, :width])[0, 0])


def _first(x: Value, shape: Shape) -> Value:
    """Return the first elements of `x` along each dim, of the shape `shape`."""
    for dim, size in enumerate(shape):
        x = cut(x, dim, 0, size)
    return x


@maps("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def adaptive_avg_pool(site: CallSite, x: Value, sizes: Ints) -> Value:
    """
    Map PyTorch's adaptive mean pooling of [batch, channels, height, width] to the height and width of the result that
    PyTorch recorded at `site`; `sizes`, from which PyTorch computed these, is not read.
    """
    del sizes
    return op("adaptive_avg_pool2d", x, sizes=site.shape[-2:])


@maps("adaptive_avg_pool1d")
def adaptive_avg_pool1d(site: CallSite, x: Value, sizes: Ints) -> Value:
    """
    Map PyTorch's adaptive mean pooling of [batch, channels, length] to the length of the result that PyTorch recorded
    at `site`; `sizes`, from which PyTorch computed it, is not read.
    """
    del sizes
    x = reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    return reshape(op("adaptive_avg_pool2d", x, sizes=(1, site.shape[-1])), site.shape)


@maps("_adaptive_avg_pool3d")
def adaptive_avg_pool3d(site: CallSite, x: Value, sizes: Ints) -> Value:
    """
    Map PyTorch's adaptive mean pooling over the last three dims to the sizes of the result that PyTorch recorded at
    `site`; `sizes` is not read. The last two dims are pooled first, then the one before them.
    """
    del sizes
    *lead, depth, height, width = x.shape
    out = site.shape[-2:]
    x = op("adaptive_avg_pool2d", reshape(x, (prod(lead) * depth, 1, height, width)), sizes=out)
    x = reshape(x, (prod(lead), 1, depth, prod(out)))
    return reshape(op("adaptive_avg_pool2d", x, sizes=(site.shape[-3], prod(out))), site.shape)


@maps("adaptive_max_pool2d")
def adaptive_max_pool(site: CallSite, x: Value, sizes: Ints) -> tuple[Value | None, ...]:
    """
    Map PyTorch's adaptive maximum pooling over the last two dims, to the sizes of the result that PyTorch recorded at
    `site` (`sizes` is not read); return (result, None): the indices, PyTorch's second result, have no mapping.

    Raises `UnityError` where an old size is not a multiple of the new one, so that windows differ in size.
    """
    del sizes
    old, new = x.shape[-2:], site.shape[-2:]
    if any(a % b for a, b in zip(old, new, strict=True)):
        raise UnityError(f"{list(old)} to {list(new)} makes windows that differ; pad to a multiple before")
    k = tuple(a // b for a, b in zip(old, new, strict=True))
    flat = reshape(x, (prod(x.shape[:-3]), *x.shape[-3:]))
    return reshape(op("max_pool2d", flat, kernel=k, stride=k, padding=(0, 0), dilation=(1, 1)), site.shape), None


@maps("adaptive_max_pool1d")
def adaptive_max_pool1d(site: CallSite, x: Value, sizes: Ints) -> tuple[Value | None, ...]:
    """
    Map PyTorch's adaptive maximum pooling over the last dim, as `adaptive_max_pool` does over two; return (result,
    None): the indices, PyTorch's second result, have no mapping.
    """
    flat = (*site.shape[:-1], 1, site.shape[-1])
    x = reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    out, _ = adaptive_max_pool(site.like(flat, site.result.dtype), x, sizes)
    return None if out is None else reshape(out, site.shape), None


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


def _pool3d(name: str, pool: Callable[..., Value]) -> None:
    """
    Register the mapping of a pooling over three dims, `name`, by that over two, `pool`: first over the last two, then
    over the first alone. Raises `UnityError` for options other than kernel, stride and padding.
    """

    @maps(name)
    def pool3d(site: CallSite, x: Value, kernel: Ints, stride: Ints = (), padding: Ints = 0, *more: object) -> Value:
        if any(v not in (1, False, True, None, [1, 1, 1]) for v in more):
            raise UnityError("of three dims only kernel, stride and padding have a mapping")
        k, p = pair(kernel, 3), pair(padding, 3)
        s = pair(stride, 3) or k
        *lead, depth, height, width = x.shape
        out = site.shape[-2:]
        inner = site.like((prod(lead) * depth, 1, *out), site.result.dtype)
        x = pool(inner, reshape(x, (prod(lead) * depth, 1, height, width)), k[1:], s[1:], p[1:])
        flat = (prod(lead), 1, site.shape[-3], prod(out))
        outer = site.like(flat, site.result.dtype)
        x = pool(outer, reshape(x, (prod(lead), 1, depth, prod(out))), (k[0], 1), (s[0], 1), (p[0], 0))
        return reshape(x, site.shape)

    del pool3d


_pool3d("max_pool3d", max_pool)
_pool3d("avg_pool3d", avg_pool)
