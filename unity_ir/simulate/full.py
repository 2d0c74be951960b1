"""Full simulation (FlexFlow, section 5.2): compute when every task of a task graph starts and ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity_ir.simulate.streams import TICKS
from unity_ir.simulate.tasks import Ints, TaskGraph


@dataclass(frozen=True)
class Timeline:
    """A simulated task graph: the tick (picosecond) at which each task ends."""

    tasks: TaskGraph
    ends: Ints

    @cached_property
    def starts(self) -> Ints:
        """The tick at which each task starts."""
        return self.ends - self.tasks.ticks

    @property
    def makespan(self) -> int:
        """The ticks from the start until the last task ends."""
        return int(self.ends.max(initial=0))

    @property
    def seconds(self) -> float:
        """The seconds until the last task ends."""
        return self.makespan / TICKS

    def busy(self, stream: int) -> int:
        """
        Return for how many ticks in total the stream with this number (a device class's compute stream, or its port to
        the links of a machine level) is occupied.
        """
        held = self.tasks.held
        return int(self.tasks.ticks[held.owners[held.flat == stream]].sum())

    def critical_path(self) -> list[int]:
        """
        Return a critical path, as task numbers: tasks up to the one that ends last, each of which starts when the one
        before it ends.
        """
        path = [int(self.ends.argmax())] if len(self.ends) else []
        while path:
            before = [p for p in self.tasks.before[path[-1]] if self.ends[p] == self.starts[path[-1]]]
            if not before:
                break
            path.append(int(before[0]))
        return path[::-1]


def simulate(tasks: TaskGraph) -> Timeline:
    """
    Schedule every task as early as possible; return the timeline.

    A task waits for the tasks that make its inputs and, as streams are first in, first out, for the previous task on
    each of its streams.
    """
    ends: list[int] = []
    before: list[int] = tasks.before.flat.tolist()
    at: list[int] = tasks.before.at.tolist()
    begin = at[0]
    for ticks, end in zip(tasks.ticks.tolist(), at[1:], strict=True):
        start = 0
        for p in before[begin:end]:
            if ends[p] > start:
                start = ends[p]
        ends.append(start + ticks)
        begin = end
    return Timeline(tasks, np.array(ends, dtype=np.int64))
