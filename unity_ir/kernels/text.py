"""Write Python expressions with no more parentheses than they need, for the Triton and the PyTorch writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SUM, PRODUCT, UNARY, ATOM = 1, 2, 3, 4
"""Levels of precedence of an expression's outermost operator, loosest first; a comparison has 0."""


@dataclass(frozen=True, slots=True)
class Text:
    """A Python expression as text, and the precedence (`level`) of its outermost operator."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """
        Return the text as an operand of an operator of precedence `level`: in parentheses if its own operator binds
        less tightly.
        """
        return self.text if self.level >= level else f"({self.text})"


def binary(op: str, left: Text, right: Text) -> Text:
    """
    Return the text `left op right`, where `op` is such as `+`, with parentheses only where they are needed to keep the
    order of evaluation.
    """
    level = SUM if op in "+-" else PRODUCT
    return Text(f"{left.at(level)} {op} {right.at(level + 1)}", level)


COMPARISONS: Mapping[str, str] = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
"""Python's operator for each TDL function that compares numbers."""
LOGIC: Mapping[str, str] = {"and": "&", "or": "|"}
"""Python's operator, on tensors of booleans, for each TDL function of conditions."""
