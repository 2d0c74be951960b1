"""
Map reductions over any dims, softmax over any dim and cumulative sums from ATen operators to the compiler's. Each
mapping gets the call's `site` (what PyTorch recorded of its result: shape, element type) and the ATen arguments, and
returns the result as a value of the compiler's graph, or several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.maps.elementwise import binary, scale
from unity_ir.frontends.torch.maps.indexing import argmax, argmin, sort
from unity_ir.frontends.torch.recognise import losses
from unity_ir.frontends.torch.recognise.experts import chosen_experts
from unity_ir.frontends.torch.recognise.match import uncast
from unity_ir.frontends.torch.site import CallSite, cast, maps
from unity_ir.frontends.torch.values import Operand, Shape, constant, cut, expand, op, reshape, swap
from unity_ir.pcg.node import Value

Dims = int | Sequence[int] | None


def _dim_numbers(x: Value, dims: Dims) -> list[int]:
    """
    Return the dims of `x` that `dims` names (a number or several, negative ones from the last) as sorted, non-negative
    numbers; None and () mean all dims. For a scalar, returns [].
    """
    rank = len(x.shape)
    if rank == 0 or dims is None or (not isinstance(dims, int) and not dims):
        return list(range(rank))
    return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims))


def reduced(name: str, x: Value, dims: Sequence[int]) -> Value:
    """
    Return `x` reduced over `dims`, sorted dim numbers, by the graph operator called `name`, such as `reduce_sum`, which
    is applied once to each run of neighbouring dims. The result lacks these dims; `x` itself if there are none.
    """
    left = list(dims)
    while left:
        count = 1
        while len(left) > count and left[-1 - count] == left[-1] - count:
            count += 1
        x = op(name, x, dim=left[-count], count=count)
        del left[-count:]
    return x


def reduction(name: str, *aten: str) -> None:
    """
    Register the graph operator called `name`, such as `reduce_sum`, as the mapping of the ATen operators named in
    `aten`. The mapping reduces over the dims given in the call, or over all, to the shape and element type of PyTorch's
    result. A mean or sum that is the last step of a written-out cross-entropy becomes that operator instead, and a
    sum over experts that compute every token one over those that it chooses.
    """

    @maps(*aten)
    def over(site: CallSite, x: Value, dims: Dims = None, keepdim: bool = False, *, dtype: object = None) -> Value:
        del keepdim, dtype
        numbers = _dim_numbers(x, dims)
        x = cast(x, site.dtype)
        known: Value | None = None
        if name == "reduce_mean" and len(numbers) == len(x.shape):
            known = losses.mean_of(x)
        elif name == "reduce_sum" and numbers == [len(x.shape) - 1]:
            known = losses.one_hot_sum(x, site.tables)
        elif name == "reduce_sum" and numbers == [0]:
            known = chosen_experts(x)
        return reshape(reduced(name, x, numbers) if known is None else known, site.shape)

    del over


reduction("reduce_sum", "sum")
reduction("reduce_mean", "mean")
reduction("reduce_max", "amax")
reduction("reduce_min", "amin")
reduction("reduce_prod", "prod")


def _extreme(name: str, pair: str) -> None:
    """
    Register the mapping of ATen's `max` or `min`, whichever `name` is: of one operand a reduction, over all dims or
    one; of two, the elementwise graph operator called `pair`.
    """

    @maps(name)
    def over(site: CallSite, x: Operand, other: int | Operand | None = None, keepdim: bool = False) -> object:
        """
        Map the maximum (minimum) of all elements, of two tensors, or over a dim, with its index there.
        """
        if not isinstance(x, Value) or isinstance(other, Value | torch.Tensor):
            return binary(site, pair, x, 0 if other is None else other)
        assert other is None or isinstance(other, int)
        out = reshape(reduced(f"reduce_{name}", x, _dim_numbers(x, other)), site.shape)
        if other is None:
            return out
        index = argmax if name == "max" else argmin
        return out, index(site.like(site.shape, torch.int64), x, other, keepdim)

    del over


_extreme("max", "maximum")
_extreme("min", "minimum")


def _centred(x: Value, dims: Sequence[int]) -> Value:
    """Return `x` minus its mean over the dims with the sorted numbers `dims`, in the shape of `x`."""
    kept: Shape = tuple(1 if d in dims else s for d, s in enumerate(x.shape))
    return op("sub", x, reshape(reduced("reduce_mean", x, dims), kept))


def variance(x: Value, dims: Sequence[int], correction: float) -> Value:
    """
    Return the variance of `x` over `dims`, sorted dim numbers, which the result lacks: the sum of squared deviations
    from the mean, divided by (number of elements - `correction`).

    Raises `UnityError` if there are no more than `correction` elements.
    """
    count = prod(x.shape[d] for d in dims)
    if count <= correction:
        raise UnityError(f"the variance of {count} elements with correction {correction} is not defined")
    return scale(reduced("reduce_mean", op("square", _centred(x, dims)), dims), count / (count - correction))


@maps("var")
def var(
    site: CallSite,
    x: Value,
    dims: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    **more: float | None,
) -> Value:
    """
    Map PyTorch's overloads `var(x, unbiased)`, `var(x, dims, unbiased)` and `var(x, dims, *, correction)`, the last of
    which has `correction` in `more`: the sum of squared deviations over (count - correction), where `unbiased` is a
    correction of 1. `dims` of None means all; the result has the shape that PyTorch recorded at `site`, so `keepdim` is
    not read. Raises `UnityError` if there are no more than `correction` elements.
    """
    del keepdim
    if isinstance(dims, bool):
        dims, unbiased = None, dims
    correction = more.get("correction")
    correction = float(unbiased) if correction is None else float(correction)
    return reshape(variance(x, _dim_numbers(x, dims), correction), site.shape)


@maps("std")
def std(
    site: CallSite,
    x: Value,
    dims: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    **more: float | None,
) -> Value:
    """
    Map PyTorch's standard deviation, the square root of the variance; where it is 0, so is its gradient. Arguments and
    errors are as in `var`.
    """
    return root(var(site, x, dims, unbiased, keepdim, **more))


def root(x: Value) -> Value:
    """
    Return the elementwise square root of `x`, whose gradient is 0 where `x` is 0, as in PyTorch's norms and standard
    deviations; that of the plain square root would be infinite.
    """
    zero, one = (constant(v, (), x.type.dtype) for v in (0, 1))
    is_zero = op("eq", x, zero)
    return op("select", is_zero, zero, op("sqrt", op("select", is_zero, one, x)))


@maps("linalg_vector_norm")
def vector_norm(
    site: CallSite, x: Value, order: float = 2, dims: Dims = None, keepdim: bool = False, **_: object
) -> Value:
    """
    Map PyTorch's `linalg.vector_norm` of order `order` over `dims` (None: all), in the shape and element type of its
    result. Orders other than 1, 2 and infinity have no gradient at 0.
    """
    del keepdim
    x, over = cast(x, site.dtype), _dim_numbers(x, dims)
    if order == 2:
        return root(reshape(reduced("reduce_sum", op("square", x), over), site.shape))
    size = op("abs", x)
    if math.isinf(order):
        return reshape(reduced("reduce_max" if order > 0 else "reduce_min", size, over), site.shape)
    if order == 1:
        return reshape(reduced("reduce_sum", size, over), site.shape)
    powers = reshape(reduced("reduce_sum", op("pow_scalar", size, exponent=float(order)), over), site.shape)
    return op("pow_scalar", powers, exponent=1 / order)


@maps("cdist", "_cdist_forward")
def cdist(site: CallSite, x: Operand, y: Operand, order: float = 2, *_: object) -> Value:
    """
    Map PyTorch's cdist: return the distances [b.., m, n] of every row of `x` [b.., m, k] from every row of `y` [b.., n,
    k], as the norm of order `order` of their difference.
    """
    a, b = site.value(x, site.dtype), site.value(y, site.dtype)
    *lead, m, n = site.shape
    k = a.shape[-1]
    a = expand(reshape(a, (*a.shape[:-1], 1, k)), (*lead, m, n, k))
    b = expand(reshape(b, (*b.shape[:-2], 1, *b.shape[-2:])), (*lead, m, n, k))
    return vector_norm(site, op("sub", a, b), order, -1)


@maps("any")
def any_true(site: CallSite, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    """
    Map PyTorch's test whether any element along `dims` (None: all dims) is not 0; return booleans in the shape of its
    result.
    """
    del keepdim
    held = x if x.type.dtype == "bool" else op("ne", x, constant(0, (), x.type.dtype))
    return cast(reshape(reduced("reduce_max", cast(held, "f32"), _dim_numbers(x, dims)), site.shape), site.dtype)


@maps("all")
def all_true(site: CallSite, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    """
    Map PyTorch's test whether all elements along `dims` (None: all dims) are not 0; return booleans in the shape of its
    result.
    """
    del keepdim
    held = x if x.type.dtype == "bool" else op("ne", x, constant(0, (), x.type.dtype))
    return cast(reshape(reduced("reduce_min", cast(held, "f32"), _dim_numbers(x, dims)), site.shape), site.dtype)


@maps("var_mean")
def var_mean(site: CallSite, x: Value, *options: Dims | bool, **named: Any) -> tuple[Value, Value]:
    """Map PyTorch's var_mean: return (variance, mean) over the same dims. Arguments and errors are as in `var`."""
    return var(site, x, *options, **named), _mean_like(site, x, *options)


