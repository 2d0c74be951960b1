"""
Every strategy on every model and machine, scored by one simulator.

    python bench/search.py [--models M ..] [--gpus N ..] [--strategies S ..] [--limit SECONDS] [--jobs N] [--json FILE]

Unity's seven models on Summit with its batches per GPU (section 6.1), and GPT-2, Llama 3 8B and a mixture of experts on
DGX H100. Each search is a process of its own, so that caches are cold and its memory is its own. A cell is the
simulated time of an iteration as it is emitted, communication overlapped, and in brackets that with every move waited
for; beside them the seconds of joint's search, its peak memory, and how far the plan is from the bound. `ratio`
is the best other strategy's time by joint's: what the paper's speed-ups are to the best of what there was. Exits with
code 1 where joint is slower than another.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table

SUMMIT = {
    "resnext50": (64, "1.0 x data parallel"),
    "inception_v3": (64, "1.3 x data parallel"),
    "mlp": (256, "2.0 x data parallel"),
    "xdl": (1024, "1.9 x data parallel"),
    "dlrm": (1024, "3.6 x expert"),
    "candle_uno": (256, "1.6 x expert"),
    "bert_large": (4, "1.0 x Megatron"),
}
"""Samples per GPU, and what the paper's plans are faster than, at 192 GPUs."""

DGX = {"gpt2": 8, "llama3_8b": 1, "moe": 1}
"""Samples per GPU."""

ADAM = ("bert_large", "gpt2", "llama3_8b", "moe")
"""Trained with Adam; the others with SGD."""

STRATEGIES = ("joint", "sequential", "unity", "mcmc", "tofu", "data-parallel", "fsdp", "expert")

SUMMIT_GPUS = (6, 24, 96, 192)
DGX_GPUS = (8, 64, 512)


def cells(models: list[str], gpus: list[int]) -> list[tuple[str, str, int]]:
    """(model with its batch, machine, GPUs)."""
    found: list[tuple[str, str, int]] = []
    for model in models:
        if model in SUMMIT:
            found += [
                (f"{model},batch={SUMMIT[model][0] * n}", f"summit:{n // 6}", n) for n in SUMMIT_GPUS if n in gpus
            ]
        else:
            found += [(f"{model},batch={DGX[model] * n}", f"dgx-h100:{n // 8}", n) for n in DGX_GPUS if n in gpus]
    return found


def one(model: str, where: str, strategy: str) -> dict[str, Any]:
    """One search, in this process."""
    from unity_ir.cost.plan import cost
    from unity_ir.errors import UnityError
    from unity_ir.machine import load
    from unity_ir.models import from_text
    from unity_ir.pcg.graph import Optimizer
    from unity_ir.search import run
    from unity_ir.simulate.report import simulated

    graph, machine = from_text(model), load(where)
    optimizer = Optimizer("adam" if model.partition(",")[0] in ADAM else "sgd")
    start = time.perf_counter()
    try:
        found = run(graph, machine, strategy, optimizer)
    except UnityError as error:
        return {"refused": str(error)}
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan = cost(found.graph, machine, optimizer)
    times = simulated(found.graph, plan, optimizer)
    return {
        "overlapped": times.overlapped,
        "waited for": times.waiting,
        "peak bytes": times.peak,
        "search seconds": seconds,
        "search bytes": memory,
        "gap": found.gap,
        "derivation": [str(step) for step in found.derivation],
    }


def alone(model: str, where: str, strategy: str, limit: float) -> dict[str, Any]:
    """What `one` gives in a new process."""
    command = [sys.executable, __file__, "--one", model, where, strategy]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"refused": f"> {limit:.0f} s"}
    lines = done.stderr.strip().splitlines()
    return json.loads(done.stdout) if done.returncode == 0 else {"refused": lines[-1] if lines else "failed"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Every strategy on every model and machine.")
    parser.add_argument("--models", nargs="*", default=[*SUMMIT, *DGX])
    parser.add_argument("--gpus", nargs="*", type=int, default=sorted({*SUMMIT_GPUS, *DGX_GPUS}))
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a search may take (joint: x 4)")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time; seconds are then of busy cores")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{processor()}, Python {platform.python_version()}"
    table = Table(title=f"simulated ms of an iteration, as emitted (waited for); {machine}, {options.jobs} at a time")
    table.add_column("model")
    table.add_column("GPUs", justify="right")
    for strategy in options.strategies:
        table.add_column(strategy, justify="right")
    for heading in ("ratio", "joint: s", "GB", "gap"):
        table.add_column(heading, justify="right")
    rows: list[dict[str, Any]] = []
    slower: list[str] = []
    wanted = cells(options.models, options.gpus)
    pool = ThreadPoolExecutor(options.jobs)
    limits = {s: options.limit * (4 if s == "joint" else 1) for s in options.strategies}
    runs = {(m, w): {s: pool.submit(alone, m, w, s, limit) for s, limit in limits.items()} for m, w, _ in wanted}
    for model, where, gpus in wanted:
        found = {s: run.result() for s, run in runs[model, where].items()}
        rows.append({"model": model, "machine": where, "gpus": gpus, "found": found})
        times = {s: f["overlapped"] for s, f in found.items() if "overlapped" in f}
        waiting = {s: f["waited for"] for s, f in found.items() if "overlapped" in f}
        others = [t for s, t in times.items() if s != "joint"]
        joint = found.get("joint", {})
        ratio = min(others) / times["joint"] if others and "joint" in times else None
        if ratio is not None and ratio < 1 - 1e-9:
            slower.append(f"{model} on {where}: {min(times, key=times.__getitem__)} is faster")
        gap = joint.get("gap")
        print(f"{model} on {where}: { ({s: f'{t * 1e3:.2f}' for s, t in times.items()}) }", file=sys.stderr, flush=True)
        table.add_row(
            model.partition(",")[0],
            str(gpus),
            *(f"{times[s] * 1e3:.1f} ({waiting[s] * 1e3:.1f})" if s in times else "-" for s in options.strategies),
            "" if ratio is None else f"{ratio:.2f}",
            f"{joint['search seconds']:.1f}" if "overlapped" in joint else "",
            f"{joint['search bytes'] / 1e9:.2f}" if "overlapped" in joint else "",
            "" if gap is None else f"{gap:.2%}",
        )
    console = Console(width=180)
    console.print(table)
    for line in slower:
        console.print(line)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        paper = {model: says for model, (_, says) in SUMMIT.items()}
        options.json.write_text(
            json.dumps({"machine": machine, "jobs": options.jobs, "paper": paper, "rows": rows}, indent=2) + "\n"
        )
    return int(bool(slower))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:5])))
    else:
        raise SystemExit(main())
