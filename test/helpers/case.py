"""One use of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.tdl.syntax import AttrValue

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """
    An operator at some shapes, with attributes; `classes` is what its integer operand holds less than, and with
    `positive` its operands are well above 0.
    """

    shapes: tuple[Shape, ...]
    attributes: Mapping[str, AttrValue]
    classes: int = 1
    positive: bool = False
