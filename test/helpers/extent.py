"""Samples of large families of cases in `make test`, and all of them in `make zoo`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("ZOO") == "all"


def sample(cases: Sequence[T], every: int, first: int = 0) -> Sequence[T]:
    """Every `every`-th case from number `first`; all with ZOO=all."""
    return cases if ALL else cases[first::every]


def examples(number: int) -> int:
    """Given how many examples of a property are drawn with ZOO=all, return how many are drawn now: a fifth."""
    return number if ALL else max(1, number // 5)
