"""Which numbers each element type represents."""

from __future__ import annotations

HALVES = ("bf16", "f16")
"""Floating point types of half the bits of single precision."""

FLOAT8 = "f8e4m3"
"""
The type of 8 bits that products read: 4 bits of exponent, 3 of fraction, no infinity (OCP 8-bit floating point). Only
kernels know it.
"""

_SIGNIFICANT = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
_EXPONENT = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8}
_BITS = {"i64": 63, "i32": 31, "bool": 1}


def holds_all(source: str, target: str) -> bool:
    """
    Return whether element type `target` represents every number of element type `source`, so that a cast changes none.

    Given `bf16` and `f32` returns True, given `i64` and `f64` False.
    """
    if source == target:
        return True
    if target == "bool" or (source in _SIGNIFICANT and target in _BITS):
        return False
    if source in _BITS:
        return _BITS[source] <= (_BITS[target] if target in _BITS else _SIGNIFICANT[target])
    return _SIGNIFICANT[source] <= _SIGNIFICANT[target] and _EXPONENT[source] <= _EXPONENT[target]
