"""Full simulation (FlexFlow, section 5.2): compute when every task of a task graph starts and ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from unity_ir.machine.device import COPIES
from unity_ir.simulate.streams import TICKS
from unity_ir.simulate.tasks import UPDATE, Ints, TaskGraph


@dataclass(frozen=True)
class Timeline:
    """A simulated task graph: `ends` [task] are the ticks (picoseconds) at which tasks end."""

    tasks: TaskGraph
    ends: Ints

    @cached_property
    def starts(self) -> Ints:
        """The tick (picosecond) at which each task starts, [task]."""
        return self.ends - self.tasks.ticks

    @property
    def makespan(self) -> int:
        """The ticks (picoseconds) from the start until the last task ends."""
        return int(self.ends.max(initial=0))

    @property
    def seconds(self) -> float:
        """The seconds until the last task ends."""
        return self.makespan / TICKS

    def busy(self, stream: int) -> int:
        """Return the ticks (picoseconds) for which a stream, given by number, is occupied in all."""
        held = self.tasks.held
        return int(self.tasks.ticks[held.owners[held.flat == stream]].sum())

    def held_between_tasks(self) -> int:
        """
        Return the most bytes that the first device holds at the end of a task, the optimizer's update left out: what is
        in the variables of a program's step between its lines. Copies between device and host end within others.
        """
        tasks = self.tasks
        labels = enumerate(tasks.labels)
        at = [self.ends[t] for t, label in labels if label.kind != UPDATE and label.what not in COPIES]
        begins = np.array([self.starts[tasks.uses[b][0]] for b in range(len(tasks.uses))], dtype=np.int64)
        ends = np.array([self.ends[tasks.uses[b][-1]] for b in range(len(tasks.uses))], dtype=np.int64)
        lasting = np.flatnonzero(begins < ends)

        def before(times: Ints, side: Literal["left", "right"]) -> Ints:
            """Return the bytes whose time is before each of `at`, or with `right` not after it."""
            order = lasting[np.argsort(times[lasting], kind="stable")]
            sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(tasks.bytes[order], dtype=np.int64)])
            return sums[np.searchsorted(times[order], at, side=side)]

        return tasks.always[0] + int((before(begins, "left") - before(ends, "right")).max(initial=0))

    def critical_path(self) -> list[int]:
        """
        Return a critical path as task numbers, in order: its last task is the one that ends last, and each other task
        ends when the next one starts.
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
    Return the timeline of a task graph in which every task starts as early as it can: once all tasks that it waits for
    (`TaskGraph.before`) have ended. Those are the tasks that make its inputs and, as streams are first in, first out,
    the previous task on each of its streams.
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
