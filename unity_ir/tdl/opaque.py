"""
Functions that TDL (the language in which operators are defined) cannot say, or only as far more work than they are, by
name: `values[a.., i] = opaque topk_values[i; j](x[a.., j])`.

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


def _equals_before(x: Array, count: int) -> Array:
    """Return for each element how many before it along the last dim equal it."""
    order = np.argsort(x, axis=-1, kind="stable")
    ordered: Array = np.take_along_axis(x, order, axis=-1)
    place = np.arange(int(x.shape[-1]))
    is_first = np.ones(x.shape, dtype=bool)
    is_first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    begins: Array = np.maximum.accumulate(np.where(is_first, place, 0), axis=-1)
    out: Array = np.empty(x.shape, dtype=np.int64)
    np.put_along_axis(out, order, place - begins, axis=-1)
    return out[..., :count]


OPAQUE: Mapping[str, OpaqueFunction] = {
    "equals_before": OpaqueFunction(_equals_before, 8),
    "topk_values": OpaqueFunction(_topk_values, 8),
    "topk_indices": OpaqueFunction(_largest, 8),
}
