"""
Functions that TDL (the language in which operators are defined) cannot say, by name: `values[a.., i] = opaque
topk_values[i; j](x[a.., j])`.

Nothing is derived from them but that every position of `a..` is treated alike, and that no more are made than taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from unity_ir.tdl.functions import Array


@dataclass(frozen=True, slots=True)
class OpaqueFunction:
    """A function that TDL has no formula for, such as top-k: its numpy implementation and FLOPs."""

    evaluate: Callable[[Array, int], Array]
    """
    `evaluate(array, size)` returns an array whose last dim, the one made, has this size; the last dim of `array` is the
    one taken.
    """
    flops: int
    """Floating point operations per element of the body."""


def _largest(x: Array, count: int) -> Array:
    """
    Return the positions of the `count` largest elements along the last dim, largest first; of equal ones the first.
    """
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


def _topk_values(x: Array, count: int) -> Array:
    return np.take_along_axis(x, _largest(x, count), axis=-1)


OPAQUE: Mapping[str, OpaqueFunction] = {
    "topk_values": OpaqueFunction(_topk_values, 8),
    "topk_indices": OpaqueFunction(_largest, 8),
}
