"""
Compare simulated with measured steps of pipelines: vTrain's configurations of several nodes.

    python bench/vtrain.py [--only MODEL] [--json FILE]

Measured by VIA-Research (vTrain, MICRO 2024; github.com/VIA-Research/vTrain, MIT licence: published/vtrain/): GPT of
3.6 to 175 billion parameters under Megatron-DeepSpeed on 64 to 512 A100, 1F1B, every layer recomputed, half precision,
given degrees of tensor, data and pipeline parallelism and sizes of a micro-batch. Each is planned here by `--degrees`
and `--stages`, and simulated as emitted, with products and attention as that code ran them (no fused attention).
The machine is the preset dgx-a100, gradients are summed in float32. Nothing is fitted. Prints for each model the rank
correlation (Spearman), the mean error, and by how much the configuration that is simulated to be the fastest was
measured slower than the fastest.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from published import FUSED, NO_LIMIT, of_products, ranks
from rich.console import Console
from rich.table import Table

from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.graph import rewrite
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import plan_graph
from unity_ir.search import run
from unity_ir.search.pipeline.staged import Stages
from unity_ir.simulate.report import step_seconds
from unity_ir.simulate.stages import simulate_stages

ROWS = Path(__file__).with_name("published") / "vtrain" / "multi_node.csv"

VOCABULARY = 51_200
"""Tokens of Megatron's GPT, padded to a multiple of 1,024."""


@dataclass(frozen=True)
class Configuration:
    """A measured step."""

    billions: float
    gpus: int
    batch: int
    micro_batch: int
    """Samples of a micro-batch on each data-parallel group."""
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    ms: float

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.data * self.micro_batch)

    def __str__(self) -> str:
        return f"{self.billions:g}B tp{self.tensor} dp{self.data} pp{self.pipeline} mb{self.micro_batch}"


def configurations() -> list[Configuration]:
    """Return the measured steps."""
    with ROWS.open(encoding="utf-8-sig", newline="") as file:
        rows = [*csv.reader(file)][1:]
    return [Configuration(float(row[0]), *map(int, row[1:11]), ms=float(row[11])) for row in rows]


def simulated_ms(c: Configuration) -> float:
    """Return the simulated milliseconds of a configuration."""
    text = f"gpt2,batch={c.batch},sequence={c.sequence},layers={c.layers},hidden={c.hidden},heads={c.heads}"
    graph = mixed_precision(rewrite(from_text(f"{text},vocabulary={VOCABULARY}"), of_products), "f16")
    machine = load(f"dgx-a100:{c.gpus // 8}")
    machine = replace(machine, device=replace(machine.device, memory=NO_LIMIT))
    optimizer = Optimizer("adam")
    stages = Stages(c.pipeline) if c.pipeline > 1 else None
    placed = run(
        graph,
        machine,
        "degrees",
        optimizer,
        {"tp": c.tensor},
        micro_batches=c.micro_batches,
        recompute="block",
        stages=stages,
    ).graph
    plan = plan_graph(placed, machine, optimizer, FUSED["pointwise"])
    seconds = simulate_stages(plan, machine).seconds if plan.pipeline else step_seconds(plan, machine)[0]
    return seconds * 1e3


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    x, y = ranks(xs), ranks(ys)
    middle = (len(x) - 1) / 2
    over = sum((a - middle) * (b - middle) for a, b in zip(x, y, strict=True))
    return over / (sum((a - middle) ** 2 for a in x) * sum((b - middle) ** 2 for b in y)) ** 0.5


def figures(some: Sequence[tuple[Configuration, float]]) -> dict[str, float]:
    """Return the figures of some configurations, each with its simulated milliseconds."""
    measured, found = [c.ms for c, _ in some], [ms for _, ms in some]
    favourite = min(some, key=lambda pair: pair[1])[0]
    return {
        "rows": len(some),
        "spearman": spearman(found, measured) if len(some) > 2 else 1.0,
        "mean_error": mean(abs(ms / c.ms - 1) for c, ms in some),
        "mean_ratio": mean(ms / c.ms for c, ms in some),
        "favourite_slower": favourite.ms / min(measured) - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--only", help="models whose billions of parameters begin with this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    found: list[tuple[Configuration, float]] = []
    table = Table("configuration", "micro-batches", "measured ms", "simulated ms", "ratio")
    start = time.process_time()
    for c in configurations():
        if options.only is None or f"{c.billions:g}".startswith(options.only):
            ms = simulated_ms(c)
            found.append((c, ms))
            table.add_row(str(c), str(c.micro_batches), f"{c.ms:,.0f}", f"{ms:,.0f}", f"{ms / c.ms:.2f}")
    if not found:
        print(f"vtrain.py: no model begins with {options.only!r}", file=sys.stderr)
        return 1
    console.print(table)
    by_model: dict[float, list[tuple[Configuration, float]]] = {}
    for c, ms in found:
        by_model.setdefault(c.billions, []).append((c, ms))
    table = Table("model", "rows", "Spearman", "mean |error|", "mean ratio", "fastest simulated, measured slower by")
    named = {f"{billions:g}B": figures(some) for billions, some in by_model.items()} | {"all": figures(found)}
    for name, f in named.items():
        slower = f"{f['favourite_slower']:.1%}" if name != "all" else ""
        row = f"{f['spearman']:.3f}", f"{f['mean_error']:.1%}", f"{f['mean_ratio']:.2f}"
        table.add_row(name, f"{f['rows']:.0f}", *row, slower)
    console.print(table)
    print(f"{time.process_time() - start:.0f} processor seconds")
    if options.json is not None:
        rows = [{**asdict(c), "simulated_ms": ms} for c, ms in found]
        options.json.write_text(json.dumps({"rows": rows, "figures": named}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
