# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Values known at import: NumPy arrays, of which dims that only repeat elements are views, and keys of random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax.extend import core

from unity_ir.errors import UnityError
from unity_ir.frontends.report import one_line

Operand: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"
"""A tensor of the export, or an array known at import."""

POINTWISE = {
    *("add", "sub", "mul", "div", "max", "min", "and", "or", "not", "xor", "neg", "eq", "ne", "lt", "le", "gt", "ge"),
    *("select_n", "convert_element_type", "copy", "exp", "log", "sqrt", "abs", "sign", "floor", "is_finite"),
}
"""Primitives that compute each element from those at its place, and have no shapes among their parameters."""


WIDER: Mapping[str, str] = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32"),
    **dict.fromkeys(("uint32", "uint64"), "int64"),
}
"""Integer types that the compiler has not, each with the one that its elements are held in."""

MOVES = {
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "concatenate", "slice", "split"),
    *("gather", "dynamic_slice", "dynamic_update_slice", "scatter", "select_n", "copy", "stack", "unstack", "tile"),
    *("stop_gradient", "reduce_max", "reduce_min", "max", "min", "sort", "optimization_barrier"),
}
"""Primitives that only move or choose elements: those of a wider type are the same."""


def is_known(value: Any) -> bool:
    """Return whether a value is known at import: an array, or a key of random numbers."""
    return isinstance(value, np.ndarray | jax.Array)


def known(value: Any) -> Any:
    """Return a number or array known at import as NumPy's; a key of random numbers stays JAX's."""
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else np.asarray(value)


def fold(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation on known operands, computed by JAX. Raises `UnityError` where JAX fails."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim" and len(operands) == 1 and isinstance(operands[0], np.ndarray):
        shape = [1] * len(params["shape"])
        for size, dim in zip(operands[0].shape, params["broadcast_dimensions"], strict=True):
            shape[dim] = size
        return [np.broadcast_to(operands[0].reshape(shape), params["shape"])]
    shape = tuple(eqn.outvars[0].aval.shape) if name in POINTWISE else ()
    if shape:
        operands = shrunk([np.broadcast_to(v, shape) for v in operands])
    try:
        with jax.ensure_compile_time_eval():
            results = [known(v) for v in evaluate(eqn, operands)]
    except Exception as error:
        raise UnityError(f"cannot be computed at import: {one_line(error)}") from error
    return [np.broadcast_to(v, shape) for v in results] if shape else results


def evaluate(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation, computed by JAX."""
    given = {v: x for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, core.Literal)}
    jaxpr = core.Jaxpr([], list(given), eqn.outvars, [eqn])
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))(*given.values())


def shrunk(arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Return arrays of one shape with only the first element along dims on which none of them depends."""
    repeated = [all(a.strides[d] == 0 for a in arrays) for d in range(arrays[0].ndim)]
    places = tuple(slice(0, 1) if r else slice(None) for r in repeated)
    return [a[places] for a in arrays]


def to_torch(value: Operand) -> torch.Tensor:
    """
    Return a value as a tensor: of a known array a copy, in which dims that only repeat elements are views.

    Raises `UnityError` for keys of random numbers, and element types that PyTorch has not.
    """
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnityError("a key of random numbers is no operand; draw numbers from it")
    if not value.size:
        return torch.empty(value.shape, dtype=torch_type(value.dtype))
    (small,) = shrunk([value])
    if small.size == 1:
        return torch.full((), small.item(), dtype=torch_type(value.dtype)).expand(value.shape)
    return tensor_of(small).expand(value.shape)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with the elements of an array. Raises `UnityError` for element types that PyTorch has not."""
    dtype = torch_type(array.dtype)
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(dtype)
    wider = WIDER.get(array.dtype.name)
    return torch.from_numpy(np.array(array) if wider is None else array.astype(wider))


def torch_type(dtype: Any) -> torch.dtype:
    """
    Return PyTorch's name of an element type, or that of the one that holds it (`WIDER`). Raises `UnityError` if it has
    none.
    """
    name = np.dtype(dtype).name
    name = WIDER.get(name, name)
    found = getattr(torch, name, None)
    if dtype == ml_dtypes.bfloat16:
        return torch.bfloat16
    if not isinstance(found, torch.dtype):
        raise UnityError(f"element type {name} is not supported")
    return found
