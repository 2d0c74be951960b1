"""
Sweep a grid of machines for Llama 3 8B or 405B; print the plans found, and the seconds of the sweep.

    python bench/sweep.py [--study 8b|405b] [--every N] [--jobs 2] [--store DIR] [--json FILE] [--plot FILE]

Both are in bf16 mixed precision with AdamW, 8,192 tokens a sample; what is recomputed is chosen. `8b`: 252 points of
512 samples on 8 to 512 H100 with other NVLink, network and memory (222 that differ, as one node has no network).
`405b`: 32 points of a slice of it: 16 of its 126 layers on 64 of 512 H100, and 64 of 512 samples, so that a GPU has
about as many weights and samples as in the whole, of which each plan takes ten times as long to make. `--every N` takes
each Nth point only, `--found` those that the store has already. The JSON has every point with its gap, and what it took
of a processor.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

from models import processor
from rich.console import Console

from unity_ir.sweep.grid import Grid
from unity_ir.sweep.knobs import read_knob
from unity_ir.sweep.picture import check_picture, draw
from unity_ir.sweep.report import json_text, table_of
from unity_ir.sweep.run import How, sweep
from unity_ir.sweep.store import Store

STUDIES = {
    "8b": (
        Grid(
            ("llama3_8b,batch=512",),
            ("dgx-h100",),
            tuple(
                map(
                    read_knob,
                    (
                        "gpus=8..512*2",
                        "memory=85.52G,150.75G",
                        "bandwidth.gpus=160G..640G*2",
                        "bandwidth.nodes=12.5G..400G*2",
                    ),
                )
            ),
            "bf16",
        ),
        How("bf16", "adamw"),
    ),
    "405b": (
        Grid(
            ("llama3_405b,layers=16,batch=64",),
            ("dgx-h100:8",),
            tuple(
                map(
                    read_knob,
                    ("memory=85.52G,150.75G", "bandwidth.nodes=12.5G..100G*2", "bandwidth.gpus=80G..640G*2"),
                )
            ),
            "bf16",
        ),
        How("bf16", "adamw"),
    ),
}
"""Each study: its grid, and how its points are searched. Memory is that of H100 and H200."""


def main() -> None:
    """Sweep, print the table and what it took, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=tuple(STUDIES), default="8b")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument("--found", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    grid, how = STUDIES[args.study]
    if args.plot is not None:
        check_picture(args.plot, [knob.name for knob in grid.knobs][-3:], None, "mfu")
    store = Store(args.store, asdict(how))
    store.prepare()
    start = time.perf_counter()
    points = grid.points()[:: args.every]
    if args.found:
        points = tuple(point for point in points if store.read(point) is not None)
    answers = sweep(points, how, store, args.jobs)
    wall = time.perf_counter() - start
    Console(width=180).print(table_of(answers))
    gaps = sorted(answer.gap for answer in answers if answer.gap is not None)
    took = {(a.mesh, a.figures, a.usable, a.samples): a.processor for a in answers}
    distinct, used = len(took), sum(took.values())
    print(
        f"{len(points)} points, {distinct} that differ, {len(gaps)} with a plan: {wall:.0f} s, {used:.0f} of processors"
    )
    print(f"gap: least {gaps[0]:.1%}, median {median(gaps):.1%}, most {gaps[-1]:.1%}")
    if args.json is not None:
        about = {
            "study": args.study,
            "processor": processor(),
            "python": platform.python_version(),
            "wall": wall,
            "processor_seconds": used,
            "jobs": args.jobs,
            "distinct": distinct,
            **asdict(how),
        }
        args.json.write_text(json_text(answers, about), encoding="utf-8")
    if args.plot is not None:
        draw(answers, args.plot, None, "mfu")


if __name__ == "__main__":
    main()
