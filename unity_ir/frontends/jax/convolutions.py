# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""JAX's convolutions and windows, whose dims are in any order, as PyTorch's, which have samples and channels first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional as nn

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.values import Operand, to_torch, torch_type

Tensor: TypeAlias = torch.Tensor

CONVOLUTIONS = {1: nn.conv1d, 2: nn.conv2d, 3: nn.conv3d}
TRANSPOSED = {1: nn.conv_transpose1d, 2: nn.conv_transpose2d, 3: nn.conv_transpose3d}
POOLS = {1: nn.max_pool1d, 2: nn.max_pool2d, 3: nn.max_pool3d}


def convolution(eqn: Any, x: Operand, kernel: Operand) -> Tensor:
    """
    `lax.conv_general_dilated`. With `lhs_dilation` it is a transposed convolution. Raises `UnityError` for groups of
    samples, more than three dims of space, and transposed convolutions with dilated kernels or groups.
    """
    params, count = eqn.params, len(eqn.params["window_strides"])
    if params["batch_group_count"] != 1 or count not in CONVOLUTIONS:
        raise UnityError("only convolutions over one to three dims, without groups of samples, have an operator")
    dims = params["dimension_numbers"]
    dtype = torch_type(eqn.outvars[0].aval.dtype)
    a = to_torch(x).to(dtype).permute(tuple(dims.lhs_spec))
    w = to_torch(kernel).to(dtype).permute(tuple(dims.rhs_spec))
    pads = [(int(low), int(high)) for low, high in params["padding"]]
    if any(d != 1 for d in params["lhs_dilation"]):
        out = _transposed(a, w, params, pads)
    else:
        a, even = _padded(a, pads, 0.0)
        out = CONVOLUTIONS[count](
            a,
            w,
            stride=tuple(params["window_strides"]),
            padding=tuple(even),
            dilation=tuple(params["rhs_dilation"]),
            groups=params["feature_group_count"],
        )
    back = [0] * out.dim()
    for at, dim in enumerate(dims.out_spec):
        back[dim] = at
    return out.permute(back)


def _transposed(a: Tensor, w: Tensor, params: Any, pads: Sequence[tuple[int, int]]) -> Tensor:
    plain = (*params["window_strides"], *params["rhs_dilation"], params["feature_group_count"])
    if any(d != 1 for d in plain):
        raise UnityError("a transposed convolution with strides, a dilated kernel or groups has no operator")
    space = tuple(range(2, w.dim()))
    steps = tuple(map(int, params["lhs_dilation"]))
    # Samples set apart, padded by the kernel's size less one, convolved with the kernel: PyTorch's with a flipped one.
    out = TRANSPOSED[len(space)](a, w.flip(space).transpose(0, 1), stride=steps)
    for dim, (low, high) in zip(space, pads, strict=True):
        out = _resized(out, dim, low - (w.shape[dim] - 1), high - (w.shape[dim] - 1))
    return out


def _resized(x: Tensor, dim: int, low: int, high: int) -> Tensor:
    """Return a tensor with zeros added at both ends of a dim; negative numbers cut."""
    x = x.narrow(dim, max(-low, 0), x.shape[dim] - max(-low, 0) - max(-high, 0))
    return nn.pad(x, [0, 0] * (x.dim() - 1 - dim) + [max(low, 0), max(high, 0)]) if max(low, high) > 0 else x


def _padded(
    x: Tensor, pads: Sequence[tuple[int, int]], value: float, windows: Sequence[int] = ()
) -> tuple[Tensor, list[int]]:
    """
    Return (a tensor [n, c, ..] padded as far as what follows cannot, what is left for that to pad at both ends of each
    dim of space). It pads both ends alike, and windows by no more than half of their sizes.
    """
    is_even = all(low == high >= 0 for low, high in pads)
    if is_even and all(2 * low <= size for (low, _), size in zip(pads, windows, strict=False)):
        return x, [low for low, _ in pads]
    around = [n for low, high in reversed(pads) for n in (low, high)]
    return nn.pad(x, around, value=value), [0] * len(pads)


def window_max(eqn: Any, x: Operand) -> Tensor:
    """The maximum of each window; raises `UnityError` for windows that PyTorch has not."""
    a, back, sizes, steps, pads, spread = _windows(eqn, to_torch(x))
    lowest = -math.inf if a.is_floating_point() else torch.iinfo(a.dtype).min
    a, even = _padded(a, pads, lowest, sizes)
    return _restored(POOLS[len(sizes)](a, sizes, steps, even, spread), back)


def window_min(eqn: Any, x: Operand) -> Tensor:
    """The minimum of each window; raises `UnityError` for windows that PyTorch has not."""
    return -window_max(eqn, -to_torch(x))


def window_sum(eqn: Any, x: Operand) -> Tensor:
    """The sum of each window; raises `UnityError` for windows that PyTorch has not."""
    a, back, sizes, steps, pads, spread = _windows(eqn, to_torch(x))
    a, even = _padded(a, pads, 0.0, sizes)
    if any(s != 1 for s in spread) or len(sizes) > 2:
        # Averages are of one or two dims, and not dilated: a convolution with ones.
        ones, lead = torch.ones(1, 1, *sizes, dtype=a.dtype), a.shape[:2]
        a = a.reshape(-1, 1, *a.shape[2:])
        summed = CONVOLUTIONS[len(sizes)](a, ones, stride=tuple(steps), padding=tuple(even), dilation=tuple(spread))
        return _restored(summed.reshape(*lead, *summed.shape[2:]), back)
    pool: Any = nn.avg_pool1d if len(sizes) == 1 else nn.avg_pool2d
    return _restored(pool(a, sizes, steps, even) * math.prod(sizes), back)


def _restored(x: Tensor, back: tuple[Sequence[int], Sequence[int]]) -> Tensor:
    """Return a result with its first dims as they were in the operand, and all in the order there (`_windows`)."""
    lead, order = back
    return x.reshape(*lead, *x.shape[2:]).permute(*order)


def _windows(
    eqn: Any, x: Tensor
) -> tuple[Tensor, tuple[list[int], list[int]], list[int], list[int], list[tuple[int, int]], list[int]]:
    """
    Return (the operand as [samples, channels, dims of space..], how the way back is: the sizes of the dims that the
    first two were, and the permutation; and for each dim of space: the window's size, stride, padding at both ends, and
    dilation).
    """
    params = eqn.params
    sizes, strides = params["window_dimensions"], params["window_strides"]
    pads, spread = params["padding"], params["window_dilation"]
    if any(d != 1 for d in params["base_dilation"]):
        raise UnityError("windows over elements that are set apart have no operator")
    space = [d for d in range(x.dim()) if (sizes[d], strides[d], tuple(pads[d])) != (1, 1, (0, 0))]
    others = [d for d in range(x.dim()) if d not in space]
    if not space:
        space, others = [x.dim() - 1], others[:-1]
    if len(space) > 3:
        raise UnityError("windows over more than three dims have no operator")
    lead = [x.shape[d] for d in others]
    order = [*others, *space]
    out = x.permute(order)
    out = out.reshape(math.prod(lead[:-1]), *(lead[-1:] or [1]), *out.shape[len(others) :])
    back = [order.index(d) for d in range(x.dim())]
    return (
        out,
        (lead, back),
        [int(sizes[d]) for d in space],
        [int(strides[d]) for d in space],
        [(int(pads[d][0]), int(pads[d][1])) for d in space],
        [int(spread[d]) for d in space],
    )
