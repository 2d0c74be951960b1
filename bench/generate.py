"""
Measure seconds and memory to generate rules, with proofs, next to published figures.

    python bench/generate.py [--sizes 3 4] [--jobs N] [--json FILE]

Each size runs in a process of its own, over the default operators of `unity-rules generate`. Exits with code 1 where an
aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table

AIMS = {3: {"seconds": 60.0}, 4: {"seconds": 600.0, "gigabytes": 4.0}}
"""Aims, by size."""

PUBLISHED = "TASO: 5 to 10 minutes to generate, 2 to verify; Unity: 30 minutes for both"
"""TASO's artifact appendix (SOSP'19), up to 3 operators; Unity, section 4 (OSDI'22)."""


def measure(size: int, jobs: int) -> dict[str, Any]:
    """Generate rules in this process; return what it took."""
    from unity_ir.rules.research.generate.report import summary
    from unity_ir.rules.research.generate.run import generate
    from unity_ir.rules.research.generate.space import Space
    from unity_ir.tools.unity_rules import OPERATORS

    begin = time.perf_counter()
    report = generate(Space(tuple(OPERATORS.split(",")), size=size), jobs=jobs)
    seconds = time.perf_counter() - begin
    # Of this process, and of the largest of those that prove.
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"size": size, "wall": seconds, "gigabytes": peak / 2**20, **summary(report)}


def alone(size: int, jobs: int) -> dict[str, Any]:
    """Return `measure`'s result from a new process."""
    command = [sys.executable, __file__, "measure", str(size), str(jobs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def missed(found: dict[str, Any]) -> list[str]:
    """Return the aims that a run misses, as text."""
    have = {"seconds": found["wall"], "gigabytes": found["gigabytes"]}
    aims = AIMS.get(found["size"], {})
    return [f"size {found['size']}: {have[a]:.1f} {a}, aim {most:.0f}" for a, most in aims.items() if have[a] > most]


ROWS = (
    ("seconds", lambda f: f"{f['wall']:.1f}"),
    ("  enumerate", lambda f: f"{f['seconds']['enumerate']:.1f}"),
    ("  minimise and prove", lambda f: f"{f['seconds']['minimise and prove']:.1f}"),
    ("  join and generalise", lambda f: f"{f['seconds']['join and generalise']:.1f}"),
    ("median proof, ms", lambda f: f"{1000 * f['proofs']['median']:.0f}"),
    ("slowest proof, ms", lambda f: f"{1000 * f['proofs']['slowest']:.0f}"),
    ("gigabytes", lambda f: f"{f['gigabytes']:.2f}"),
    ("terms", lambda f: f"{f['counts']['terms']:,}"),
    ("candidates", lambda f: f"{f['counts']['candidates']:,}"),
    ("  canonical", lambda f: f"{f['counts']['canonical']:,}"),
    ("  without common subgraphs", lambda f: f"{f['counts']['general']:,}"),
    ("proved", lambda f: f"{f['counts']['proved']:,}"),
    ("undecided, refuted", lambda f: f"{f['counts']['undecided']:,}, {f['counts']['refuted']:,}"),
    ("rules", lambda f: f"{f['rules']:,}"),
    ("  with parallel operators", lambda f: f"{f['parallel']:,}"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times to generate rules.")
    parser.add_argument("--sizes", nargs="*", type=int, default=list(AIMS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [alone(size, options.jobs) for size in options.sizes]
    machine = f"{processor()}, Python {platform.python_version()}, {options.jobs} jobs"
    table = Table(title=machine, caption=PUBLISHED)
    table.add_column("")
    for f in found:
        table.add_column(f"size {f['size']}", justify="right")
    for name, text in ROWS:
        table.add_row(name, *(text(f) for f in found))
    console = Console()
    console.print(table)
    late = [line for f in found for line in missed(f)]
    for line in late:
        console.print(line)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "runs": found, "missed": late}, indent=2) + "\n")
    return int(bool(late))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        sys.exit(main())
