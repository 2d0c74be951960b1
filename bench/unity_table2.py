"""
Redo Unity's Table 2: seconds of `--search=unity` in full, without splitting the graph, and also without caching.

    python bench/unity_table2.py [MODEL ..] [--nodes 1,2,4,8] [--limit 60] [--budget N] [--json FILE]

On N nodes of Summit, 6 GPUs each, with the paper's batch per GPU. Each search runs in a process of its own and is
stopped after `--limit` processor seconds, "> limit"; times are processor seconds. The paper's are of ResNeXt-50, in
C++. A search prices `budget` candidates per operator, split or not; `time` is that of the plan found, so what a saved
second costs is seen, too. The file is written after every search.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from models import processor
from rich.console import Console
from rich.table import Table

SAMPLES = {
    "resnext50": 64,
    "inception_v3": 64,
    "bert_large": 4,
    "dlrm": 1024,
    "xdl": 1024,
    "candle_uno": 256,
    "mlp": 256,
}
"""Unity's models, and their samples per GPU (section 6.1)."""

SWITCHES = {"all": {}, "no split": {"split": False}, "no cache, no split": {"split": False, "cache": False}}

PAPER = {
    1: {"all": 57, "no split": 241, "no cache, no split": 2221},
    2: {"all": 107, "no split": 675, "no cache, no split": None},
    4: {"all": 180, "no split": None, "no cache, no split": None},
    8: {"all": 355, "no split": None, "no cache, no split": None},
}
"""Seconds of Unity's Table 2, by nodes; None is more than an hour."""


def search(model: str, nodes: int, what: str, budget: int) -> dict[str, object]:
    """Run one search in this process; return what it took and found."""
    from unity_ir import machine
    from unity_ir.models import build
    from unity_ir.pcg.optimizer import Optimizer
    from unity_ir.rules.algebraic import algebraic
    from unity_ir.search.unity.search import Options, unity

    where = machine.load(f"summit:{nodes}")
    graph = build(model, batch=SAMPLES[model] * where.devices)
    rules = algebraic()
    start = time.process_time()
    found = unity(graph, where, rules, Optimizer(), Options(budget=budget, **SWITCHES[what]))
    seconds = time.process_time() - start
    return {"seconds": seconds, "time": found.seconds, "explored": found.explored, "rules": len(found.derivation)}


def measure(model: str, nodes: int, what: str, budget: int, limit: int) -> dict[str, object]:
    """Run one search in a new process; without seconds where it exceeds the limit."""
    row: dict[str, object] = {"model": model, "nodes": nodes, "gpus": 6 * nodes, "what": what}
    command = [sys.executable, __file__, "search", model, str(nodes), what, str(budget), str(limit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if -done.returncode == signal.SIGXCPU:
        return row
    done.check_returncode()
    return {**row, **json.loads(done.stdout)}


def shown(row: dict[str, object], base: float | None, limit: int) -> str:
    """Return a cell: given 3.2 s where the full search took 1.6 s on the fewest GPUs, returns `3.2 s, 2.0x`."""
    seconds = row.get("seconds")
    if not isinstance(seconds, float):
        return f"> {limit} s"
    return f"{seconds:.1f} s" + (f", {seconds / base:.1f}x" if base else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Unity's Table 2 again.")
    parser.add_argument("models", nargs="*", default=["resnext50"])
    parser.add_argument("--nodes", default="1,2,4,8")
    parser.add_argument("--limit", type=int, default=60, help="seconds of a core")
    parser.add_argument("--budget", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = [m for m in options.models if m not in SAMPLES]
    if unknown:
        parser.error(f"no model {unknown[0]}; known are {', '.join(SAMPLES)}")
    rows: list[dict[str, object]] = []
    table = Table(title=f"{processor()}, Python {platform.python_version()}; {options.budget} candidates an operator")
    for heading in ("model", "GPUs", *SWITCHES, "time of the plan", "paper: all", "no split", "no cache, no split"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model in options.models:
        base = None
        for nodes in map(int, options.nodes.split(",")):
            found = [measure(model, nodes, what, options.budget, options.limit) for what in SWITCHES]
            rows += found
            if options.json:
                save(options.json, options.limit, options.budget, rows)
            first = found[0].get("seconds")
            base = base or (first if isinstance(first, float) else None)
            times = ", ".join(f"{row['time'] * 1e3:.2f} ms" if "time" in row else "-" for row in found)
            paper = PAPER.get(nodes, {}) if model == "resnext50" else {}
            then = [f"{s} s" if (s := paper.get(what)) else "> 1 h" if what in paper else "-" for what in SWITCHES]
            table.add_row(model, str(6 * nodes), *(shown(r, base, options.limit) for r in found), times, *then)
    Console(width=180).print(table)
    return 0


def save(file: Path, limit: int, budget: int, rows: list[dict[str, object]]) -> None:
    """Write the results so far."""
    report = {
        "processor": processor(),
        "python": platform.python_version(),
        "limit": limit,
        "budget": budget,
        "rows": rows,
        "paper": PAPER,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["search"]:
        limit = int(sys.argv[6])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        print(json.dumps(search(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))))
    else:
        sys.exit(main())
