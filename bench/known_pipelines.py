"""
Compare simulated pipelines of published recipes with what they were measured at.

    python bench/known_pipelines.py [--json FILE]

Llama 3.1 405B on 512 H100 of 96 GB by torchtitan (commit b5bcd76, benchmarks/): TP 8, PP 8, FSDP 8, every layer
recomputed, 256 x 8,192 tokens in as many micro-batches as parts, 1F1B, and interleaved with two stages per GPU; theirs
in float8. Llama 3 70B on 64 and 405B on 1,024 H100 by NVIDIA (Megatron-Bridge, docs/performance-summary): TP 4, PP 8,
VP 5, and TP 8, PP 8, CP 2, VP 8, in fp8. Here all is bf16 with masters and AdamW in float32, with sequence parallelism
beside TP, and DP in place of CP. Prints seconds of a step, the bubble, tokens per second and GPU, and how much faster
interleaving makes a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.plan import plan_graph
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.run import DoesNotFit, run
from unity_ir.simulate.stages import simulate_stages

TOKENS = 8192
"""Tokens of a sample."""


@dataclass(frozen=True)
class Recipe:
    """A published pipeline, and the tokens per second and GPU that were measured."""

    source: str
    model: str
    batch: int
    machine: str
    tensor: int
    stages: int
    schedule: str
    micro_batches: int
    recompute: str
    measured: float


RECIPES = (
    Recipe("torchtitan", "llama3_405b", 256, "grand-teton:64", 8, 8, "1f1b", 8, "block", 100),
    Recipe("torchtitan", "llama3_405b", 256, "grand-teton:64", 8, 16, "interleaved:2", 8, "block", 128),
    Recipe("NVIDIA", "llama3_70b", 256, "dgx-h100:8", 4, 40, "interleaved:5", 128, "none", 1664),
    Recipe("NVIDIA", "llama3_405b", 1536, "dgx-h100:128", 8, 64, "interleaved:8", 96, "none", 328),
)


@dataclass(frozen=True)
class Simulated:
    """A recipe as it is simulated here: seconds, GB."""

    recipe: Recipe
    step: float
    bubble: float
    memory: float
    fits: bool
    processor: float

    @property
    def tokens(self) -> float:
        """Tokens per second and GPU."""
        return self.recipe.batch * TOKENS / self.step / load(self.recipe.machine).devices


def simulated(recipe: Recipe) -> Simulated:
    """Plan and simulate a recipe."""
    start = time.process_time()
    graph = mixed_precision(from_text(f"{recipe.model},batch={recipe.batch}"), "bf16")
    machine, optimizer = load(recipe.machine), Optimizer("adamw")
    options = {"tp": recipe.tensor, "sp": True, "zero": 2}
    stages, fits = Stages.of(recipe.stages, recipe.schedule), True
    count, recompute = recipe.micro_batches, recipe.recompute
    try:
        placed = run(
            graph, machine, "degrees", optimizer, options, micro_batches=count, recompute=recompute, stages=stages
        ).graph
    except DoesNotFit as error:
        placed, fits = error.result.graph, False
    step = simulate_stages(plan_graph(placed, machine, optimizer), machine)
    used = time.process_time() - start
    return Simulated(recipe, step.seconds, step.bubble, max(step.peaks) / 1e9, fits, used)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [simulated(recipe) for recipe in RECIPES]
    table = Table("recipe", "schedule", "micro-batches", "step, s", "bubble", "GB", "tokens/s/GPU", "measured")
    for each in found:
        r = each.recipe
        name = f"{r.source}: {r.model}, {r.batch} on {r.machine}, tp {r.tensor}"
        memory = f"{each.memory:.1f}{'' if each.fits else ' (too many)'}"
        share = f"{each.bubble / each.step:.1%}"
        row = f"{each.step:.2f}", share, memory, f"{each.tokens:,.0f}", f"{r.measured:,.0f}"
        table.add_row(name, f"{r.schedule} of {r.stages}", str(r.micro_batches), *row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    gain = found[0].step / found[1].step
    print(f"1F1B to interleaved: {gain:.3f} times as fast, measured 1.28 ({gain / 1.28 - 1:+.1%})")
    print(f"{sum(each.processor for each in found):.0f} processor seconds")
    if options.json is not None:
        rows = [{**asdict(each), "tokens": each.tokens} for each in found]
        options.json.write_text(json.dumps({"rows": rows, "gain": gain}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
