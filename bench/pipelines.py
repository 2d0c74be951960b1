"""
Simulate every pipeline schedule on equal stages; time the simulation of large ones, and the choice of stages.

    python bench/pipelines.py [--json FILE]

Prints the table of docs/pipelines.md: bubbles and idle time in units of a rank's forward of one micro-batch, for 8
ranks and 32 micro-batches, and the micro-batches that the first and the last rank hold. Then the processor time of
choosing the stages of layers of unequal size, with a choice of recompute, on devices that are short of memory.

Exits with code 1 where making or simulating a schedule of 64 ranks and 512 micro-batches takes more than a second, or
where choosing stages takes longer than is aimed at.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from unity_ir.plan.pipeline.catalogue import ORDERS, pipeline_schedule
from unity_ir.plan.pipeline.live import peak_live
from unity_ir.plan.pipeline.orders import double_buffered
from unity_ir.plan.pipeline.schedule import PipelineSchedule
from unity_ir.search.pipeline.problem import StageProblem
from unity_ir.search.pipeline.stages import choose_stages, least_bound
from unity_ir.search.pipeline.table import StageOption, tabulate
from unity_ir.simulate.pipeline import PipelineTimes, simulate_pipeline, split_seconds

RANKS, MICRO_BATCHES = 8, 32
CHUNKS = 2
EQUAL = (Fraction(1), Fraction(1), Fraction(1))
UNEQUAL = (Fraction(1), Fraction("1.2"), Fraction("0.8"))
HOP = Fraction("0.1")
LARGE = {"interleaved": 4, "looped-bfs": 4, "zb-v": 2, "zb-h2": 1}
"""Orders timed, with stages per rank."""

AIM = 1.0

CHOSEN = (
    (32, 8, 16, 30.0, None, 0.1),
    (80, 64, 64, 8.0, 16, 10.0),
    (80, 64, 17, 8.0, 16, 10.0),
    (96, 64, 64, 8.0, 16, 20.0),
)
"""Layers, devices, micro-batches, memory, most stages, and the seconds aimed at."""


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


def unequal_layers(layers: int) -> Callable[[int, int, int], list[StageOption]]:
    """Return options of layers of 1 to 1.2 seconds, the first and last heavier; parts lose 3% per device more."""
    random = Random(1)
    seconds = [1 + 0.2 * random.random() for _ in range(layers)]
    seconds[0] += 0.5
    seconds[-1] += 1.5
    before = [0.0, *accumulate(seconds)]

    def options(first: int, last: int, devices: int) -> list[StageOption]:
        work = (before[last] - before[first]) / devices
        slower = 1 + 0.03 * (devices - 1)
        forward = work * slower / 3
        return [
            StageOption(forward, 2 * forward, 0.1 * work, 4 * work, live=0.5 * work),
            StageOption(forward, 3 * forward, 0.1 * work, 4 * work, live=0.1 * work),
        ]

    return options


def choose(layers: int, devices: int, m: int, memory: float, most: int | None) -> dict[str, float]:
    """Return the seconds of tabulating, choosing and bounding, passes, stages, and the bounds by the formula's time."""
    start = time.process_time()
    table = tabulate(layers, range(1, devices + 1), unequal_layers(layers))
    made = time.process_time()
    problem = StageProblem(table, devices, m, memory, most_stages=most)
    choice = choose_stages(problem)
    chosen = time.process_time()
    bounds = {orders: least_bound(problem, orders) / choice.formula for orders in ("1f1b", "whole", "split")}
    seconds = {"tabulate": made - start, "choose": chosen - made, "bound": time.process_time() - chosen}
    return {**seconds, "passes": choice.passes, "stages": len(choice.stages), **bounds}


def main() -> int:
    from models import processor  # here, since tests import this file and have a `models` of their own

    parser = argparse.ArgumentParser(description="Bubbles and live micro-batches of pipeline schedules.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    where = f"{processor()}, Python {platform.python_version()}"
    found = rows()
    print(table(found))
    timed: list[dict[str, Any]] = []
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
    missed = any(max(t["make"], t["simulate"]) > AIM for t in timed)
    chosen: list[dict[str, object]] = []
    for *instance, aim in CHOSEN:
        layers, devices, m, memory, most = instance
        figures = choose(layers, devices, m, memory, most)
        missed |= figures["choose"] > aim
        chosen.append({"layers": layers, "devices": devices, "micro_batches": m, **figures})
        print(f"{layers} layers, {devices} devices, {m} micro-batches:", *(f"{k} {x:.4g}" for k, x in figures.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": where, "rows": [asdict(r) for r in found], "timed": timed, "chosen": chosen}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
