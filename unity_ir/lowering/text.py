"""Python expressions as text, with no more parentheses than they need: under the Triton and the PyTorch writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SUM, PRODUCT, UNARY, ATOM = 1, 2, 3, 4
"""How tightly a text binds; a comparison is 0."""


@dataclass(frozen=True, slots=True)
class Text:
    """An expression's text and how tightly it binds."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The text as an operand of an operator of that level."""
        return self.text if self.level >= level else f"({self.text})"


def binary(op: str, left: Text, right: Text) -> Text:
    """`left op right`, with no more parentheses than are needed to keep the order of evaluation."""
    level = SUM if op in "+-" else PRODUCT
    return Text(f"{left.at(level)} {op} {right.at(level + 1)}", level)


COMPARISONS: Mapping[str, str] = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
"""Functions that are operators of Python on numbers."""
LOGIC: Mapping[str, str] = {"and": "&", "or": "|"}
"""Functions that are operators of Python on conditions."""
