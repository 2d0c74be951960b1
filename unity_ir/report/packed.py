"""Pack data for a page: texts once each, and rising numbers as differences, which are short as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np

from unity_ir.simulate.streams import TICKS
from unity_ir.simulate.tasks import Ints

Json = object
"""What `json.dumps` takes."""

TICKS_PER_NS = TICKS // 10**9


T = TypeVar("T")


class Table(Generic[T]):
    """Numbers distinct entries from 0, in the order in which they come first; `entries` are those of the numbers."""

    def __init__(self):
        self._numbers: dict[T, int] = {}

    def __getitem__(self, entry: T) -> int:
        return self._numbers.setdefault(entry, len(self._numbers))

    @property
    def entries(self) -> list[T]:
        """The entries so far, by number."""
        return list(self._numbers)


def nanoseconds(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * 1e9)


def rounded(ticks: Ints) -> Ints:
    """Convert ticks (picoseconds) to whole nanoseconds."""
    return (ticks + TICKS_PER_NS // 2) // TICKS_PER_NS


def differences(numbers: Iterable[int] | Ints) -> list[int]:
    """Return how much each number is above the one before, the first above 0: given 3, 5, 5, returns 3, 2, 0."""
    found: list[int] = np.diff(np.array(numbers, dtype=np.int64), prepend=0).tolist()
    return found
