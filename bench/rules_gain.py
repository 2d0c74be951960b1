"""
Measure what rewriting is worth: the step as emitted without rules, with those of searches, and without each rule that
was applied.

    python bench/rules_gain.py [--models M ..] [--machines NAME ..] [--limit SECONDS] [--jobs N] [--json FILE]

Models of the zoo with as many samples per GPU as fit, on H100s in bf16 mixed precision and in f32, with AdamW, and
Unity's seven on Summit in f32. A gain is by how much longer the step takes without; a negative one says that the sum
of seconds, by which graphs are chosen, leads to a slower step as emitted. Where no rule is applied, none was found that
lowers the sum. Each search is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table
from search import ADAM, SUMMIT

SAMPLES = {
    "bert_large": 32,
    "gpt2": 8,
    "llama3_8b,layers=8": 1,
    "moe": 1,
    "nmt": 32,
    "rnnlm": 32,
    "lstm_stack": 32,
    "resnet101": 64,
    "resnext50": 64,
    "wresnet": 32,
    "inception_v3": 64,
    "alexnet": 256,
    "dlrm": 1024,
    "xdl": 1024,
    "candle_uno": 256,
    "mlp": 256,
}
"""Samples per GPU on H100s."""

H100 = {"dgx-h100:1x1": 1, "dgx-h100:1": 8, "dgx-h100:8": 64}
V100 = {"summit:4": 24, "summit:16": 96}
"""GPUs by machine."""

Case = tuple[str, str, str]
"""A model with its batch, a machine, and an element type: `bf16` (mixed precision) or `f32`."""


def cases(models: list[str], machines: list[str]) -> list[Case]:
    """Return the cases of the models and machines that are asked for."""
    found: list[Case] = []
    for where in machines:
        for model in models:
            name = model.partition(",")[0]
            if where in H100:
                batch = SAMPLES[model] * H100[where]
                found += [(f"{model},batch={batch}", where, dtype) for dtype in ("bf16", "f32")]
            elif name in SUMMIT:
                found.append((f"{model},batch={SUMMIT[name][0] * V100[where]}", where, "f32"))
    return found


def one(model: str, where: str, dtype: str, rules: str) -> dict[str, Any]:
    """Return the seconds of the plan found with `rules`, the rules applied, and the search's processor seconds."""
    import unity_ir as ui

    name, *sizes = model.split(",")
    given: dict[str, Any] = {key: int(value) for key, _, value in (size.partition("=") for size in sizes)}
    optimizer = "adamw" if where in H100 else "adam" if name in ADAM else "sgd"
    start = time.process_time()
    plan = ui.plan(
        name,
        **given,
        machine=where,
        search=f"joint,rules={rules}",
        optimizer=optimizer,
        precision=dtype if dtype != "f32" else None,
    )
    spent = time.process_time() - start
    written = re.search(r"pcg\.derivation = \[(.*?)\]", str(plan))
    steps = re.findall(r'"([^" ]+) at ', written[1]) if written else []
    applied = Counter(step.partition(".")[0] for step in steps)
    return {"emitted": plan.stats.seconds, "sum": plan.stats.time, "rules": applied, "processor": spent}


def alone(case: Case, rules: str, limit: float) -> dict[str, Any]:
    """Return `one`'s result from a new process."""
    command = [sys.executable, __file__, "--one", *case, rules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"refused": f"> {limit:.0f} s"}
    lines = done.stderr.strip().splitlines()
    return json.loads(done.stdout) if done.returncode == 0 else {"refused": lines[-1] if lines else "failed"}


def compared(case: Case, limit: float) -> dict[str, Any]:
    """Return the row of a case: `none`, `common`, and each rule that was applied left out (`~rule`)."""
    found = {rules: alone(case, rules, limit) for rules in ("none", "common")}
    for rule in found["common"].get("rules", ()):
        found[f"~{rule}"] = alone(case, f"common+~{rule}", limit)
    row = {"model": case[0], "machine": case[1], "dtype": case[2], "found": found}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def report(rows: list[dict[str, Any]], machine: str) -> Table:
    """Return the table of all rows."""
    table = Table(title=f"what rules are worth, as emitted; searched on {machine}")
    for heading in ("model", "machine", "dtype", "no rules, ms", "rules, ms", "gain", "gain of the sum", "by rule"):
        table.add_column(heading, justify="right" if "ms" in heading or "gain" in heading else "left")
    for row in rows:
        found = row["found"]
        refused = [each["refused"] for each in found.values() if "refused" in each]
        if refused:
            table.add_row(row["model"], row["machine"], row["dtype"], refused[0])
            continue
        best = found["common"]
        gains = {what: each["emitted"] / best["emitted"] - 1 for what, each in found.items()}
        table.add_row(
            row["model"],
            row["machine"],
            row["dtype"],
            f"{found['none']['emitted'] * 1e3:.2f}",
            f"{best['emitted'] * 1e3:.2f}",
            f"{gains['none']:.1%}",
            f"{found['none']['sum'] / best['sum'] - 1:.1%}",
            ", ".join(f"{what[1:]} {gain:.1%}" for what, gain in gains.items() if what.startswith("~")) or "-",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="What rewriting is worth.")
    parser.add_argument("--models", nargs="*", default=[*SAMPLES])
    parser.add_argument("--machines", nargs="*", default=[*H100, *V100], choices=[*H100, *V100])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a search may take")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{processor()}, Python {platform.python_version()}"
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda case: compared(case, options.limit), cases(options.models, options.machines)))
    Console(width=200).print(report(rows, machine))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:6])))
    else:
        raise SystemExit(main())
