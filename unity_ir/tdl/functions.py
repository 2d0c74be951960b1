"""
The scalar functions that TDL, the language in which operators are defined, may call: arity, numpy semantics and what
one evaluation costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ScalarFunction:
    """A scalar function that TDL may call: the number of its arguments, its numpy implementation and its FLOPs."""

    arity: int
    evaluate: Callable[..., Array]
    flops: int
    """Floating point operations per evaluation, as a GPU's pipelines spend them (transcendentals count more)."""


# Coefficients of erf: W. J. Cody's rational approximation is overkill here; math.erf is exact and vectorised by numpy.
_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])


def _erf_like(x: Array) -> Array:
    array = np.asarray(x)
    return _erf(array).astype(array.dtype) if array.size else array


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf_like(x / math.sqrt(2)))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _identity(x: Array) -> Array:
    return x


def _where(c: Array, a: Array, b: Array) -> Array:
    return np.where(c, a, b)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (np.tanh(0.5 * x) + 1)


def _rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


_LOW = np.uint64(0xFFFFFFFF)


def philox(seed: Array, position: Array) -> Array:
    """
    Return uniform random numbers in [0, 1), of 24 random bits, as float64: one for each pair of `seed` and `position`,
    arrays of integers below 2^64 that are broadcast together.

    Each is the first word of Philox-4x32-10 (Salmon et al., SC'11) under the key `seed` at the counter `position`. It
    depends on its own position alone, so shards of a tensor draw the same numbers as the whole.
    """
    key, counter = np.asarray(seed).astype(np.uint64), np.asarray(position).astype(np.uint64)
    shift = np.uint64(32)
    k0, k1 = key & _LOW, key >> shift
    c0, c1, c2, c3 = counter & _LOW, counter >> shift, np.zeros_like(counter), np.zeros_like(counter)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ k0, b & _LOW, (a >> shift) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return (c0 >> np.uint64(8)).astype(np.float64) * 2.0**-24


FUNCTIONS: dict[str, ScalarFunction] = {
    "identity": ScalarFunction(1, _identity, 0),
    "float8": ScalarFunction(1, _identity, 0),
    "relu": ScalarFunction(1, _relu, 1),
    "gelu": ScalarFunction(1, _gelu, 12),
    "exp": ScalarFunction(1, np.exp, 4),
    "log": ScalarFunction(1, np.log, 4),
    "erf": ScalarFunction(1, _erf_like, 8),
    "sqrt": ScalarFunction(1, np.sqrt, 4),
    "rsqrt": ScalarFunction(1, _rsqrt, 4),
    "tanh": ScalarFunction(1, np.tanh, 6),
    "sigmoid": ScalarFunction(1, _sigmoid, 6),
    "sin": ScalarFunction(1, np.sin, 4),
    "cos": ScalarFunction(1, np.cos, 4),
    "abs": ScalarFunction(1, np.abs, 1),
    "floor": ScalarFunction(1, np.floor, 1),
    "pow": ScalarFunction(2, np.power, 10),
    "maximum": ScalarFunction(2, np.maximum, 1),
    "minimum": ScalarFunction(2, np.minimum, 1),
    "philox": ScalarFunction(2, philox, 60),
    "lt": ScalarFunction(2, np.less, 1),
    "le": ScalarFunction(2, np.less_equal, 1),
    "gt": ScalarFunction(2, np.greater, 1),
    "ge": ScalarFunction(2, np.greater_equal, 1),
    "eq": ScalarFunction(2, np.equal, 1),
    "ne": ScalarFunction(2, np.not_equal, 1),
    "and": ScalarFunction(2, np.logical_and, 1),
    "or": ScalarFunction(2, np.logical_or, 1),
    "not": ScalarFunction(1, np.logical_not, 1),
    "where": ScalarFunction(3, _where, 1),
}

ROUNDED = "float8"
"""
The function of a number that a product reads in 8 bits if it has 16 (`forms.float8`), as casts round numbers to other
types: it is the number itself. Only factors of products have it.
"""

CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not")
"""Functions that are true or false."""

FUSED = ("relu", "gelu")
"""Activations that kernels take in their epilogue."""

DTYPES = ("f32", "f64", "bf16", "f16", "i64", "i32", "bool")
"""Names an attribute of kind `dtype` may have."""

ACTIVATIONS = ("identity", *FUSED)
"""Names an attribute of kind `name` may have."""
