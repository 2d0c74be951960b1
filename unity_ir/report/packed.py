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
    """
    Numbers distinct entries from 0, in the order in which they are first looked up: `table[entry]` is the entry's
    number. So a report's data can hold each text once.
    """

    def __init__(self):
        self._numbers: dict[T, int] = {}

    def __getitem__(self, entry: T) -> int:
        return self._numbers.setdefault(entry, len(self._numbers))

    @property
    def entries(self) -> list[T]:
        """The entries that were looked up so far, in the order of their numbers."""
        return list(self._numbers)


def nanoseconds(seconds: float) -> int:
    """Convert seconds to nanoseconds, rounded to the nearest whole number."""
    return round(seconds * 1e9)


def rounded(ticks: Ints) -> Ints:
    """Convert times in picoseconds (the simulation's ticks) to nanoseconds, rounded to the nearest whole numbers."""
    return (ticks + TICKS_PER_NS // 2) // TICKS_PER_NS


def differences(numbers: Iterable[int] | Ints) -> list[int]:
    """
    Return by how much each number exceeds the one before it, the first one itself: given 3, 5, 5, returns 3, 2, 0.
    """
    found: list[int] = np.diff(np.array(numbers, dtype=np.int64), prepend=0).tolist()
    return found
