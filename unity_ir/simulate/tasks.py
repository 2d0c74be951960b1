"""The task graph of one iteration (FlexFlow, section 5.1): arrays, in program order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unity_ir.pcg.graph import Value
from unity_ir.simulate.streams import Streams

Ints = npt.NDArray[np.int64]

KINDS = ("forward", "forward communication", "backward", "backward communication", "gradient sync", "update")
FORWARD, FORWARD_MOVE, BACKWARD, BACKWARD_MOVE, SYNC, UPDATE = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class Label:
    """Label a task: an index into `KINDS`, an operator or a kind of move, and the value it makes or moves."""

    kind: int
    what: str
    value: Value


@dataclass(frozen=True)
class Lists:
    """Lists of numbers, flat: list i is `flat[at[i]:at[i + 1]]`."""

    flat: Ints
    at: Ints

    def __getitem__(self, i: int) -> list[int]:
        return self.flat[self.at[i] : self.at[i + 1]].tolist()

    def __len__(self) -> int:
        return len(self.at) - 1

    @property
    def owners(self) -> Ints:
        """For every number, which list it is of."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.at))


def flat(lists: Iterable[Sequence[int]]) -> Lists:
    """Given [[3], [1, 2]] returns flat [3, 1, 2] at [0, 1, 3]."""
    kept = list(lists)
    at = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    return Lists(np.array([n for each in kept for n in each], dtype=np.int64), at)


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in program order."""

    streams: Streams
    ticks: Ints
    before: Lists
    """
    The tasks a task waits for, all earlier in order: those that make what it reads, those its devices have been issued
    before it, and the one before it on each stream it holds.
    """
    held: Lists
    """The streams a task holds."""
    labels: tuple[Label, ...]
    bytes: Ints
    """The size of every buffer, on each device that has it."""
    uses: Lists
    """The tasks between the first and the last of which, on each class, the buffer is alive."""
    always: tuple[int, ...]
    """Bytes a device of each class holds all the time."""

    def __len__(self) -> int:
        return len(self.ticks)
