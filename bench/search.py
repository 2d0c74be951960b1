"""
Every strategy on every model and machine, scored by one simulator.

    python bench/search.py [--models M ..] [--gpus N ..] [--strategies S ..] [--limit SECONDS] [--jobs N] [--json FILE]
        [--resume]

Unity's seven models on Summit with its batches per GPU (section 6.1); GPT-2, Llama 3 8B and a mixture of experts on
DGX H100; these and BERT there in mixed precision with AdamW, as they are trained. Each search is a process of its
own, so that caches are cold and its memory is its own. A cell is the simulated time of an iteration as it is emitted,
communication overlapped, and in brackets that with every move waited for; beside them the seconds of joint's search,
its and its second process's seconds of a core (from the start) and peak memory, and how far the plan is from the
bound. `ratio` is the best other strategy's time by joint's: what the paper's speed-ups are to the best of what there
was. Exits with code 1 where joint is slower than another. The file is written after every search; with `--resume`
what is in it is not searched again.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
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

IN_BF16 = " in bf16"
MIXED = {"bert_large": 32, **DGX}
"""Samples per GPU in bf16, with weights and their optimizer in f32; `--models "gpt2 in bf16"` selects one."""

ADAM = ("bert_large", "gpt2", "llama3_8b", "moe")
"""Trained with Adam; the others with SGD."""

STRATEGIES = ("joint", "sequential", "unity", "mcmc", "tofu", "data-parallel", "fsdp", "expert")

SUMMIT_GPUS = (6, 24, 96, 192)
DGX_GPUS = (8, 64, 512)


def cells(models: list[str], gpus: list[int]) -> list[tuple[str, str, int]]:
    """(model with its batch, machine, GPUs)."""
    found: list[tuple[str, str, int]] = []
    for model in models:
        if model.endswith(IN_BF16):
            name = model.removesuffix(IN_BF16)
            found += [
                (f"{name},batch={MIXED[name] * n}{IN_BF16}", f"dgx-h100:{n // 8}", n) for n in DGX_GPUS if n in gpus
            ]
        elif model in SUMMIT:
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
    from unity_ir.pcg.mixed_precision import mixed_precision
    from unity_ir.pcg.optimizer import Optimizer
    from unity_ir.search import run
    from unity_ir.simulate.report import simulated

    graph, machine = from_text(model.removesuffix(IN_BF16)), load(where)
    optimizer = Optimizer("adam" if model.partition(",")[0] in ADAM else "sgd")
    if model.endswith(IN_BF16):
        graph, optimizer = mixed_precision(graph, "bf16"), Optimizer("adamw")
    start = time.perf_counter()
    try:
        budgets = {"mcmc": {"budget": PROPOSALS}, "unity": {"budget": CANDIDATES}}
        found = run(graph, machine, strategy, optimizer, budgets.get(strategy))
    except UnityError as error:
        return {"refused": str(error)}
    seconds = time.perf_counter() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    plan = cost(found.graph, machine, optimizer)
    times = simulated(found.graph, plan.machine, optimizer)
    return {
        "overlapped": times.overlapped,
        "waited for": times.waiting,
        "peak bytes": times.peak,
        "search seconds": seconds,
        "cpu seconds": sum(of.ru_utime + of.ru_stime for of in used),
        "search bytes": sum(of.ru_maxrss for of in used) * 1024,
        "gap": found.gap,
        "derivation": [str(step) for step in found.derivation],
    }


LAST = ("unity", "mcmc")
"""The slowest strategies: every cell is searched by the others first."""

CANDIDATES, PROPOSALS = 10, 20_000
"""What unity costs for every operator, and mcmc in all: with their defaults, large graphs take many minutes."""

Found = dict[str, dict[str, Any]]


def alone(model: str, where: str, strategy: str, limit: int) -> dict[str, Any]:
    """What `one` gives in a new process of at most `limit` seconds of one core."""
    command = [sys.executable, __file__, "--one", model, where, strategy, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if -done.returncode == signal.SIGXCPU:
        return {"refused": f"> {limit} s"}
    lines = done.stderr.strip().splitlines()
    return json.loads(done.stdout) if done.returncode == 0 else {"refused": lines[-1] if lines else "failed"}


def times(found: Found, which: str = "overlapped") -> dict[str, float]:
    """Simulated seconds by strategy, of those that found a plan."""
    return {s: f[which] for s, f in found.items() if which in f}


def ratio(found: Found) -> float | None:
    """The best other strategy's time by joint's."""
    seconds = times(found)
    others = [t for s, t in seconds.items() if s != "joint"]
    return min(others) / seconds["joint"] if others and "joint" in seconds else None


def table(title: str, strategies: list[str], rows: list[tuple[str, int, Found]]) -> Table:
    out = Table(title=title)
    out.add_column("model")
    for heading in ("GPUs", *strategies, "ratio", "joint: s", "cpu s", "GB", "gap"):
        out.add_column(heading, justify="right")
    for model, gpus, found in rows:
        seconds, waiting, joint = times(found), times(found, "waited for"), found.get("joint", {})
        of = ratio(found)
        out.add_row(
            model.partition(",")[0] + (IN_BF16 if model.endswith(IN_BF16) else ""),
            str(gpus),
            *(f"{seconds[s] * 1e3:.1f} ({waiting[s] * 1e3:.1f})" if s in seconds else "-" for s in strategies),
            "" if of is None else f"{of:.3f}",
            *(f"{joint[key]:.1f}" if key in joint else "" for key in ("search seconds", "cpu seconds")),
            f"{joint['search bytes'] / 1e9:.2f}" if "search bytes" in joint else "",
            "" if joint.get("gap") is None else f"{joint['gap']:.2%}",
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Every strategy on every model and machine.")
    parser.add_argument("--models", nargs="*", default=[*SUMMIT, *DGX, *(m + IN_BF16 for m in MIXED)])
    parser.add_argument("--gpus", nargs="*", type=int, default=sorted({*SUMMIT_GPUS, *DGX_GPUS}))
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--limit", type=int, default=120, help="seconds of a core a search may take (joint: x 4)")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time; seconds are then of busy cores")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep what the file has")
    options = parser.parse_args()
    machine = f"{processor()}, Python {platform.python_version()}"
    wanted = cells(options.models, options.gpus)
    results: dict[tuple[str, str], Found] = {(model, where): {} for model, where, _ in wanted}
    if options.resume and options.json.exists():
        for row in json.loads(options.json.read_text())["rows"]:
            if (row["model"], row["machine"]) in results:
                results[row["model"], row["machine"]] = row["found"]
    writing = Lock()

    def search(model: str, where: str, strategy: str) -> None:
        limit = options.limit * (4 if strategy == "joint" else 1)
        found = alone(model, where, strategy, limit)
        with writing:
            results[model, where][strategy] = found
            said = f"{found['overlapped'] * 1e3:.2f} ms, {found['cpu seconds']:.1f} s" if "gap" in found else found
            print(f"{model} on {where}: {strategy} {said}", file=sys.stderr, flush=True)
            if options.json:
                save(options.json, machine, options.jobs, wanted, results)

    with ThreadPoolExecutor(options.jobs) as pool:
        for slow in (False, True):
            for model, where, _ in wanted:
                for strategy in options.strategies:
                    if (strategy in LAST) == slow and strategy not in results[model, where]:
                        pool.submit(search, model, where, strategy)
    title = f"simulated ms of an iteration, as emitted (waited for); {machine}, {options.jobs} at a time"
    console = Console(width=200)
    console.print(table(title, options.strategies, [(m, gpus, results[m, w]) for m, w, gpus in wanted]))
    slower = False
    for model, where, _ in wanted:
        of = ratio(results[model, where])
        if of is not None and of < 1 - 1e-9:
            slower = True
            seconds = times(results[model, where])
            console.print(f"{model} on {where}: {min(seconds, key=seconds.__getitem__)} is faster by {1 / of - 1:.3%}")
    return int(slower)


def save(
    path: Path, machine: str, jobs: int, wanted: list[tuple[str, str, int]], results: dict[tuple[str, str], Found]
) -> None:
    """Write what is known so far."""
    paper = {model: says for model, (_, says) in SUMMIT.items()}
    rows = [{"model": m, "machine": w, "gpus": gpus, "found": results[m, w]} for m, w, gpus in wanted]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "jobs": jobs, "paper": paper, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        if len(sys.argv) > 5:
            resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[5]), int(sys.argv[5]) + 5))
        print(json.dumps(one(*sys.argv[2:5])))
    else:
        raise SystemExit(main())
