"""Represent PyTorch expressions: text, and the index variable that each dim of the tensor ranges over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unity_ir.kernels.text import Text
from unity_ir.tdl.element_types import FLOAT8

TORCH_DTYPES: Mapping[str, str] = {
    "f64": "torch.float64",
    "f32": "torch.float32",
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    FLOAT8: "torch.float8_e4m3fn",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "bool": "torch.bool",
}


@dataclass(frozen=True, slots=True)
class TensorText:
    """Python code of a tensor, with the index variable of each of its dims; or of a number, which has none."""

    text: Text
    dims: tuple[str, ...]
    """The index variable that each dim ranges over."""
    number: bool = False
    """Whether it is a Python number rather than a tensor."""
    kind: str = "float"
    """Kind of its elements: `float`, `int` or `bool`."""


def letters(names: Sequence[str]) -> dict[str, str]:
    """
    Return {index variable: letter from a to z} for the distinct index variables in `names`, to write an equation of
    `torch.einsum`: a variable gets its own first letter where that is free.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        free = [c for c in (name[0], *"abcdefghijklmnopqrstuvwxyz") if c.isascii() and c.islower()]
        found[name] = next(c for c in free if c not in found.values())
    return found
