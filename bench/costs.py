"""
Measure how many configurations of operators are priced per second.

python bench/costs.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from unity_ir.cost.table import seconds
from unity_ir.cost.work import repeats
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.differentiate import nodes_with_gradient
from unity_ir.search.layouts.axes import degrees_of, role_counts
from unity_ir.search.layouts.space import Spaces

MODELS = ["gpt2,layers=2", "bert_large,layers=2", "inception_v3", "nmt", "dlrm", "candle_uno"]


def measure(model: str, machine_name: str) -> dict[str, object]:
    """Price every configuration of every operator of a model, as the search's tables do; return counts and seconds."""
    machine, graph = load(machine_name), from_text(model)
    groups, with_gradient = Spaces(machine, by_count=True).groups, nodes_with_gradient(graph)
    asked: list[tuple[object, ...]] = []
    for node in dict.fromkeys(n for n in graph.nodes() if n.is_compute):
        extents = node.analysis.bound.extents
        variables = tuple(v for v in node.analysis.splittable if extents[v] > 1)
        degrees = degrees_of(role_counts(groups, len(variables) + 2 + len(node.analysis.carriers)), groups)
        degrees = degrees[:, : len(variables)]
        fits = np.all(np.array([extents[v] for v in variables], dtype=np.int64) % degrees == 0, axis=1)
        needs = tuple(node in with_gradient and v.node in with_gradient for v in node.operands)
        asked.append((node, needs, variables, degrees[fits], np.tile(repeats(node), (int(fits.sum()), 1))))
    rows = sum(len(a[3]) for a in asked)
    distinct = sum(len(np.unique(a[3], axis=0)) for a in asked)
    start = time.perf_counter()
    for a in asked:
        seconds(*a, machine.device)
    took = time.perf_counter() - start
    return {
        "model": model,
        "machine": machine_name,
        "operators": len(asked),
        "configurations": rows,
        "distinct degrees": distinct,
        "seconds": took,
        "per second": rows / took,
        "distinct per second": distinct / took,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", default="summit:16")
    options = parser.parse_args()
    rows = [measure(model, options.machine) for model in MODELS]
    table = Table(title=f"configurations of operators priced, {platform.processor() or platform.machine()}")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(f"{v:,.3g}" if isinstance(v, float) else f"{v}" for v in row.values()))
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps({"python": platform.python_version(), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
