"""
Write a simulated iteration in the trace event format (JSON), for Perfetto and Chrome's `about:tracing`.

Every device is a process, each of its streams a thread, and the memory it holds a counter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from unity_ir.simulate.full import Timeline
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.streams import TICKS
from unity_ir.simulate.tasks import KINDS, Label

COLOURS = (
    "thread_state_running",
    "thread_state_runnable",
    "rail_response",
    "thread_state_iowait",
    "rail_animation",
    "rail_idle",
)
"""The viewer's colour name of each of `KINDS`."""

MAX_DEVICES = 64
"""Maximum number of devices shown one by one; of larger machines, one device of each class is shown."""


def trace(timeline: Timeline, title: str) -> str:
    """Return a simulated iteration as JSON text in Chrome's trace event format; its times are microseconds."""
    events = list(_events(timeline))
    text = ",\n".join(json.dumps(e, separators=(",", ":")) for e in events)
    return f'{{"displayTimeUnit":"ms","otherData":{{"title":{json.dumps(title)}}},"traceEvents":[\n{text}\n]}}\n'


def rows(timeline: Timeline) -> list[tuple[str, int]]:
    """
    Return the rows of a trace, one per device, as (name to show, number of its device class). A machine of more than
    `MAX_DEVICES` devices has one row per class instead, whose devices all do the same.
    """
    streams = timeline.tasks.streams
    devices = streams.machine.devices
    if devices <= MAX_DEVICES:
        return [(f"device {device}", streams.class_of(device)) for device in range(devices)]
    alike = devices // streams.classes
    return [
        (f"device {next(d for d in range(devices) if streams.class_of(d) == k)} and {alike - 1} more like it", k)
        for k in range(streams.classes)
    ]


def name(label: Label) -> str:
    """
    Return the name that traces show for a task: the operator, or the move and the value it moves, such as `all_reduce
    of conv1.weight`.
    """
    if not label.of:
        return label.what
    return f"{label.what} of {label.of if label.of.isprintable() else ascii(label.of)}"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    tasks = timeline.tasks
    streams = tasks.streams
    held: list[list[int]] = [[] for _ in range(streams.count)]
    for t in range(len(tasks)):
        # A task that takes no time is not to be seen.
        for s in tasks.held[t] if tasks.ticks[t] else ():
            held[s].append(t)
    starts, ticks = timeline.starts.tolist(), tasks.ticks.tolist()
    curves = {k: held_over_time(timeline, k) for k in range(streams.classes)}
    for process, (row, k) in enumerate(rows(timeline)):
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": row}}
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
        for thread in range(streams.width):
            stream = k * streams.width + thread
            shown = streams.name(stream) if thread == 0 else f"{streams.name(stream)} link"
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": shown}}
            for t in held[stream]:
                label = tasks.labels[t]
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "ts": _microseconds(starts[t]),
                    "dur": _microseconds(ticks[t]),
                    "name": name(label),
                    "cat": KINDS[label.kind],
                    "cname": COLOURS[label.kind],
                    "args": {"result": str(label.result)},
                }
        curve = curves[k]
        for at, size in zip(curve.ticks.tolist(), curve.bytes.tolist(), strict=True):
            yield {"ph": "C", "pid": process, "name": "memory", "ts": _microseconds(at), "args": {"bytes": size}}


def _microseconds(ticks: int) -> float:
    return ticks * 10**6 / TICKS
