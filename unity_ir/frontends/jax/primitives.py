# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
JAX's primitives as functions of PyTorch, by name. Each takes the equation, for its parameters, and its operands:
tensors, and arrays known at import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import torch

from unity_ir.errors import UnityError
from unity_ir.frontends.jax.convolutions import convolution, window_max, window_min, window_sum
from unity_ir.frontends.jax.indexing import (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
    scatter_add,
    scatter_max,
    scatter_min,
    scatter_mul,
    scatter_sub,
)
from unity_ir.frontends.jax.values import Operand, to_torch, torch_type

Tensor: TypeAlias = torch.Tensor
Mapped: TypeAlias = Callable[..., "Tensor | Sequence[Tensor]"]


def _pointwise(function: Callable[..., Tensor]) -> Mapped:
    """Return a primitive that computes each element by `function` of those at its place; numbers are broadcast."""

    def of(eqn: Any, *operands: Operand) -> Tensor:
        return function(*map(to_torch, operands)).expand(eqn.outvars[0].aval.shape)

    return of


def _with(function: Callable[..., Any]) -> Mapped:
    """Return a primitive that gives `function` its operands and its parameters, these by name."""

    def of(eqn: Any, *operands: Operand) -> Any:
        return function(*map(to_torch, operands), **eqn.params)

    return of


# Arithmetic


def _div(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _round(x: Tensor, rounding_method: Any) -> Tensor:
    if int(rounding_method) == 1:
        return torch.round(x)
    return torch.sign(x) * torch.floor(torch.abs(x) + 0.5)


def _integer_pow(x: Tensor, y: int) -> Tensor:
    return torch.square(x) if y == 2 else torch.pow(x, y)


def _max(eqn: Any, x: Operand, y: Operand) -> Tensor:
    """The larger of two elements; a bound of minus infinity, as JAX gives to maxima of dims, is none."""
    for one, other in ((x, y), (y, x)):
        if isinstance(one, np.ndarray) and one.size and jnp.issubdtype(one.dtype, jnp.floating):
            if bool(np.all(np.isneginf(one[tuple(slice(0, 1) for _ in one.shape)]))) and _uniform(one):
                return to_torch(other).expand(eqn.outvars[0].aval.shape)
    return _pointwise(torch.maximum)(eqn, x, y)  # pyright: ignore[reportReturnType]


def _uniform(x: np.ndarray[Any, Any]) -> bool:
    return all(stride == 0 or size == 1 for stride, size in zip(x.strides, x.shape, strict=True))


def _erfc(x: Tensor) -> Tensor:
    return 1 - torch.erf(x)


_NEAR_0 = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_NEAR_1 = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)
"""Coefficients of (the inverse of erf) / x, in w - 2.5 for w < 5, else in sqrt(w) - 3, where w = -log(1 - x^2)."""


def _erf_inv(x: Tensor) -> Tensor:
    """
    The inverse of erf in single precision (Giles, "Approximating the erfinv function", 2010, table 5); a step of
    Newton's makes it that of double precision. The gradient is that of the inverse, not of the polynomials. At 1 and -1
    it is infinite.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return _erf_inv(x.float()).to(x.dtype)
    at = x.detach()
    w = -torch.log1p(-at * at)
    near = torch.where(w < 5, w - 2.5, torch.sqrt(w) - 3)
    y = torch.where(w < 5, _polynomial(_NEAR_0, near), _polynomial(_NEAR_1, near)) * at
    slope = 0.5 * math.sqrt(math.pi) * torch.exp(y * y)
    if x.dtype == torch.float64:
        y = y - slope * (torch.erf(y) - at)
        slope = 0.5 * math.sqrt(math.pi) * torch.exp(y * y)
    return torch.where(at.abs() < 1, y + slope * (x - at), at / (1 - at.abs()))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Return a polynomial's values by Horner's rule, of coefficients that begin with that of the highest power."""
    first, *rest = coefficients
    out: Tensor | float = first
    for coefficient in rest:
        out = out * x + coefficient
    assert isinstance(out, Tensor)
    return out