@maps("std_mean")
def std_mean(site: CallSite, x: Value, *options: Dims | bool, **named: Any) -> tuple[Value, Value]:
    """
    Map PyTorch's std_mean: return (standard deviation, mean) over the same dims. Arguments and errors are as in `var`.
    """
    return root(var(site, x, *options, **named)), _mean_like(site, x, *options)


def _mean_like(site: CallSite, x: Value, dims: Dims | bool = None, *_: object) -> Value:
    return reshape(reduced("reduce_mean", x, _dim_numbers(x, None if isinstance(dims, bool) else dims)), site.shape)


@maps("median")
def median(site: CallSite, x: Value, dim: int | None = None, keepdim: bool = False) -> Value | tuple[Value, Value]:
    """
    Map PyTorch's median. Without `dim`, returns the median of all elements; else (medians along `dim`, their indices).
    Of an even number of elements, the lower of the middle two is taken.
    """
    del keepdim
    x, along = (reshape(x, (prod(x.shape),)), 0) if dim is None else (x, dim % len(x.shape))
    half = (x.shape[along] - 1) // 2
    values, ids = (reshape(cut(v, along, half, 1), site.shape) for v in sort(site, x, along))
    return values if dim is None else (values, ids)


@maps("logcumsumexp")
def logcumsumexp(site: CallSite, x: Value, dim: int) -> Value:
    """
    Map PyTorch's logarithm of the cumulative sum of exponentials along a dim. The exponentials are first divided by the
    largest along the dim, so sums that are far smaller than it underflow, and their logarithm is minus infinity.
    """
    dim %= len(x.shape)
    top = reduced("reduce_max", x, [dim])
    top = expand(reshape(top, [1 if d == dim else s for d, s in enumerate(x.shape)]), site.shape)
    top = op("detach", top) if site.trained(top) else top
    return op("add", op("log", op("cumsum", op("exp", op("sub", x, top)), dim=dim)), top)


@maps("cumsum")
def cumsum(site: CallSite, x: Value, dim: int, *, dtype: object = None) -> Value:
    """
    Map PyTorch's cumulative sum along a dim, in the element type of the result that PyTorch recorded at `site`; so
    `dtype` is not read.
    """
    del dtype
    out = op("cumsum", cast(x, site.dtype), dim=dim % len(x.shape))
    counts = site.tables.orders.counts
    if (counted := counts.get(uncast(x))) is not None:
        counts[uncast(out)] = counted
    return out


@maps("softmax", "_softmax")
def softmax(site: CallSite, x: Value, dim: int, *_: object, **__: object) -> Value:
    """Map PyTorch's softmax over a dim, in the element type of its result; negative dims count from the last."""
    return swap(op("softmax", swap(cast(x, site.dtype), dim, -1)), dim, -1)


@maps("log_softmax", "_log_softmax")
def log_softmax(site: CallSite, x: Value, dim: int, *_: object, **__: object) -> Value:
    """Map PyTorch's log-softmax over a dim, in the element type of its result; negative dims count from the last."""
    return swap(op("log_softmax", swap(cast(x, site.dtype), dim, -1)), dim, -1)
