"""
Measure how much communication emitted steps leave exposed, against the least that each plan allows.

    python bench/overlap.py [--cells MODEL STRATEGY MACHINE ..] [--plain] [--json FILE]

Prints, for each plan in mixed precision with AdamW, the simulated milliseconds of its step, those of its kernels, what
communication adds to them (exposed), and the least that it would add if collectives started as soon as they can, in
any order (`least`), and if kernels had any order, too (`reordered`). Both are lower bounds: tasks keep dependences
(updates wait for all gradients, since a step with a loss that is not finite is skipped) and their streams; for each
stream, the bound is the preemptive one-machine schedule with release times and tails (Jackson 1955; Carlier 1982,
section 3), of which the largest counts. `at once` is the number of collectives that are waited for in the line after
the one that starts them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.machine.model import Machine
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Leaf, Register, UpdateWeight, communicates
from unity_ir.plan.plan import Plan, plan_graph
from unity_ir.plan.scheduled import Bucket, Start, Wait
from unity_ir.search.run import run
from unity_ir.simulate.full import simulate
from unity_ir.simulate.replay import replay
from unity_ir.simulate.tasks import TaskGraph

STRATEGIES = ("data-parallel", "fsdp", "joint")
CELLS = [
    *(
        (model, strategy, "dgx-h100:1")
        for model in ("bert_large,layers=4,batch=64", "gpt2,batch=64")
        for strategy in STRATEGIES
    ),
    *(("llama3_8b,batch=8,sequence=4096", strategy, "dgx-h100:1") for strategy in STRATEGIES),
    ("llama3_8b,batch=8", "joint", "dgx-h100:1"),
    ("llama3_8b,batch=64", "joint", "dgx-h100:8"),
]


@dataclass(frozen=True)
class Cell:
    """Milliseconds of a plan's step, and counts of its collectives."""

    model: str
    strategy: str
    machine: str
    step: float
    kernels: float
    exposed: float
    least: float
    reordered: float
    collectives: int
    at_once: int
    search_seconds: float


def dependences(plan: Plan) -> list[list[int]]:
    """
    Return, for each task of `simulate.replay` on a machine whose devices all do the same, the tasks whose results it
    reads: a wait is a task of no length, and what a collective copies is a task before its start or after its wait.
    """
    program, schedule = plan.program, plan.schedule
    source: dict[Register, int] = {}
    received: dict[Register, bool] = {}
    found: list[list[int]] = []
    for line in schedule.lines:
        if isinstance(line.action, Leaf):
            continue
        reads, makes = schedule.reads_and_makes(line.action)
        copied = False
        if isinstance(line.action, Wait):
            reads, makes = line.action.registers, line.action.registers
            copied = received[line.action.registers[0]]
        found.append(sorted({source[r] for r in map(schedule.held, reads) if r in source}))
        if isinstance(line.action, Start):
            before, after = plan.copies(line.action)
            received[makes[0]] = bool(after.kernels)
            copied = bool(before.kernels)
        if copied:
            found.append([len(found) - 1])
        source.update(dict.fromkeys(makes, len(found) - 1))
    updates = [i for i in program.body if isinstance(i, UpdateWeight)]
    gradients = sorted({source[schedule.held(u.grad)] for u in updates})
    # One after the other: all are on one stream, after the same tasks.
    return [*found, *([*gradients, len(found) + i - 1][: len(gradients) + (i > 0)] for i in range(len(updates)))]


def least(tasks: TaskGraph, before: Sequence[Sequence[int]]) -> float:
    """Return a lower bound in seconds on any schedule of tasks with these dependences on their streams."""
    ticks = tasks.ticks.tolist()
    assert len(before) == len(ticks), "the replay has other tasks than the plan has lines"
    release, tail = [0] * len(ticks), [0] * len(ticks)
    for task, waits in enumerate(before):
        release[task] = max((release[w] + ticks[w] for w in waits), default=0)
    for task in reversed(range(len(ticks))):
        for wait in before[task]:
            tail[wait] = max(tail[wait], tail[task] + ticks[task])
    streams: dict[int, list[int]] = {}
    for task in range(len(ticks)):
        for stream in tasks.held[task]:
            streams.setdefault(stream, []).append(task)
    bound = max((release[t] + ticks[t] + tail[t] for t in range(len(ticks))), default=0)
    for own in streams.values():
        bound = max(bound, _preemptive([(release[t], ticks[t], tail[t]) for t in own]))
    return bound / 1e12


