"""
Simulate every pipeline schedule on equal stages, and time the simulation of large ones.

    python bench/pipelines.py [--json FILE]

Prints the table of docs/pipelines.md: bubbles and idle time in units of a rank's forward of one micro-batch, for 8
ranks and 32 micro-batches, and the micro-batches that the first and the last rank hold. Exits with code 1 where making
or simulating a schedule of 64 ranks and 512 micro-batches takes more than a second of processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.orders import double_buffered
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.simulate.pipeline import PipelineTimes, simulate_pipeline, split_seconds

RANKS, MICRO_BATCHES = 8, 32
CHUNKS = 2
EQUAL = (Fraction(1), Fraction(1), Fraction(1))
UNEQUAL = (Fraction(1), Fraction("1.2"), Fraction("0.8"))
HOP = Fraction("0.1")
LARGE = {"interleaved": 4, "looped-bfs": 4, "zb-v": 2, "zb-h2": 1}
"""Orders timed, with stages per rank."""

AIM = 1.0


@dataclass(frozen=True)
class Row:
    """A schedule's bubble; its bubble where F, I, W are 1, 1.2, 0.8, and where a send takes 0.1; idle time; live."""

    order: str
    chunks: int
    bubble: float
    unequal: float
    hops: float
    idle_inside: float
    first: float
    last: float


def times(schedule: PipelineSchedule, parts: tuple[Fraction, Fraction, Fraction], hop: Fraction) -> PipelineTimes:
    stages = schedule.stages
    chunks = Fraction(stages, len(schedule.ranks))
    forward, half, other = ([part / chunks] * stages for part in parts)
    return simulate_pipeline(schedule, split_seconds(forward, half, other, [hop] * (stages - 1)))


def row(name: str) -> Row:
    chunks = ORDERS[name].chunks or CHUNKS
    schedule = pipeline_schedule(name, RANKS, MICRO_BATCHES, chunks)
    live = peak_live(schedule)
    found: list[Fraction | float] = []
    for parts, hop in ((EQUAL, 0 * HOP), (UNEQUAL, 0 * HOP), (EQUAL, HOP)):
        bubble = times(schedule, parts, hop).bubble
        if schedule.gradient_delay:
            # What one step more takes beyond its work.
            spans = [times(double_buffered(RANKS, MICRO_BATCHES, steps), parts, hop).makespan for steps in (2, 3)]
            bubble = spans[1] - spans[0] - MICRO_BATCHES * sum(parts)
        found.append(bubble)
    idle = 0.0 if schedule.gradient_delay else times(schedule, EQUAL, 0 * HOP).idle_inside
    return Row(name, chunks, *map(float, found), float(idle), live[0], live[-1])


def rows() -> list[Row]:
    return [row(name) for name in ORDERS]


def table(found: list[Row]) -> str:
    """Return the rows as the table of docs/pipelines.md."""
    headings = (
        "order",
        "stages per rank",
        "bubble",
        "F, I, W = 1, 1.2, 0.8",
        "0.1 per send",
        "idle inside",
        "live",
        "last",
    )
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for r in found:
        figures = (r.bubble, r.unequal, r.hops, r.idle_inside, r.first, r.last)
        lines.append(f"| `{r.order}` | {r.chunks} | " + " | ".join(f"{f:.4g}" for f in figures) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    from models import processor  # here, since tests import this file and have a `models` of their own

    parser = argparse.ArgumentParser(description="Bubbles and live micro-batches of pipeline schedules.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    where = f"{processor()}, Python {platform.python_version()}"
    found = rows()
    print(table(found))
    timed: list[dict[str, object]] = []
    for name, chunks in LARGE.items():
        start = time.process_time()
        schedule = pipeline_schedule(name, 64, 512, chunks)
        made = time.process_time()
        equal = [1.0] * schedule.stages
        simulate_pipeline(schedule, split_seconds(equal, equal, equal, [0.1] * (schedule.stages - 1)))
        seconds = {"make": made - start, "simulate": time.process_time() - made}
        actions = sum(map(len, schedule.ranks))
        timed.append({"order": name, "chunks": chunks, "actions": actions, **seconds})
        print(f"{name}, {chunks} per rank, {actions:,} actions:", *(f"{k} {t:.2f} s" for k, t in seconds.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": where, "rows": [asdict(r) for r in found], "timed": timed}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(any(max(t["make"], t["simulate"]) > AIM for t in timed))


if __name__ == "__main__":
    raise SystemExit(main())
