"""Define the task graph of one iteration (FlexFlow, section 5.1): arrays, in program order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unity_ir.plan.host_state import UpdateAction
from unity_ir.plan.scheduled import Action
from unity_ir.simulate.streams import Streams

Ints = npt.NDArray[np.int64]

KINDS = ("forward", "forward communication", "backward", "backward communication", "gradient sync", "update")
FORWARD, FORWARD_MOVE, BACKWARD, BACKWARD_MOVE, SYNC, UPDATE = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class Label:
    """The text by which traces show a task: its kind, its operator or move, and more."""

    kind: int
    """An index into `KINDS`."""
    what: str
    """The operator, or the kind of move."""
    of: str
    """The value that a move moves, or an update changes; empty for operators."""
    result: object
    """The type of what it makes, as `str` gives it."""


@dataclass(frozen=True, slots=True)
class PlayedLine:
    """
    One run of a line of a plan, or of an update, in a replay. Its tasks are those from number `first` to the first of
    the next line.
    """

    first: int
    action: Action | UpdateAction | None
    """What the line does; None for the sum over all devices of the squares of gradients."""
    micro_batch: int
    piece: int
    """The piece of the loss that it is run for; 0 outside of that loop."""


@dataclass(frozen=True)
class Lists:
    """Lists of integers in one flat array: list i is `flat[at[i]:at[i + 1]]`."""

    flat: Ints
    at: Ints

    def __getitem__(self, i: int) -> list[int]:
        return self.flat[self.at[i] : self.at[i + 1]].tolist()

    def __len__(self) -> int:
        return len(self.at) - 1

    @property
    def owners(self) -> Ints:
        """For each entry of `flat`, the index of the list that it is in."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.at))


def flat(lists: Iterable[Sequence[int]]) -> Lists:
    """Flatten lists: given [[3], [1, 2]], returns `Lists` with flat [3, 1, 2] and at [0, 1, 3]."""
    kept = list(lists)
    at = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    return Lists(np.array([n for each in kept for n in each], dtype=np.int64), at)


@dataclass(frozen=True)
class TaskGraph:
    """
    The tasks of one iteration in program order: their ticks (picoseconds), streams and dependencies, and the buffers
    that they use.
    """

    streams: Streams
    ticks: Ints
    before: Lists
    """
    Per task, the earlier tasks it waits for: those that make its inputs, the last one issued on each of its devices'
    compute streams, and the previous one on each stream it occupies.
    """
    held: Lists
    """Per task, the streams it occupies."""
    labels: tuple[Label, ...]
    bytes: Ints
    """Per buffer, its bytes on each device that has it."""
    uses: Lists
    """
    Per buffer, the tasks that use it: on each class it is held from the start of the first to the end of the last.
    """
    always: tuple[int, ...]
    """Per class, the bytes that a device holds throughout the iteration."""
    unwaited: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Of a part of a step, by register, the collectives that nothing in it waits for."""
    played: tuple[PlayedLine, ...] = ()
    """Of a replay, the lines of the plan in the order in which they are run; () of other task graphs."""

    def __len__(self) -> int:
        return len(self.ticks)
