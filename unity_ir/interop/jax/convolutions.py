# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Compute convolutions, and their gradients by the image and the weight, by XLA's one convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import jax.numpy as jnp
from jax import Array, lax

from unity_ir.forms.convolution import Convolution, Sliding
from unity_ir.interop.jax.named import Named


def convolved(of: Convolution, image: Named, other: Named, extents: Mapping[str, int], number: jnp.dtype) -> Named:
    """
    Compute the convolution `of` of an image and its other operand, read with windows kept whole (`named.read`); sums
    are of the element type `number`. The result's dims are its variables; of windows, it is written whole, too.

    The gradient by the image (`data`) slides the weight over the gradient with zeros between; that by the weight slides
    the gradient over the image, channels of the image being the batch.
    """
    by = {"forward": _forward, "data": _data, "weight": _weight}[of.form]
    sizes = {**extents, "": 1}
    groups = prod(extents[n] for n in of.groups)
    array, dims = by(of, image, other, _Sizes(sizes, number), groups)
    return Named(array, dims)


class _Sizes:
    """Sizes of variables, and operands as tensors of four dims or so, one for each group of variables."""

    def __init__(self, sizes: Mapping[str, int], number: jnp.dtype):
        self.sizes = sizes
        self.number = number

    def of(self, name: str) -> int:
        return self.sizes[name]

    def folded(self, value: Named, groups: Sequence[Sequence[str]]) -> Array:
        """Return an array with one dim for each group of its dims' names; a name "" is a dim of size 1."""
        names = [n for group in groups for n in group if n]
        array = jnp.asarray(value.ordered(names))
        sizes = dict(zip(names, array.shape, strict=True))
        return array.reshape([prod(sizes[n] for n in group if n) for group in groups])

    def unfolded(self, array: Array, groups: Sequence[Sequence[str]], last: int) -> tuple[Array, tuple[str, ...]]:
        """Return an array with a dim for each variable of the groups, and their names; the `last` dims stay."""
        names = [n for group in groups for n in group]
        kept = array.shape[array.ndim - last :]
        return array.reshape((*(self.sizes[n] for n in names), *kept)), tuple(names)

    def convolution(
        self,
        image: Array,
        kernel: Array,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        groups: tuple[int, int] = (1, 1),
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
    ) -> Array:
        """Return the convolution of [n, c, ..] and [o, c / groups, ..]; `groups` are of features, and of the batch."""
        return lax.conv_general_dilated(
            image,
            kernel,
            strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            feature_group_count=groups[0],
            batch_group_count=groups[1],
            preferred_element_type=self.number,
        )


def window_name(number: int) -> str:
    """Return the name of the dim that is indexed by the window of this number: no variable has it."""
    return f"<{number}>"


def _start(sliding: Sliding) -> int:
    """Return the first position of a window in a piece of its dim."""
    return sliding.window.offset + sliding.window.low


def _windows(of: Convolution) -> list[tuple[str, ...]]:
    return [(window_name(k),) for k in range(len(of.slidings))]


def _trimmed(array: Array, names: tuple[str, ...], spatial: Sequence[str]) -> tuple[Array, tuple[str, ...]]:
    """Name the last dims of an array by `spatial`; those without a name have size 1, and are dropped."""
    gone = tuple(len(names) + k for k, n in enumerate(spatial) if not n)
    return lax.squeeze(array, gone), (*names, *(n for n in spatial if n))


def _forward(of: Convolution, image: Named, other: Named, sizes: _Sizes, groups: int) -> tuple[Array, tuple[str, ...]]:
    x = sizes.folded(image, [of.batch, (*of.groups, *of.shared), *_windows(of)])
    w = sizes.folded(other, [(*of.groups, *of.own), of.shared, *((s.inner,) for s in of.slidings)])
    pads: list[tuple[int, int]] = []
    for s in of.slidings:
        reach = s.stride * (sizes.of(s.outer) - 1) + s.dilation * (sizes.of(s.inner) - 1)
        pads.append((-_start(s), _start(s) + reach + 1 - s.window.size))
    strides, dilations = [s.stride for s in of.slidings], [s.dilation for s in of.slidings]
    made = sizes.convolution(x, w, strides, pads, (groups, 1), rhs_dilation=dilations)
    array, names = sizes.unfolded(made, [of.batch, of.groups, of.own], len(pads))
    return _trimmed(array, names, [s.outer for s in of.slidings])


def _data(of: Convolution, image: Named, other: Named, sizes: _Sizes, groups: int) -> tuple[Array, tuple[str, ...]]:
    g = sizes.folded(image, [of.batch, (*of.groups, *of.own), *((s.outer,) for s in of.slidings)])
    w = sizes.folded(other, [(*of.groups, *of.shared), of.own, *((s.inner,) for s in of.slidings)])
    w = jnp.flip(w, range(2, w.ndim))
    pads: list[tuple[int, int]] = []
    for s in of.slidings:
        taps, held = s.dilation * (sizes.of(s.inner) - 1), s.stride * (sizes.of(s.outer) - 1) + 1
        low = taps + _start(s)
        pads.append((low, s.window.size + taps - held - low))
    strides, dilations = [s.stride for s in of.slidings], [s.dilation for s in of.slidings]
    ones = [1] * len(pads)
    made = sizes.convolution(g, w, ones, pads, (groups, 1), strides, dilations)
    array, names = sizes.unfolded(made, [of.batch, of.groups, of.shared], len(pads))
    return array, (*names, *(window_name(k) for k in range(len(pads))))


def _weight(of: Convolution, image: Named, other: Named, sizes: _Sizes, groups: int) -> tuple[Array, tuple[str, ...]]:
    x = sizes.folded(image, [(*of.groups, *of.shared), of.batch, *_windows(of)])
    g = sizes.folded(other, [(*of.groups, *of.own), of.batch, *((s.outer,) for s in of.slidings)])
    pads: list[tuple[int, int]] = []
    for s in of.slidings:
        reach = s.stride * (sizes.of(s.outer) - 1) + s.dilation * (sizes.of(s.inner) - 1)
        pads.append((-_start(s), _start(s) + reach + 1 - s.window.size))
    strides, dilations = [s.dilation for s in of.slidings], [s.stride for s in of.slidings]
    made = sizes.convolution(x, g, strides, pads, (1, groups), rhs_dilation=dilations)
    array, names = sizes.unfolded(made, [of.shared, of.groups, of.own], len(pads))
    return _trimmed(array, names, [s.inner for s in of.slidings])