def _logical(of_bools: Callable[..., Tensor], of_bits: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of(*operands: Tensor) -> Tensor:
        return (of_bools if operands[0].dtype == torch.bool else of_bits)(*operands)

    return of


def _select(eqn: Any, which: Operand, *cases: Operand) -> Tensor:
    """`select_n`: of several cases that whose number `which` has, a boolean for two."""
    index, values = to_torch(which), [to_torch(c) for c in cases]
    shape = eqn.outvars[0].aval.shape
    if index.dtype == torch.bool:
        return torch.where(index, values[1], values[0]).expand(shape)
    out = values[0]
    for number, value in enumerate(values[1:], 1):
        out = torch.where(index >= number, value, out)
    return out.expand(shape)


def _clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def _reduce_precision(x: Tensor, exponent_bits: int, mantissa_bits: int) -> Tensor:
    known = {(8, 23): torch.float32, (8, 7): torch.bfloat16, (5, 10): torch.float16, (11, 52): torch.float64}
    dtype = known.get((exponent_bits, mantissa_bits))
    if dtype is None:
        raise UnityError(f"numbers of {exponent_bits} and {mantissa_bits} bits have no element type")
    return x if dtype == x.dtype else x.to(dtype).to(x.dtype)


def _stop_gradient(x: Tensor) -> Tensor:
    return x.detach() if x.is_floating_point() else x


def _convert(eqn: Any, x: Operand) -> Tensor:
    tensor, dtype = to_torch(x), torch_type(eqn.params["new_dtype"])
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


# Shapes


def _broadcast_in_dim(eqn: Any, x: Operand, *sizes: Operand) -> Tensor:
    del sizes
    tensor, shape = to_torch(x), tuple(eqn.params["shape"])
    between = [1] * len(shape)
    for size, dim in zip(tensor.shape, eqn.params["broadcast_dimensions"], strict=True):
        between[int(dim)] = size
    return tensor.reshape(between).expand(shape)


def _reshape(eqn: Any, x: Operand, *sizes: Operand) -> Tensor:
    del sizes
    tensor = to_torch(x)
    if eqn.params.get("dimensions") is not None:
        tensor = tensor.permute(tuple(eqn.params["dimensions"]))
    return tensor.reshape(tuple(eqn.outvars[0].aval.shape))


def _shaped(eqn: Any, x: Operand) -> Tensor:
    return to_torch(x).reshape(tuple(eqn.outvars[0].aval.shape))


def _transpose(x: Tensor, permutation: Sequence[int]) -> Tensor:
    return x.permute(tuple(map(int, permutation)))


def _flip(x: Tensor, dimensions: Sequence[int]) -> Tensor:
    return x.flip(tuple(map(int, dimensions)))


def _concatenate(eqn: Any, *operands: Operand) -> Tensor:
    return torch.cat([to_torch(x) for x in operands], int(eqn.params["dimension"]))


def _slice(x: Tensor, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any) -> Tensor:
    steps = strides or (1,) * x.dim()
    for dim, (start, limit, step) in enumerate(zip(start_indices, limit_indices, steps, strict=True)):
        if (start, limit, step) != (0, x.shape[dim], 1):
            x = x[(slice(None),) * dim + (slice(int(start), int(limit), int(step)),)]
    return x


def _stack(eqn: Any, *operands: Operand) -> Tensor:
    return torch.stack([to_torch(x) for x in operands], int(eqn.params["axis"]))


def _tile(x: Tensor, reps: Sequence[int]) -> Tensor:
    return x.repeat(tuple(map(int, reps)))


def _unstack(x: Tensor, axis: int) -> Sequence[Tensor]:
    return x.unbind(int(axis))


def _split(x: Tensor, sizes: Sequence[int], axis: int) -> Sequence[Tensor]:
    return torch.split(x, [int(s) for s in sizes], int(axis))


def _pad(eqn: Any, x: Operand, by: Operand) -> Tensor:
    """Pad dims by (before, after, between elements); negative numbers cut."""
    tensor = to_torch(x)
    if not isinstance(by, np.ndarray):
        raise UnityError("what it pads with depends on data; pad with a number, and choose by jnp.where")
    value = by.item()
    for dim, (before, after, between) in enumerate(eqn.params["padding_config"]):
        if between:
            wide = tensor.unsqueeze(dim + 1)
            filler = torch.full((*wide.shape[: dim + 1], int(between), *wide.shape[dim + 2 :]), value).to(tensor.dtype)
            tensor = torch.cat([wide, filler], dim + 1).flatten(dim, dim + 1)
            tensor = tensor.narrow(dim, 0, tensor.shape[dim] - between)
        start, size = max(-before, 0), tensor.shape[dim] - max(-before, 0) - max(-after, 0)
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
        if before > 0 or after > 0:
            around = [0, 0] * (tensor.dim() - 1 - dim) + [max(before, 0), max(after, 0)]
            tensor = torch.nn.functional.pad(tensor, around, value=value)
    return tensor


# Products


def _dot_general(eqn: Any, left: Operand, right: Operand) -> Tensor:
    """
    A sum of products: dims that both have and keep come first in the result, then those of the left, then of the right.
    """
    summed, both = eqn.params["dimension_numbers"]
    return _product(*_of_result_type(eqn, left, right), summed, both)


def swapped_product(eqn: Any, left: Operand, right: Operand) -> tuple[Tensor, tuple[int, ...]]:
    """
    Return the sum of products of a `dot_general`, of the right operand by the left, and the permutation of its dims
    that makes it the result.
    """
    (left_sum, right_sum), (left_both, right_both) = eqn.params["dimension_numbers"]
    a, b = _of_result_type(eqn, left, right)
    out = _product(b, a, (right_sum, left_sum), (right_both, left_both))
    whole, first = len(left_both), b.dim() - len(right_both) - len(right_sum)
    return out, (*range(whole), *range(whole + first, out.dim()), *range(whole, whole + first))


def _of_result_type(eqn: Any, left: Operand, right: Operand) -> tuple[Tensor, Tensor]:
    a, b = to_torch(left), to_torch(right)
    dtype = torch_type(eqn.outvars[0].aval.dtype)
    return a if a.dtype == dtype else a.to(dtype), b if b.dtype == dtype else b.to(dtype)


Dims: TypeAlias = "tuple[Sequence[int], Sequence[int]]"


def _product(a: Tensor, b: Tensor, summed: Dims, both: Dims) -> Tensor:
    """Return the sum of products over pairs of dims of `a` and `b`; `both` are the pairs that the result has once."""
    pairs = sorted(zip(*summed, strict=True))
    a_sum, b_sum = [x for x, _ in pairs], [y for _, y in pairs]
    a_own = [d for d in range(a.dim()) if d not in (*a_sum, *both[0])]
    b_own = [d for d in range(b.dim()) if d not in (*b_sum, *both[1])]
    if not pairs:
        return _outer(a, b, both, (a_own, b_own))
    lead = [a.shape[d] for d in both[0]]
    rows, columns = [a.shape[d] for d in a_own], [b.shape[d] for d in b_own]
    sums = math.prod(a.shape[d] for d in a_sum)
    # Rows of several dims, as samples and positions, stay apart where the right is a matrix.
    as_they_are = len(rows) == 1 or (rows and not lead)
    a = a.permute(*both[0], *a_own, *a_sum).reshape(*lead, *(rows if as_they_are else [math.prod(rows)]), sums)
    width = math.prod(columns)
    if b_own[-1:] == [b.dim() - 1]:
        b = b.permute(*both[1], *b_sum, *b_own).reshape(*lead, sums, width)
    else:
        b = b.permute(*both[1], *b_own, *b_sum).reshape(*lead, width, sums).transpose(-1, -2)
    return torch.matmul(a, b).reshape((*lead, *rows, *columns))


def _outer(a: Tensor, b: Tensor, both: Any, own: Any) -> Tensor:
    a = a.permute(*both[0], *own[0])
    b = b.permute(*both[1], *own[1])
    whole = len(both[0])
    a = a.reshape(*a.shape, *(1,) * len(own[1]))
    b = b.reshape(*b.shape[:whole], *(1,) * len(own[0]), *b.shape[whole:])
    return a * b


# Reductions


_Reduced: TypeAlias = Callable[[Tensor, tuple[int, ...]], Tensor]


def _reduction(function: _Reduced) -> Mapped:
    def of(eqn: Any, x: Operand) -> Tensor:
        axes = tuple(map(int, eqn.params["axes"]))
        return function(to_torch(x), axes) if axes else to_torch(x)

    return of


def _dim_by_dim(function: Callable[[Tensor, int], Tensor]) -> _Reduced:
    def of(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        for axis in sorted(axes, reverse=True):
            x = function(x, axis)
        return x

    return of


def _of_bools(of_bools: _Reduced, of_numbers: _Reduced) -> _Reduced:
    def of(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return (of_bools if x.dtype == torch.bool else of_numbers)(x, axes)

    return of


def _where_largest(function: Callable[[Tensor, int], Tensor]) -> Mapped:
    def of(eqn: Any, x: Operand) -> Tensor:
        (axis,) = eqn.params["axes"]
        return function(to_torch(x), int(axis)).to(torch_type(eqn.params["index_dtype"]))

    return of


def _cumulative(function: Callable[[Tensor, int], Tensor]) -> Mapped:
    def of(eqn: Any, x: Operand) -> Tensor:
        tensor, axis = to_torch(x), int(eqn.params["axis"])
        if not eqn.params["reverse"]:
            return function(tensor, axis)
        return function(tensor.flip(axis), axis).flip(axis)

    return of


def _running(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """
    Return a function that combines all elements up to each position of a dim, for which an element may count several
    times (as for a maximum): each step doubles how many are combined (Hillis and Steele, 1986).
    """

    def of(x: Tensor, axis: int) -> Tensor:
        by, size = 1, x.shape[axis]
        while by < size:
            combined = combine(x.narrow(axis, by, size - by), x.narrow(axis, 0, size - by))
            x = torch.cat([x.narrow(axis, 0, by), combined], axis)
            by *= 2
        return x

    return of


def _sort(eqn: Any, *operands: Operand) -> Sequence[Tensor]:
    """Sort by the first `num_keys` operands, of which earlier ones count more; the others go along."""
    dim, keys = int(eqn.params["dimension"]), int(eqn.params["num_keys"])
    first, *rest = map(to_torch, operands)
    if keys == 1:
        values, order = torch.sort(first, dim=dim, stable=True)
        return [values, *(torch.gather(x, dim, order) for x in rest)]
    tensors = [first, *rest]
    order = torch.argsort(tensors[keys - 1], dim=dim, stable=True)
    for key in reversed(tensors[: keys - 1]):
        order = torch.gather(order, dim, torch.argsort(torch.gather(key, dim, order), dim=dim, stable=True))
    return [torch.gather(x, dim, order) for x in tensors]


def _top_k(eqn: Any, x: Operand) -> Sequence[Tensor]:
    axis = int(eqn.params.get("axis", -1))
    values, order = torch.topk(to_torch(x), int(eqn.params["k"]), axis)
    return [values, order.to(torch_type(eqn.outvars[1].aval.dtype))]


def _same(eqn: Any, *operands: Operand) -> Sequence[Tensor]:
    """Return the operands: the primitive is a hint to a compiler."""
    del eqn
    return [to_torch(x) for x in operands]


def _refuse(why: str) -> Mapped:
    def of(eqn: Any, *operands: Operand) -> Tensor:
        raise UnityError(why)

    return of


_COLLECTIVE = "it is a collective of a mesh; give the function of the whole batch, which the plan divides"

PRIMITIVES: Mapping[str, Mapped] = {
    "neg": _pointwise(torch.neg),
    "exp": _pointwise(torch.exp),
    "exp2": _pointwise(torch.exp2),
    "log": _pointwise(torch.log),
    "log1p": _pointwise(torch.log1p),
    "expm1": _pointwise(torch.expm1),
    "tanh": _pointwise(torch.tanh),
    "logistic": _pointwise(torch.sigmoid),
    "sqrt": _pointwise(torch.sqrt),
    "rsqrt": _pointwise(torch.rsqrt),
    "sin": _pointwise(torch.sin),
    "cos": _pointwise(torch.cos),
    "tan": _pointwise(torch.tan),
    "sinh": _pointwise(torch.sinh),
    "cosh": _pointwise(torch.cosh),
    "asinh": _pointwise(torch.asinh),
    "acosh": _pointwise(torch.acosh),
    "atanh": _pointwise(torch.atanh),
    "abs": _pointwise(torch.abs),
    "sign": _pointwise(torch.sign),
    "floor": _pointwise(torch.floor),
    "ceil": _pointwise(torch.ceil),
    "round": _with(_round),
    "erf": _pointwise(torch.erf),
    "erfc": _pointwise(_erfc),
    "erf_inv": _pointwise(_erf_inv),
    "square": _pointwise(torch.square),
    "integer_pow": _with(_integer_pow),
    "is_finite": _pointwise(torch.isfinite),
    "not": _pointwise(_logical(torch.logical_not, torch.bitwise_not)),
    "add": _pointwise(torch.add),
    "add_any": _pointwise(torch.add),
    "sub": _pointwise(torch.sub),
    "mul": _pointwise(torch.mul),
    "div": _pointwise(_div),
    "rem": _pointwise(torch.fmod),
    "pow": _pointwise(torch.pow),
    "max": _max,
    "min": _pointwise(torch.minimum),
    "and": _pointwise(_logical(torch.logical_and, torch.bitwise_and)),
    "or": _pointwise(_logical(torch.logical_or, torch.bitwise_or)),
    "xor": _pointwise(_logical(torch.logical_xor, torch.bitwise_xor)),
    "eq": _pointwise(torch.eq),
    "ne": _pointwise(torch.ne),
    "lt": _pointwise(torch.lt),
    "le": _pointwise(torch.le),
    "gt": _pointwise(torch.gt),
    "ge": _pointwise(torch.ge),
    "eq_to": _pointwise(torch.eq),
    "lt_to": _pointwise(torch.lt),
    "le_to": _pointwise(torch.le),
    "select_n": _select,
    "clamp": _pointwise(_clamp),
    "convert_element_type": _convert,
    "reduce_precision": _with(_reduce_precision),
    "stop_gradient": _pointwise(_stop_gradient),
    "copy": _same,
    "copy_p": _same,
    "device_put": _same,
    "name": _same,
    "optimization_barrier": _same,
    "sharding_constraint": _same,
    "layout_constraint": _same,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _shaped,
    "expand_dims": _shaped,
    "transpose": _with(_transpose),
    "rev": _with(_flip),
    "concatenate": _concatenate,
    "slice": _with(_slice),
    "split": _with(_split),
    "stack": _stack,
    "unstack": _with(_unstack),
    "tile": _with(_tile),
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": convolution,
    "reduce_sum": _reduction(torch.sum),
    "reduce_max": _reduction(_of_bools(_dim_by_dim(torch.any), torch.amax)),
    "reduce_min": _reduction(_of_bools(_dim_by_dim(torch.all), torch.amin)),
    "reduce_prod": _reduction(_dim_by_dim(torch.prod)),
    "reduce_and": _reduction(_dim_by_dim(torch.all)),
    "reduce_or": _reduction(_dim_by_dim(torch.any)),
    "argmax": _where_largest(torch.argmax),
    "argmin": _where_largest(torch.argmin),
    "cumsum": _cumulative(torch.cumsum),
    "cumprod": _cumulative(torch.cumprod),
    "cummax": _cumulative(_running(torch.maximum)),
    "cummin": _cumulative(_running(torch.minimum)),
    "cumlogsumexp": _cumulative(torch.logcumsumexp),
    "reduce_window_max": window_max,
    "reduce_window_min": window_min,
    "reduce_window_sum": window_sum,
    "sort": _sort,
    "top_k": _top_k,
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "scatter": scatter,
    "scatter-add": scatter_add,
    "scatter_add": scatter_add,
    "scatter-sub": scatter_sub,
    "scatter-mul": scatter_mul,
    "scatter-min": scatter_min,
    "scatter-max": scatter_max,
    **dict.fromkeys(("psum", "psum2", "all_gather", "all_to_all", "ppermute", "axis_index"), _refuse(_COLLECTIVE)),
}
"""By the primitive's name."""
