"""Random uses of the operators whose lines have windows, and the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from case import Case, Shape
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn import grad as of

SMALL = st.integers(1, 3)
Pair = tuple[int, int]


@st.composite
def window(draw: st.DrawFn, dilated: bool, filled: bool = False) -> tuple[int, int, int, int, int, int]:
    """Size of a dim, kernel, stride, padding, dilation, number of windows; often all steps of the dim are taken."""
    kernel, stride, dilation = draw(SMALL), draw(st.integers(1, 2)), draw(st.integers(1, 2)) if dilated else 1
    reach = dilation * (kernel - 1) + 1
    padding = draw(st.integers(0, kernel // 2))
    if draw(st.booleans()):
        size = stride * draw(st.sampled_from([2, 4, 6]))
    else:
        size = draw(st.integers(1, 9))
    room = size + 2 * padding - reach
    assume(room >= 0)
    count = room // stride + 1
    # A window of padding only has no maximum.
    starts = (stride * y - padding for y in range(count))
    assume(not filled or all(any(0 <= s + dilation * i < size for i in range(kernel)) for s in starts))
    return size, kernel, stride, padding, dilation, count


@st.composite
def conv2d(draw: st.DrawFn, kind: str) -> Case:
    rows, columns = draw(window(True)), draw(window(True))
    groups = draw(st.sampled_from([1, 1, 2]))
    n, c, o = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    x: Shape = (n, groups * c, rows[0], columns[0])
    w: Shape = (groups * o, c, rows[1], columns[1])
    g: Shape = (n, groups * o, rows[5], columns[5])
    attributes = {name: (rows[i], columns[i]) for i, name in ((2, "stride"), (3, "padding"), (4, "dilation"))}
    match kind:
        case "data":
            return Case((g, w), {**attributes, "groups": groups, "sizes": x[2:]})
        case "weight":
            return Case((g, x), {**attributes, "groups": groups, "sizes": w[2:]})
        case _:
            return Case((x, w), {**attributes, "groups": groups})


@st.composite
def pool(draw: st.DrawFn, operands: str, dilated: bool) -> Case:
    # Only maxima are dilated.
    rows, columns = draw(window(dilated, filled=dilated)), draw(window(dilated, filled=dilated))
    lead = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
    x, g = (*lead, rows[0], columns[0]), (*lead, rows[5], columns[5])
    names = ((1, "kernel"), (2, "stride"), (3, "padding"), *([(4, "dilation")] if dilated else []))
    attributes = {name: (rows[i], columns[i]) for i, name in names}
    sizes: dict[str, Any] = {"sizes": x[-2:]} if "g" in operands else {}
    if operands == "g":
        sizes["degrees"] = (1, 1)
    return Case(tuple({"x": x, "g": g}[operand] for operand in operands), {**attributes, **sizes})


@st.composite
def adaptive(draw: st.DrawFn, gradient: bool) -> Case:
    lead = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
    x, out = ((draw(st.integers(1, 6)), draw(st.integers(1, 6))) for _ in range(2))
    return Case(((*lead, *(out if gradient else x)),), {"sizes": x if gradient else out})


@st.composite
def slices(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3)))
    dim, step = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 2))
    start = draw(st.integers(0, shape[dim] - 1))
    size = draw(st.integers(1, (shape[dim] - 1 - start) // step + 1))
    return Case((shape,), {"dim": dim, "start": start, "size": size, "step": step})


@st.composite
def pads(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    amount = {name: draw(st.integers(0, 3)) for name in ("before", "after", "interior")}
    return Case((shape,), {"dim": draw(st.integers(0, len(shape) - 1)), **amount})


def torch_pad(x: Tensor, dim: int, before: int, after: int, interior: int) -> Tensor:
    size = before + (x.shape[dim] - 1) * (interior + 1) + 1 + after
    at = before + (interior + 1) * torch.arange(x.shape[dim])
    return torch.zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]), dtype=x.dtype).index_add(dim, at, x)


def pooled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A pooling of PyTorch on any number of leading dims."""

    def call(x: Tensor, **attributes: Any) -> Tensor:
        attributes["kernel_size"] = attributes.pop("kernel")
        flat = function(x.reshape(1, -1, *x.shape[-2:]), **attributes)
        return flat.reshape(*x.shape[:-2], *flat.shape[-2:])

    return call


def gradient(function: Callable[..., Tensor], of_x: bool) -> Callable[..., Tensor]:
    """The gradient of a pooling, given its argument, or only its sizes where it is linear."""

    def call(g: Tensor, *x: Tensor, sizes: Sequence[int], degrees: Pair = (1, 1), **attributes: Any) -> Tensor:
        del degrees
        value = x[0] if of_x else torch.zeros((*g.shape[:-2], *sizes), dtype=g.dtype)
        at = value.detach().clone().requires_grad_()
        return torch.autograd.grad(function(at, **attributes), at, g.detach())[0]

    return call


def torch_adaptive(x: Tensor, sizes: Pair) -> Tensor:
    flat = F.adaptive_avg_pool2d(x.reshape(1, -1, *x.shape[-2:]), sizes)
    return flat.reshape(*x.shape[:-2], *sizes)


def adaptive_gradient(g: Tensor, sizes: Pair) -> Tensor:
    at = torch.zeros((*g.shape[:-2], *sizes), dtype=g.dtype, requires_grad=True)
    return torch.autograd.grad(torch_adaptive(at, (g.shape[-2], g.shape[-1])), at, g.detach())[0]


def data_gradient(g: Tensor, w: Tensor, sizes: Pair, groups: int, **attributes: Any) -> Tensor:
    return of.conv2d_input((g.shape[0], groups * w.shape[1], *sizes), w, g, groups=groups, **attributes)


def weight_gradient(g: Tensor, x: Tensor, sizes: Pair, groups: int, **attributes: Any) -> Tensor:
    return of.conv2d_weight(x, (g.shape[1], x.shape[1] // groups, *sizes), g, groups=groups, **attributes)


CASES: Mapping[str, st.SearchStrategy[Case]] = {
    "adaptive_avg_pool2d": adaptive(False),
    "adaptive_avg_pool2d_grad": adaptive(True),
    "avg_pool2d": pool("x", False),
    "avg_pool2d_grad": pool("g", False),
    "conv2d": conv2d(""),
    "conv2d_data_grad": conv2d("data"),
    "conv2d_weight_grad": conv2d("weight"),
    "max_pool2d": pool("x", True),
    "max_pool2d_grad": pool("gx", True),
    "pad": pads(),
    "slice": slices(),
}

TORCH: Mapping[str, Callable[..., Any]] = {
    "adaptive_avg_pool2d": torch_adaptive,
    "adaptive_avg_pool2d_grad": adaptive_gradient,
    "avg_pool2d": pooled(F.avg_pool2d),
    "avg_pool2d_grad": gradient(pooled(F.avg_pool2d), False),
    "conv2d": F.conv2d,
    "conv2d_data_grad": data_gradient,
    "conv2d_weight_grad": weight_gradient,
    "max_pool2d": pooled(F.max_pool2d),
    "max_pool2d_grad": gradient(pooled(F.max_pool2d), True),
    "pad": torch_pad,
    "slice": lambda x, dim, start, size, step: x.narrow(dim, start, step * (size - 1) + 1)[
        (slice(None),) * dim + (slice(None, None, step),)
    ],
}
