"""The scalar functions TDL may call: arity, numpy semantics and what one evaluation costs."""

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


def _greater(a: Array, b: Array) -> Array:
    return np.greater(a, b)


def _equal(a: Array, b: Array) -> Array:
    return np.equal(a, b)


def _where(c: Array, a: Array, b: Array) -> Array:
    return np.where(c, a, b)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (np.tanh(0.5 * x) + 1)


def _rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


def _less(a: Array, b: Array) -> Array:
    return np.less(a, b)


FUNCTIONS: dict[str, ScalarFunction] = {
    "identity": ScalarFunction(1, _identity, 0),
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
    "lt": ScalarFunction(2, _less, 1),
    "gt": ScalarFunction(2, _greater, 1),
    "eq": ScalarFunction(2, _equal, 1),
    "where": ScalarFunction(3, _where, 1),
}

FUSED = ("relu", "gelu")
"""Activations that kernels take in their epilogue."""

ACTIVATIONS = ("identity", *FUSED)
"""What an attribute of kind `name` may name."""
