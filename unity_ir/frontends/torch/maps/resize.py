"""
Map resizing of images from ATen operators to the compiler's. Each mapping gets the call's `site` (what PyTorch recorded
of its result: shape, element type) and the ATen arguments, and returns the result as a value of the compiler's graph.
"""

from __future__ import annotations

import torch

from unity_ir.frontends.torch.site import CallSite, maps
from unity_ir.frontends.torch.values import expand, op, reshape, swap
from unity_ir.pcg.node import Value


@maps("upsample_nearest2d", "upsample_nearest1d", "upsample_nearest3d")
def upsample_nearest(site: CallSite, x: Value, *arguments: object) -> Value:
    """
    Map PyTorch's nearest-neighbour upsampling of `x` [batch, channels, ..] over all dims after the second, to the shape
    of the result that PyTorch recorded at `site`. Where all sizes grow by whole factors, elements are repeated; else
    each dim is resized by a matrix product, for which `arguments` (ATen's sizes and scale factors) are read.
    """
    old, new = x.shape[2:], site.shape[2:]
    if any(b % a for a, b in zip(old, new, strict=True)):
        return _by_tables(site, x, "nearest", arguments)
    x = reshape(x, [*x.shape[:2], *(n for a in old for n in (a, 1))])
    wide = [n for a, b in zip(old, new, strict=True) for n in (a, b // a)]
    return reshape(expand(x, [*x.shape[:2], *wide]), site.shape)


def _linear(mode: str, *names: str) -> None:
    """Register the mapping of the ATen operators `names` that resize in a mode of `torch.nn.functional.interpolate`."""

    @maps(*names)
    def resized(site: CallSite, x: Value, *arguments: object) -> Value:
        return _by_tables(site, x, mode, arguments)

    del resized


_linear("linear", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
_linear("cubic", "upsample_bicubic2d")
_linear("nearest-exact", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
_linear("linear antialias", "_upsample_bilinear2d_aa")
_linear("cubic antialias", "_upsample_bicubic2d_aa")

OPERATORS = {
    "linear": torch.ops.aten.upsample_bilinear2d,
    "cubic": torch.ops.aten.upsample_bicubic2d,
    "nearest": torch.ops.aten.upsample_nearest2d,
    "nearest-exact": torch.ops.aten._upsample_nearest_exact2d,
    "linear antialias": torch.ops.aten._upsample_bilinear2d_aa,
    "cubic antialias": torch.ops.aten._upsample_bicubic2d_aa,
}
"""PyTorch's operator for each mode over two dims, from which the weights of one dim are taken."""


def _by_tables(site: CallSite, x: Value, mode: str, arguments: tuple[object, ...]) -> Value:
    """
    Return `x` [batch, channels, ..] resized, as a product with a table [new size, old size] for each dim that changes:
    resizing is linear and separable, and the table is what PyTorch makes of the identity.

    `arguments` are those after `x`: sizes (or None), `align_corners` where the mode has it, scale factors.
    """
    aligns = [a for a in arguments if isinstance(a, bool)]
    dims = len(x.shape) - 2
    for dim in range(2, len(x.shape)):
        old, new = x.shape[dim], site.shape[dim]
        factor = _factor(arguments, dim - 2, dims)
        if old == new and factor in (None, 1.0):
            continue
        identity = torch.eye(old, dtype=torch.float64)[None, None]
        table = OPERATORS[mode](identity, [new, old], *aligns, factor, 1.0)[0, 0]
        x = swap(op("matmul_nt", swap(x, dim, -1), site.value(table, x.type.dtype)), dim, -1)
    return x


def _factor(arguments: tuple[object, ...], dim: int, dims: int) -> float | None:
    """Return the scale factor of a dim: from a list of floats, or from a float or None for each dim at the end."""
    for argument in arguments:
        if isinstance(argument, list | tuple) and argument and isinstance(argument[0], float):
            return float(argument[dim])  # pyright: ignore[reportUnknownArgumentType]
    last = arguments[-dims:]
    if len(arguments) > dims and isinstance(last[dim], float):
        return float(last[dim])  # pyright: ignore[reportArgumentType]
    return None
