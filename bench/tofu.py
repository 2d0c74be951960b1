"""
Redo Tofu's Table 1, the time of its search, and its Figure 10, its rivals' plans, on its machine.

    python bench/tofu.py [--json FILE]

Seconds are of one search in a process of its own, with the graph built and nothing else cached; `alone` is without
coarsening. Bytes are predicted from the plans' moves; times are simulated, every move waited for. The paper measured
real iterations; its statements about them (section 7.3) are printed next to ours. Exits with code 1 where a search
takes more than a second.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.cost.plan import cost
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.search.tofu.search import VARIANTS, tofu
from unity_ir.simulate.report import simulated

SEARCHED = {
    "WResNet-152-10": ("wresnet,depth=152,width=10,batch=8", 8.3),
    "RNN-10": ("lstm_stack,layers=10", 66.6),
}
"""Models of Table 1, with the paper's seconds with recursion."""

COMPARED = {
    "RNN-4-8K": "lstm_stack,layers=4,hidden=8192,batch=512",
    "WResNet-152-10": "wresnet,depth=152,width=10,batch=8",
}
"""Models of Figure 10."""

SAYS = {
    "tofu": "fastest",
    "tofu-all-row": "slowest; out of memory for WResNet",
    "tofu-spartan": "3 to 10% less overhead than all-row",
    "tofu-equal-chop": "3 to 10% less overhead than all-row",
    "tofu-no-reduction": "7% slower for RNN; out of memory for WResNet",
}

AIM = 1.0
LIMIT = 30
"""Seconds."""


def one(model: str, what: str) -> float:
    """Return the seconds of a search in this process."""
    graph, machine = from_text(model), load("p2.8xlarge")
    start = time.perf_counter()
    tofu(graph, machine, coarse=what == "tofu")
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Tofu's Table 1 and Figure 10.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    where, machine = f"{processor()}, Python {platform.python_version()}", load("p2.8xlarge")
    console = Console(width=140)
    searched: list[dict[str, object]] = []
    table = Table(title=f"seconds of a search for 8 workers; {where}")
    for heading in ("model", "operators", "tofu", "alone", "paper"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    missed = False
    for name, (model, paper) in SEARCHED.items():
        graph = from_text(model)
        seconds: dict[str, float | None] = {}
        for what in ("tofu", "alone"):
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", model, what],
                    capture_output=True,
                    text=True,
                    timeout=LIMIT,
                    check=True,
                )
                seconds[what] = float(done.stdout)
            except subprocess.TimeoutExpired:
                seconds[what] = None
        operators = sum(n.is_compute for n in graph.nodes())
        missed |= (seconds["tofu"] or LIMIT) > AIM
        searched.append({"model": name, "operators": operators, **seconds, "paper": paper})
        texts = (f"> {LIMIT}" if t is None else f"{t:.2f}" for t in seconds.values())
        table.add_row(name, str(operators), *texts, str(paper))
    console.print(table)
    compared: list[dict[str, object]] = []
    table = Table(title="an iteration on p2.8xlarge")
    for heading in ("model", "algorithm", "GB moved", "seconds", "communication", "peak GB", "the paper says"):
        table.add_column(heading, justify="left" if heading in ("model", "algorithm", "the paper says") else "right")
    for name, model in COMPARED.items():
        graph = from_text(model)
        for variant in VARIANTS:
            plan = tofu(graph, machine, variant)
            priced = cost(plan, machine)
            times = simulated(plan, priced.machine)
            row = {
                "model": name,
                "algorithm": variant,
                "bytes": priced.bytes,
                "seconds": times.waiting,
                "communication": priced.communication_time,
                "peak": times.peak,
            }
            compared.append(row)
            part = f"{priced.communication_time / times.waiting:.0%}"
            over = " (too much)" if times.peak > machine.device.usable else ""
            table.add_row(
                name,
                variant,
                f"{priced.bytes / 1e9:.1f}",
                f"{times.waiting:.2f}",
                part,
                f"{times.peak / 1e9:.1f}{over}",
                SAYS[variant],
            )
    console.print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"machine": where, "searched": searched, "compared": compared}, indent=2) + "\n"
        )
    return int(missed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(one(*sys.argv[2:4]))
    else:
        raise SystemExit(main())
