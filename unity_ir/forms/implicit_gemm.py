"""Describe a convolution as one matrix product whose operands are gathered (implicit GEMM): sizes, strides, windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unity_ir.forms.addresses import address
from unity_ir.forms.contraction import one_stride
from unity_ir.forms.convolution import Convolution
from unity_ir.forms.windows import local_range
from unity_ir.tdl.syntax import Access, Window, index_extent

_DIMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("batch", "group", "shared"), ("own", "group", "shared"), ("batch", "group", "own")),
    "data": (("batch", "group", "own"), ("own", "group", "shared"), ("batch", "group", "shared")),
    "weight": (("batch", "group", "own"), ("batch", "group", "shared"), ("own", "group", "shared")),
}
"""The groups of variables, apart from the windows', that index the operands a and b and the result of each form."""
_SIDES: Mapping[str, tuple[str, str, str]] = {
    "forward": ("window", "inner", "outer"),
    "data": ("outer", "inner", "window"),
    "weight": ("outer", "window", "inner"),
}
"""The dim that a, b and the result have for a window: the window itself, or its inner or outer variable."""


@dataclass(frozen=True, slots=True)
class ImplicitGemm:
    """
    A convolution as one matrix product with gathered operands: the arguments of `kernels.triton.convolution`'s kernel.
    """

    of: Convolution
    sizes: tuple[int, int, int]
    """M, N and K of the matrix product."""
    strides: Mapping[str, int]
    """Strides by parameter, such as `a_batch`, `b_own`, `out_0`."""
    geometry: Mapping[str, int]
    """Sizes, stride, dilation and first position of both windows by parameter, such as `STRIDE_0`."""
    groups: int
    """Number of groups, each of which is one matrix product."""
    channels: int
    """Number of channels among the summed elements or, for a weight's gradient, among the columns."""


def implicit_gemm(of: Convolution, result: Sequence[object], extents: Mapping[str, int]) -> ImplicitGemm | None:
    """
    Describe the convolution `of` as one matrix product per group with gathered operands (implicit GEMM): return its
    sizes, strides (in elements) and window geometry, as the Triton kernel takes them. `result` has the indices of the
    dims of the convolution's result.

    `extents` maps each index variable to its number of positions. None for a convolution over three dims, or if some
    tensor needs several strides for one of the product's dims.
    """
    if len(of.slidings) > 2:
        return None
    image, other = Access(of.image.tensor, of.image.indices), Access(of.other.tensor, of.other.indices)
    a, b = (other, image) if of.form == "weight" else (image, other)
    names = {"batch": of.batch, "group": of.groups, "shared": of.shared, "own": of.own}
    strides: dict[str, int] = {}
    for prefix, indices, dims, side in zip(
        ("a", "b", "out"), (a.indices, b.indices, tuple(result)), _DIMS[of.form], _SIDES[of.form], strict=True
    ):
        where = address(indices, extents)  # pyright: ignore[reportArgumentType]
        for dim in dims:
            stride = one_stride([n for n in names[dim] if extents[n] > 1], extents, where)
            if stride is None:
                return None
            strides[f"{prefix}_{dim}"] = stride
        raw = _dim_strides(indices, extents)
        for k, s in enumerate(of.slidings):
            name = {"inner": s.inner, "outer": s.outer}.get(side)
            strides[f"{prefix}_{k}"] = raw[k] if name is None else where.strides.get(name, 0)
        for k in range(len(of.slidings), 2):
            strides[f"{prefix}_{k}"] = 0
    geometry: dict[str, int] = {}
    for k in range(2):
        s = of.slidings[k] if k < len(of.slidings) else None
        values = {"OUTER": 1, "INNER": 1, "SIZE": 1, "STRIDE": 1, "DILATION": 1, "FIRST": 0}
        if s is not None:
            values = {
                "OUTER": extents[s.outer] if s.outer else 1,
                "INNER": extents[s.inner] if s.inner else 1,
                "SIZE": s.window.size,
                "STRIDE": s.stride,
                "DILATION": s.dilation,
                "FIRST": local_range(s.window, extents)[0],
            }
        geometry |= {f"{name}_{k}": value for name, value in values.items()}
    batch, groups, shared, own = (prod(extents[n] for n in some) for some in names.values())
    outer, inner, size = (prod(geometry[f"{what}_{k}"] for k in range(2)) for what in ("OUTER", "INNER", "SIZE"))
    sizes = {
        "forward": (batch * outer, own, shared * inner),
        "data": (batch * size, shared, own * inner),
        "weight": (own, shared * inner, batch * outer),
    }[of.form]
    channels = own if of.form == "data" else shared
    return ImplicitGemm(of, sizes, strides, geometry, groups, channels)


def _dim_strides(indices: Sequence[object], extents: Mapping[str, int]) -> list[int]:
    """Return the strides of the dims that windows index, in the order of the dims."""
    found: list[int] = []
    stride = 1
    for index in reversed(indices):
        if isinstance(index, Window):
            found.append(stride)
        stride *= index_extent(index, extents)  # pyright: ignore[reportArgumentType]
    return found[::-1]
