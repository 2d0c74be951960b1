"""One use of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unity_ir.tdl.syntax import AttrValue

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """
    An operator at some shapes, with attributes; `classes` is what its integer operands hold less than. Its floating
    operands lie between `bounds` or are normal, and `lift` is added to them; with a `grain` they are multiples of it.
    With `dtypes` operands that may hold anything have these element types.
    """

    shapes: tuple[Shape, ...]
    attributes: Mapping[str, AttrValue]
    classes: int = 1
    bounds: tuple[float, float] | None = None
    lift: tuple[float, ...] = ()
    grain: float | None = None
    dtypes: tuple[str, ...] = ()

    def array(self, operand: int, kind: str, shape: Shape, random: np.random.Generator) -> Any:
        """Elements for an operand that holds `float`, `int` or `bool`; those of gradients have no lift."""
        if kind == "int":
            return np.asarray(random.integers(0, self.classes, shape))
        if kind == "bool":
            return np.asarray(random.integers(0, 2, shape).astype(bool))
        lift = self.lift[operand] if 0 <= operand < len(self.lift) else 0.0
        found = random.standard_normal(shape) if self.bounds is None else random.uniform(*self.bounds, shape)
        return np.asarray(found + lift if self.grain is None else np.round(found / self.grain) * self.grain + lift)
