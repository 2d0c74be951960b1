"""Compute the bytes that a device holds over the time of an iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unity_ir.simulate.full import Timeline
from unity_ir.simulate.tasks import Ints


@dataclass(frozen=True)
class Curve:
    """The bytes that a device holds over time: `bytes[i]` from tick `ticks[i]` on. The first tick is 0."""

    ticks: Ints
    bytes: Ints

    @property
    def peak(self) -> int:
        """The most bytes held at once."""
        return int(self.bytes.max())


def held_over_time(timeline: Timeline, of: int = 0) -> Curve:
    """
    Return the bytes that one device of class number `of` holds over time in a simulated iteration; all devices of a
    class hold the same.

    Weights, optimizer state and inputs are held throughout. Results of operators and reshards, and gradients, are held
    from the start of the task that makes them to the end of the last task that reads them.
    """
    tasks = timeline.tasks
    width = tasks.streams.width
    held = tasks.held
    here = np.zeros(len(tasks), dtype=bool)
    here[held.owners[held.flat // width == of]] = True
    uses = tasks.uses
    using = here[uses.flat]
    # Tasks of other classes neither begin nor end a buffer.
    begins = np.where(using, timeline.starts[uses.flat], np.iinfo(np.int64).max)
    ends = np.where(using, timeline.ends[uses.flat], -1)
    if not len(uses):
        return Curve(np.zeros(1, dtype=np.int64), np.array([tasks.always[of]], dtype=np.int64))
    begin, end = np.minimum.reduceat(begins, uses.at[:-1]), np.maximum.reduceat(ends, uses.at[:-1])
    kept = end >= 0
    size = tasks.bytes[kept]
    at = np.concatenate([[0], begin[kept], end[kept]])
    change = np.concatenate([[tasks.always[of]], size, -size])
    # What ends makes room for what begins just then.
    order = np.lexsort((change, at))
    at, total = at[order], np.cumsum(change[order])
    last = np.append(at[1:] != at[:-1], True)
    return Curve(at[last], total[last])