def _preemptive(jobs: Sequence[tuple[int, int, int]]) -> int:
    """Return the length of the best preemptive schedule of (release time, length, tail) on one machine (Jackson)."""
    waiting = [job for job in jobs if job[1]]
    heapify(waiting)
    ready: list[tuple[int, int]] = []
    now = end = 0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, length, tail = heappop(waiting)
            heappush(ready, (-tail, length))
        tail, length = heappop(ready)
        done = length if not waiting else min(length, waiting[0][0] - now)
        now += done
        if done < length:
            heappush(ready, (tail, length - done))
        else:
            end = max(end, now - tail)
    return end


def measured(plan: Plan, machine: Machine) -> tuple[float, float, float, float]:
    """
    Return the seconds of a plan's step, of its kernels alone, and the least of the step with kernels in the plan's
    order, and in any.
    """
    tasks = replay(plan, machine)
    assert tasks.streams.classes == 1, "devices do different work"
    compute = tasks.streams.compute(0)
    before = dependences(plan)
    on_compute = [task for task in range(len(tasks)) if compute in tasks.held[task]]
    ordered = [*before]
    # Waits have no length, and casts of stored weights are part of their gathers.
    in_order = [t for t in on_compute if tasks.ticks[t] and (before[t] or tasks.labels[t].what != "cast")]
    for task, following in pairwise(in_order):
        ordered[following] = [*before[following], task]
    kernels = sum(int(tasks.ticks[task]) for task in on_compute)
    return simulate(tasks).seconds, kernels / 1e12, least(tasks, ordered), least(tasks, before)


def collectives(plan: Plan) -> tuple[int, int]:
    """Return the number of collectives of a step, and of those waited for in the line after their start."""
    actions = [line.action for line in plan.schedule.lines]
    total = at_once = 0
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        started = [m.result for m in action.moves] if isinstance(action, Bucket) else []
        if not isinstance(action, Bucket | Wait | Leaf) and hasattr(action, "kind") and communicates(action):
            started = [action.result]
        total += bool(started)
        at_once += isinstance(following, Wait) and not set(following.registers).isdisjoint(started)
    return total, at_once


def cell(model: str, strategy: str, where: str, mixed: bool) -> Cell:
    """Search for a model's plan and measure it."""
    machine, optimizer = load(where), Optimizer("adamw")
    graph = from_text(model)
    graph = mixed_precision(graph, "bf16") if mixed else graph
    start = time.process_time()
    found = run(graph, machine, strategy, optimizer).graph
    seconds = time.process_time() - start
    plan = plan_graph(found, machine, optimizer)
    step, kernels, *bounds = (1e3 * s for s in measured(plan, machine))
    exposed = [each - kernels for each in (step, *bounds)]
    return Cell(model, strategy, where, step, kernels, *exposed, *collectives(plan), seconds)


def main() -> None:
    """Print the table of all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", metavar="WORD", help="model, strategy and machine of each cell")
    parser.add_argument("--plain", action="store_true", help="f32 rather than bf16 mixed precision")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    words = options.cells
    cells = CELLS if words is None else list(zip(words[::3], words[1::3], words[2::3], strict=True))
    console = Console()
    table = Table(title=f"exposed communication, ms; searched on {processor()}, Python {platform.python_version()}")
    for heading in (
        "model",
        "strategy",
        "machine",
        "step",
        "kernels",
        "exposed",
        "least",
        "ratio",
        "reordered",
        "calls",
        "at once",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "strategy", "machine") else "right")
    rows: list[Cell] = []
    for model, strategy, where in cells:
        try:
            row = cell(model, strategy, where, not options.plain)
        except UnityError as error:
            console.print(f"{model} {strategy} {where}: {error}", soft_wrap=True)
            continue
        rows.append(row)
        ratio = f"{row.exposed / row.least:.2f}" if row.least > 0.005 * row.kernels else "-"
        numbers = [f"{n:.2f}" for n in (row.step, row.kernels, row.exposed, row.least)]
        last = [f"{row.reordered:.2f}", str(row.collectives), str(row.at_once)]
        table.add_row(row.model, row.strategy, row.machine, *numbers, ratio, *last)
    console.print(table)
    if options.json is not None:
        found = {"processor": processor(), "mixed": not options.plain, "cells": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
