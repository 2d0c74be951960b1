"""Convert arrays between element types in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unity_ir.tdl.functions import Array

NUMPY: Mapping[str, Any] = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.float32,
    "i64": np.int64,
    "i32": np.int32,
    "bool": np.bool_,
}
"""The numpy type of each element type; numpy has no bfloat16, whose numbers are float32 that end in zeros."""


def converted(array: Array, dtype: str) -> Array:
    """
    Return an array converted to the element type `dtype`, such as `bf16`, rounding as PyTorch does; bfloat16 is held as
    float32.

    Conversion is towards zero to integers, and to the nearest, ties to even, to bfloat16. Given 2.7 and `i64`, returns
    2; given 0 and `bool`, returns False.
    """
    if dtype != "bf16":
        return np.asarray(array).astype(NUMPY[dtype])
    bits = np.asarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(np.asarray(array)), np.float32(np.nan), rounded.view(np.float32))
