"""
Search plans for training steps of large models, and print them beside published runs.

    python bench/large.py [--rows NUMBER ..] [--json FILE]

bf16 mixed precision, AdamW in f32. Prints, for each plan, the simulated seconds of a step, tokens per second and GPU,
MFU (three times the FLOPs of the forward's products, attention whole, of the GPUs' peak in bf16), GB on a GPU, the gap
of the sum, and what the search took: wall and processor seconds, and GB of the process. Each search is a process of its
own. With `--rows`, other rows of the file stay. Published rows are torchtitan's (commit b5bcd76, benchmarks/) and
NVIDIA's (Megatron-Bridge, docs/performance-summary), with what they measured; theirs are other machines or precisions,
as said.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.api.options import search_options
from unity_ir.cost.work import model_flops
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.memory.lagrangian import needed
from unity_ir.search.run import run
from unity_ir.search.with_stages import run_with_stages
from unity_ir.simulate.report import as_emitted

EXPERTS = "degrees,zero=3,ep=64"
"""Experts divided by hand."""

FIT = {"recompute": "auto", "loss_pieces": "auto"}
"""Options of plans by hand that hold as much as fits."""

ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("llama3_8b,batch=16", "dgx-h100:1", "fsdp", {"recompute": "auto"}),
    ("llama3_8b,batch=16", "dgx-h100:1", "joint", {}),
    ("llama3_8b,batch=128", "dgx-h100:1", "fsdp", {"micro_batches": 16, "recompute": "auto"}),
    ("llama3_70b,batch=256", "dgx-h100:32", "zero3", {"recompute": "auto"}),
    ("llama3_70b,batch=256", "dgx-h100:32", "joint", {}),
    ("llama3_405b,batch=256", "dgx-h100:64", "joint", {}),
    ("llama3_8b,batch=8,sequence=32768", "dgx-h100:1", "joint", {}),
    ("llama3_8b,batch=1,sequence=131072", "dgx-h100:1", "joint", {}),
    ("llama3_8b,batch=8,sequence=131072", "dgx-h100:8", "joint", {}),
    ("llama3_8b,batch=2,sequence=262144", "dgx-h100:2", "joint", {}),
    ("llama3_8b,batch=8,sequence=262144", "dgx-h100:8", "joint", {}),
    ("mixtral_8x7b,batch=64", "dgx-h100:8", "joint", {}),
    ("qwen3_moe,batch=16", "dgx-h100:2", "joint", {}),
    ("qwen3_moe,batch=16", "dgx-h100:2", "zero3", {"recompute": "auto"}),
    ("mixtral_8x7b,batch=64,capacity=100", "dgx-h100:8", "joint", {}),
    ("mixtral_8x7b,batch=64,capacity=100", "dgx-h100:8", "degrees,zero=2,ep=8", {}),
    ("qwen3_moe,batch=16,capacity=100", "dgx-h100:2", "joint", {}),
    ("qwen3_moe,batch=16,capacity=100", "dgx-h100:2", "degrees,zero=3,ep=8", {}),
    ("mixtral_8x7b,batch=64", "dgx-h100:8", "joint,imbalance=1.25", {}),
    ("mixtral_8x7b,batch=64", "dgx-h100:8", "degrees,zero=2,ep=8,exchange=true,imbalance=1.25", {}),
    ("qwen3_moe,batch=16", "dgx-h100:2", "joint,imbalance=1.25", {}),
    ("deepseek_v3,batch=256", "dgx-h100:32", "joint", {"stages": "auto"}),
    ("deepseek_v3,batch=256,capacity=100", "dgx-h100:32", "joint", {"stages": "auto"}),
    ("deepseek_v3,batch=1024", "dgx-h100:128", "joint", {"stages": "auto"}),
    ("deepseek_v3,batch=1024,capacity=100", "dgx-h100:128", "joint", {"stages": "auto"}),
    ("deepseek_v3,batch=256", "dgx-h100:32", "joint,imbalance=1.25", {"stages": "auto"}),
    ("deepseek_v3,batch=256", "dgx-h100:32", f"{EXPERTS},exchange=true,imbalance=1.25", {"recompute": "block"}),
    ("deepseek_v3,batch=256,capacity=100", "dgx-h100:32", EXPERTS, {"recompute": "block"}),
    ("llama3_8b,batch=8,sequence=32768", "dgx-h100:1", "fsdp", {**FIT, "offload": "auto"}),
    ("llama3_8b,batch=1,sequence=131072", "dgx-h100:1", "degrees,cp=8,zero=3,ring=true,stripes=true", FIT),
    ("llama3_8b,batch=1,sequence=131072", "dgx-h100:1", "degrees,tp=8,sp=true", FIT),
)
"""Model, machine, strategy, and options of the search; Llamas of 8,192 tokens a sample where no other number is said,
mixtures of 4,096."""

PUBLISHED = (
    ("torchtitan: 8B, batch 16, 8 H100 of 96 GB, FSDP, selective recompute, eager", 5762),
    ("torchtitan: the same, compiled", 6667),
    ("NVIDIA: 8B, batch 128, 8 H100, FSDP, fp8", 14451),
    ("NVIDIA: 70B, batch 256, 64 H100, TP 4, PP 8, fp8", 1664),
    ("torchtitan: 405B, batch 256, 512 H100 of 96 GB, TP 8, PP 8, fp8, interleaved 1F1B", 128),
    ("NVIDIA: Qwen3-30B-A3B, batch 1,024, 16 H100, EP 16, fp8", 8960),
    ("NVIDIA: DeepSeek-V3, batch 8,192, 1,024 H100, TP 2, PP 8, EP 64, fp8", 1297),
)
"""Each published run, and the tokens per second and GPU that were measured."""


@dataclass(frozen=True)
class Large:
    """A row of the table; seconds, GB, and fractions."""

    model: str
    machine: str
    search: str
    step: float
    tokens: float
    """Per second and GPU."""
    mfu: float
    memory: float
    gap: float | None
    wall: float
    processor: float
    resident: float


def measure(number: int) -> Large:
    """Search the plan of a row in this process."""
    model, place, search, options = ROWS[number]
    given = search_options(search)
    strategy = str(given.pop("strategy"))
    start = time.perf_counter()
    serial = from_text(model)
    graph, machine, optimizer = mixed_precision(serial, "bf16"), load(place), Optimizer("adamw")
    search_plan = run_with_stages if "stages" in options else run
    found = search_plan(graph, machine, strategy, optimizer, given, **options)
    wall = time.perf_counter() - start
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds, _ = as_emitted(found.graph, machine, optimizer)
    tokens = next(leaf.types[0].elements for leaf in serial.inputs if leaf.name == "tokens")
    return Large(
        model,
        place,
        ",".join([search, *(f"{key}={value}" for key, value in options.items())]),
        seconds,
        tokens / seconds / machine.devices,
        model_flops(serial) / seconds / machine.devices / machine.device.peak("bf16"),
        needed(found.graph, found.cost, optimizer) / 1e9,
        found.gap,
        wall,
        sum(each.ru_utime + each.ru_stime for each in used),
        used[0].ru_maxrss / 1e6,
    )


def main() -> None:
    """Measure every row asked for, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", choices=range(len(ROWS)), default=range(len(ROWS)))
    parser.add_argument("--one", type=int, choices=range(len(ROWS)), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(asdict(measure(args.one))))
        return
    found: list[Large] = []
    table = Table(
        "model", "machine", "search", "step, s", "tokens/s/GPU", "MFU", "GB", "gap", "wall, s", "CPU, s", "GB"
    )
    for number in args.rows:
        text = subprocess.run(
            [sys.executable, __file__, "--one", str(number)], check=True, capture_output=True, text=True
        )
        row = Large(**json.loads(text.stdout))
        found.append(row)
        gap = "" if row.gap is None else f"{row.gap:.1%}"
        figures = f"{row.step:.3f}", f"{row.tokens:,.0f}", f"{row.mfu:.1%}", f"{row.memory:.1f}", gap
        search = f"{row.wall:.0f}", f"{row.processor:.0f}", f"{row.resident:.2f}"
        table.add_row(row.model, row.machine, row.search, *figures, *search)
    for what, tokens in PUBLISHED:
        table.add_row(what, "", "", "", f"{tokens:,}")
    Console(width=180).print(table)
    if args.json is not None:
        on = {"processor": processor(), "python": platform.python_version()}
        kept = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        rows = {(row["model"], row["machine"], row["search"]): row for row in [*kept, *map(asdict, found)]}
        args.json.write_text(json.dumps({"machine": on, "rows": [*rows.values()]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
