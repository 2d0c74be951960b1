"""
Compare joint with and without stages with Megatron's plans by hand: all degrees of tensor, pipeline and data
parallelism, with and without interleaving.

    python bench/by_hand.py [--rows NUMBER ..] [--json FILE]

bf16 mixed precision, AdamW. By hand, tensor parallelism is within a node, with sequence parallelism, optimizer states
divided among data-parallel GPUs (ZeRO-1); 1F1B, or interleaved with two stages per GPU; one, two or four micro-batches
for each stage; recompute where it does not fit without. Seconds are those of a step as emitted. Machines named 100G
have 100 Gb/s of network for each node of eight.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load, part_counts
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.run import run
from unity_ir.search.with_stages import run_with_stages
from unity_ir.simulate.report import as_emitted

ROWS = (
    ("gpt2,batch=64", "dgx-h100:1"),
    ("gpt2,batch=128", "100G:2"),
    ("gpt2,batch=512", "100G:8"),
    ("moe,batch=64", "100G:2"),
    ("llama3_8b,batch=128", "dgx-h100:8"),
    ("llama3_8b,batch=128", "100G:8"),
)
"""Model and machine."""

OPTIMIZER = Optimizer("adamw")


@dataclass(frozen=True)
class Found:
    """A plan: what it is, its seconds as emitted, and processor seconds until it was there."""

    plan: str
    step: float
    processor: float


def machine_of(name: str) -> Machine:
    """Return a machine; of `100G:N`, N nodes of 8 H100 that share a network adapter of 100 Gb/s each."""
    kind, _, nodes = name.partition(":")
    if kind != "100G":
        return load(name)
    machine = load(f"dgx-h100:{nodes}")
    outer, *inner = machine.levels
    return replace(machine, name=name, levels=(replace(outer, bandwidth=12.5e9 / 8), *inner))


def by_hand(graph: Graph, machine: Machine) -> Iterator[Found]:
    """Yield every plan by hand that fits."""
    inner = machine.levels[-1].size
    samples = graph.inputs[0].types[0].shape[0]
    for tensor in (t for t in (1, 2, 4, 8) if t <= inner):
        options = {"tp": tensor, "sp": tensor > 1, "zero": 1}
        for parts in (p for p in part_counts(machine) if p * tensor <= machine.devices):
            kinds = (None,) if parts == 1 else ("1f1b", "interleaved:2")
            for kind in kinds:
                stages = None if kind is None else Stages.of(parts * (1 if kind == "1f1b" else 2), kind)
                counts = [m for m in (1, 2, 4) if stages is None or m > 0]
                for count in (m * parts for m in counts):
                    data = machine.devices // parts // tensor
                    if samples % (count * data):
                        continue
                    start = time.process_time()
                    for recompute in ("none", "auto"):
                        with suppress(UnityError):
                            plan = run(
                                graph, machine, "degrees", OPTIMIZER, options, micro_batches=count,
                                recompute=recompute, stages=stages,
                            ).graph  # fmt: skip
                            step = as_emitted(plan, machine, OPTIMIZER)[0]
                            text = f"tp {tensor}, pp {parts}, dp {data}, {count} micro-batches, {kind or 'no stages'}"
                            yield Found(f"{text}, recompute {recompute}", step, time.process_time() - start)
                            break


def joint(graph: Graph, machine: Machine, *, with_stages: bool) -> Found:
    """Return joint's plan."""
    start = time.process_time()
    asked = "auto" if with_stages else "none"
    plan = run_with_stages(graph, machine, "joint", OPTIMIZER, stages=asked).graph
    step = as_emitted(plan, machine, OPTIMIZER)[0]
    kind = "no stages"
    if plan.pipeline is not None:
        kind = f"{plan.pipeline.ranks} parts, {plan.pipeline.order}:{plan.pipeline.chunks}"
    return Found(kind, step, time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", choices=range(len(ROWS)), default=range(len(ROWS)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table("model", "machine", "by hand, ms", "plan", "tried", "joint without stages, ms", "joint, ms", "plan")
    rows: list[dict[str, object]] = []
    for number in args.rows:
        model, place = ROWS[number]
        graph, machine = mixed_precision(from_text(model), "bf16"), machine_of(place)
        hand = sorted(by_hand(graph, machine), key=lambda found: found.step)
        whole, found = (joint(graph, machine, with_stages=with_stages) for with_stages in (False, True))
        steps = [f"{1e3 * each.step:.2f}" for each in (hand[0], whole, found)]
        table.add_row(model, place, steps[0], hand[0].plan, str(len(hand)), *steps[1:], found.plan)
        each = {"by_hand": [asdict(h) for h in hand], "without_stages": asdict(whole), "joint": asdict(found)}
        rows.append({"model": model, "machine": place, **each})
        Console(width=190).print(table)
        if args.json is not None:
            on = {"processor": processor(), "python": platform.python_version()}
            args.json.write_text(json.dumps({"machine": on, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
