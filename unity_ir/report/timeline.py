"""Make the data of the pictures over time: what each class of devices and its links do, and the bytes that it holds."""

from __future__ import annotations

import numpy as np

from unity_ir.report.packed import Json, Table, differences, rounded
from unity_ir.simulate.full import Timeline
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.tasks import KINDS
from unity_ir.simulate.timeline import COLOURS, MAX_CLASSES
from unity_ir.simulate.trace import name


def timeline_data(timeline: Timeline, note: str = "") -> dict[str, Json]:
    """
    Return the data, for JSON, from which a report draws a simulated iteration and its memory, in nanoseconds and bytes.

    Each lane is one stream of a device class: its kernels (compute), or its port to a level of links. For each of its
    tasks a lane has the time since the one before ended, its length, and the number of its label; a label is [kind,
    number of a text, number of the result's text]. Device classes beyond the first `MAX_CLASSES` are left out; the
    data's `note`, which begins with the argument, says how many.
    """
    tasks = timeline.tasks
    streams = tasks.streams
    begins, ends = rounded(timeline.starts), rounded(timeline.ends)
    texts = Table[str]()
    labels = Table[tuple[int, int, int]]()
    held = tasks.held
    classes: list[Json] = []
    shown = min(streams.classes, MAX_CLASSES)
    alike = streams.machine.devices // streams.classes
    for k in range(shown):
        lanes: list[Json] = []
        for stream in range(k * streams.width, (k + 1) * streams.width):
            here = held.owners[held.flat == stream]
            here = here[tasks.ticks[here] > 0]
            here = here[np.argsort(timeline.starts[here], kind="stable")]
            numbers: list[int] = []
            order: list[int] = here.tolist()
            for t in order:
                label = tasks.labels[t]
                numbers.append(labels[label.kind, texts[name(label)], texts[str(label.result)]])
            begin, end = begins[here], ends[here]
            since: list[int] = (begin - np.concatenate([[0], end[:-1]])).tolist() if len(here) else []
            lane = {"name": streams.name(stream), "link": stream % streams.width > 0, "since": since}
            lanes.append({**lane, "length": (end - begin).tolist(), "label": numbers})
        curve = held_over_time(timeline, k)
        classes.append(
            {
                "title": f"{alike} devices alike" if alike > 1 else f"device {k}",
                "lanes": lanes,
                "memory": {"at": differences(rounded(curve.ticks)), "bytes": differences(curve.bytes)},
            }
        )
    more = streams.classes - shown
    left_out = f"{more} more classes of devices are not shown" if more else ""
    return {
        "length": int(ends.max(initial=0)),
        "kinds": KINDS,
        "colours": COLOURS,
        "texts": texts.entries,
        "labels": labels.entries,
        "classes": classes,
        "note": "; ".join(filter(None, (note, left_out))),
    }
