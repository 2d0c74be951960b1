"""
Search pipelines for training steps of large models, with a lower bound on all that were tried.

    python bench/pipeline_search.py [--rows NUMBER ..] [--bound] [--json FILE]

bf16 mixed precision, AdamW in f32, 8,192 tokens a sample. Prints, for each model and machine, the stages, micro-batches
and schedule chosen, the simulated seconds of a step (every move inside of a stage waited for), its bubble, tokens per
second and GPU, GB on the fullest GPU, pairs of stages and micro-batches tried, and wall and processor seconds of the
search; with `--bound` the bound, the gap, and the wall seconds of bounding.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.pipeline.choice import best_pipeline, bound
from unity_ir.search.pipeline.equal import PipelineSearch

TOKENS = 8192
"""Tokens of a sample."""

ROWS = (
    ("llama3_70b", 256, "dgx-h100:8"),
    ("llama3_405b", 256, "dgx-h100:64"),
    ("llama3_405b", 2048, "dgx-h100:512"),
)
"""Model, samples, machine."""


@dataclass(frozen=True)
class Row:
    """A row of the table; seconds and GB."""

    model: str
    machine: str
    stages: int
    micro_batches: int
    schedule: str
    step: float
    bubble: float
    tokens: float
    """Per second and GPU."""
    memory: float
    tried: int
    wall: float
    processor: float
    bound: float | None
    family: str
    bounding: float
    """Wall seconds of bounding."""


def measure(model: str, batch: int, place: str, is_bounded: bool) -> Row:
    start, used = time.perf_counter(), time.process_time()
    graph, machine = mixed_precision(from_text(f"{model},batch={batch}"), "bf16"), load(place)
    choice = best_pipeline(PipelineSearch(graph, machine, Optimizer("adamw")))
    assert choice is not None
    plan, end = choice.plan, time.perf_counter()
    used = time.process_time() - used
    least, family = bound(choice, enough=1.0) if is_bounded else (None, "")
    return Row(
        f"{model},batch={batch}",
        place,
        plan.stages,
        plan.micro_batches,
        plan.schedule,
        plan.makespan,
        plan.outcome.times.bubble,
        batch * TOKENS / plan.makespan / machine.devices,
        max(plan.peaks) / 1e9,
        len(choice.tried),
        end - start,
        used,
        least,
        family,
        time.perf_counter() - end,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", choices=range(len(ROWS)), default=range(len(ROWS)))
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = "model", "machine", "p", "m", "schedule", "step, s", "bubble, s", "tokens/s/GPU", "GB", "tried", "wall, s"
    table = Table(*names, "CPU, s", "bound, s", "gap", "bounding, s")
    found: list[Row] = []
    for number in args.rows:
        row = measure(*ROWS[number], args.bound)
        found.append(row)
        figures = f"{row.step:.3f}", f"{row.bubble:.3f}", f"{row.tokens:,.0f}", f"{row.memory:.1f}", str(row.tried)
        search = f"{row.wall:.0f}", f"{row.processor:.0f}"
        least = ("", "", "")
        if row.bound is not None:
            least = f"{row.bound:.3f}", f"{row.step / row.bound - 1:.1%}", f"{row.bounding:.0f}"
        place = row.model, row.machine, str(row.stages), str(row.micro_batches), row.schedule
        table.add_row(*place, *figures, *search, *least)
    Console(width=180).print(table)
    for family in dict.fromkeys(row.family for row in found if row.family):
        print(f"bound: {family}")
    if args.json is not None:
        on = {"processor": processor(), "python": platform.python_version()}
        args.json.write_text(json.dumps({"machine": on, "rows": [asdict(row) for row in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
