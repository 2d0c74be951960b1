"""
Compare joint with sequential optimization, over the same space, algorithm and rules (Unity, section 6.4, Figure 15b).

    python bench/joint.py [--models M ..] [--gpus N ..] [--limit SECONDS] [--json FILE]

Prints the simulated time of the joint plan, every move waited for, and how much slower variants are: rewriting before
parallelizing (`sequential`), no rewrites, no hybrid rules (no sharding along a weight's rows, no partial sums through
linear operators), and without each rule of the derivation. `library` uses all rules rather than those of `common`; a
ratio below 1 says that they find a better plan. Of its ratios, the paper's text gives the highest, 1.4.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table
from search import ADAM, DGX, SUMMIT, cells

VARIANTS = ("sequential", "none", "no hybrids", "library")


def one(model: str, where: str) -> dict[str, Any]:
    """Return the times of a model's joint plan and of all variants, in this process."""
    from unity_ir.machine import load
    from unity_ir.models import from_text
    from unity_ir.pcg.graph import Graph
    from unity_ir.pcg.optimizer import Optimizer
    from unity_ir.rules.algebraic import selected
    from unity_ir.search.exact.solver import Solver
    from unity_ir.search.joint.best_first import joint
    from unity_ir.search.joint.sequential import rewritten_alone, sequential
    from unity_ir.search.memory.lagrangian import joint_within
    from unity_ir.simulate.report import simulated

    graph, machine = from_text(model), load(where)
    optimizer = Optimizer("adam" if model.partition(",")[0] in ADAM else "sgd")

    def score(plan: Graph) -> float:
        return simulated(plan, machine, optimizer).waiting

    def by(rules: str, solver: Solver | None = None) -> Any:
        return joint(graph, machine, selected(rules), optimizer, solver=solver)

    start = time.perf_counter()
    found = by("common")
    seconds = time.perf_counter() - start
    fitted = joint_within(found, graph, lambda solver: by("common", solver))
    used = Counter(step.rule for step in fitted.derivation)
    times = {"joint": score(fitted.graph)}
    if fitted is not found:
        # Memory decides, and how much of it a variant needs is not its ratio.
        return {"times": times, "rules": used, "seconds": seconds, "memory": True}
    times["sequential"] = score(
        sequential(graph, machine, rewritten_alone(graph, machine, selected("common"), optimizer), optimizer).graph
    )
    times["none"] = score(by("none").graph)
    divided = Solver(replace(found.solver.spaces, hybrids=False), optimizer)
    times["no hybrids"] = score(by("common", divided).graph)
    times["library"] = score(by("library").graph)
    for rule in used:
        times[f"~{rule}"] = score(by(f"common+~{rule}").graph)
    return {"times": times, "rules": used, "seconds": seconds}


def alone(model: str, where: str, limit: float) -> dict[str, Any]:
    """Return `one`'s result from a new process."""
    try:
        command = [sys.executable, __file__, "--one", model, where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"refused": f"> {limit:.0f} s"}
    lines = done.stderr.strip().splitlines()
    return json.loads(done.stdout) if done.returncode == 0 else {"refused": lines[-1] if lines else "failed"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Joint against sequential optimization, and what rules are worth.")
    parser.add_argument("--models", nargs="*", default=[*SUMMIT, *DGX])
    parser.add_argument("--gpus", nargs="*", type=int, default=[24, 8])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds all searches for one model may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{processor()}, Python {platform.python_version()}"
    table = Table(title=f"simulated ms of an iteration, and by what others are slower; {machine}")
    for heading in ("model", "GPUs", "joint, ms", *VARIANTS, "without a rule of the derivation", "times applied"):
        table.add_column(heading, justify="left" if "rule" in heading or heading == "model" else "right")
    rows: list[dict[str, Any]] = []
    for model, where, gpus in cells(options.models, options.gpus):
        found = alone(model, where, options.limit)
        rows.append({"model": model, "machine": where, "gpus": gpus, **found})
        name = model.partition(",")[0]
        print(model, where, found, file=sys.stderr, flush=True)
        if "refused" in found:
            table.add_row(name, str(gpus), found["refused"])
            continue
        times = found["times"]
        ratios = {what: t / times["joint"] for what, t in times.items()}
        table.add_row(
            name,
            str(gpus),
            f"{times['joint'] * 1e3:.2f}",
            *(f"{ratios[what]:.3f}" if what in ratios else "memory" for what in VARIANTS),
            ", ".join(f"{what} {ratios[what]:.3f}" for what in times if what.startswith("~")) or "-",
            ", ".join(map(str, found["rules"].values())) or "-",
        )
    Console(width=180).print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "paper": "up to 1.4 (section 6.4)", "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:4])))
    else:
        raise SystemExit(main())
