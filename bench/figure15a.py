"""
Redo Unity's Figure 15a: BERT-Large on 96 V100 of Summit, with more and more dimensions of parallelism.

    python bench/figure15a.py [--models M ..] [--parts-by STRATEGY ..] [--machine M] [--json FILE]

The paper: 1.2 times data and model parallelism with reduction and attention heads, 1.4 times with pipelines on top
(section 6.3; 4 samples per GPU, Adam). It does not say the length of samples. Its public code (FlexFlow,
scripts/osdi22ae/bert.sh) has no BERT but `encoder`: layers of attention and two products of the width, without
embeddings, norms, residual sums and a head over the vocabulary; so that is a model here, too, beside BERT-Large of 512
and of 128 tokens.

Plans: data parallelism; the best of all dimensions without pipelines (joint: within its gap nothing is faster, so what
Unity adds step by step lies between these two); and pipelines of 2BW, for the least time from step to step, as
`--search=unity --stages=auto` has them, whose parts are planned by Unity's search, or divide data alone (`--parts-by`).
All are scored as they are emitted, communication overlapped, and with every move waited for, as nobody has said how
much the paper's runtime overlaps. Each count has its own best pipeline. GB are the most that a device holds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from unity_ir.cost.stats import Simulated
from unity_ir.errors import UnityError
from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.models.builder import Builder
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.search.pipeline.staged import Stages
from unity_ir.search.result import SearchResult
from unity_ir.search.run import run
from unity_ir.search.throughput import most_throughput
from unity_ir.simulate.report import simulated

SAMPLES = 4
"""Per GPU, as in the paper."""

CANDIDATES = 10
"""Candidates of Unity's search for every operator of a part of a graph, as in bench/search.py."""

PARTS_BY = ("data-parallel", "unity")
"""Strategies that plan a part of the machine."""

PAPER = {"reduction and heads": 1.2, "pipelines": 1.4}
"""How many times as fast as data and model parallelism."""


def encoder(batch: int) -> Graph:
    """The model of the paper's public code, with BERT-Large's 24 layers (there are 12 by default)."""
    b = Builder("encoder")
    x, y = b.input("x", batch, 512, 1024), b.input("y", batch, 512, 1)
    h = x
    for i in range(24):
        q, k, v = (b.linear(h, f"{i}.{part}", 1024, bias=False) for part in ("query", "key", "value"))
        h = b.linear(b.attention(q, k, v, 16, 16, causal=False), f"{i}.output", 1024, bias=False)
        h = b.linear(b.op("relu", b.linear(h, f"{i}.first", 1024, bias=False)), f"{i}.second", 1024, bias=False)
    return b.graph(b.op("mse", b.linear(h, "last", 1, bias=False), y))


MODELS: dict[str, Callable[[int], Graph]] = {
    "bert-512": lambda batch: from_text(f"bert_large,batch={batch},sequence=512"),
    "bert-128": lambda batch: from_text(f"bert_large,batch={batch},sequence=128"),
    "encoder": encoder,
}

Count = Literal["overlapped", "waiting"]


@dataclass(frozen=True)
class Row:
    """A plan of a model: its seconds of a step, by how they are counted, how many times data parallelism's, and GB."""

    model: str
    plan: str
    count: Count
    seconds: float
    speedup: float
    peak: float
    search: float


def rows(model: str, machine: Machine, parts_by: Sequence[str] = PARTS_BY) -> list[Row]:
    """Return the rows of a model."""
    graph, optimizer = MODELS[model](SAMPLES * machine.devices), Optimizer("adam")
    found: dict[tuple[str, Count], tuple[str, Simulated, float]] = {}

    def add(kind: str, name: str, result: SearchResult, seconds: float, counts: tuple[Count, ...]) -> None:
        for count in counts:
            found[kind, count] = name, simulated(result.graph, machine, optimizer), seconds

    for strategy, kind in (("data-parallel", "data"), ("joint", "all dimensions")):
        start = time.perf_counter()
        result = run(graph, machine, strategy, optimizer)
        add(kind, strategy, result, time.perf_counter() - start, ("overlapped", "waiting"))
    tried: dict[tuple[str, int, int], SearchResult | UnityError] = {}
    for strategy in parts_by:
        for count in ("overlapped", "waiting"):
            start = time.perf_counter()
            result = _pipeline(graph, machine, optimizer, strategy, count, tried)
            if result is not None:
                pipeline = result.graph.pipeline
                assert pipeline is not None
                micro_batches = result.graph.inputs[0].result.type.micro_batches
                name = f"{strategy}, {pipeline.ranks} stages, {micro_batches} micro-batches"
                add(f"pipelines by {strategy}", name, result, time.perf_counter() - start, (count,))
    out: list[Row] = []
    for (kind, count), (name, times, seconds) in found.items():
        now, data = _seconds(times, count), _seconds(found["data", count][1], count)
        out.append(
            Row(model, f"{kind.partition(' by ')[0]}: {name}", count, now, data / now, times.peak / 1e9, seconds)
        )
    return out


def _pipeline(
    graph: Graph,
    machine: Machine,
    optimizer: Optimizer,
    strategy: str,
    count: Count,
    tried: dict[tuple[str, int, int], SearchResult | UnityError],
) -> SearchResult | None:
    """Return the best pipeline of a strategy's plans of parts, as one count has it; what is `tried` is not again."""
    options = {"budget": CANDIDATES} if strategy == "unity" else None

    def search(stages: Stages, micro_batches: int) -> SearchResult:
        key = strategy, stages.count, micro_batches
        if key not in tried:
            try:
                tried[key] = run(
                    graph, machine, strategy, optimizer, options, micro_batches=micro_batches, stages=stages
                )
            except UnityError as error:
                tried[key] = error
        result = tried[key]
        if isinstance(result, UnityError):
            raise result
        return result

    def seconds(result: SearchResult) -> float:
        return _seconds(simulated(result.graph, machine, optimizer), count)

    return most_throughput(graph, machine, search, seconds, None)


def _seconds(times: Simulated, count: Count) -> float:
    return times.overlapped if count == "overlapped" else times.waiting


def table(found: list[Row]) -> Table:
    """Return the rows as a table."""
    out = Table(title=f"the paper: {', '.join(f'{k} {v}' for k, v in PAPER.items())}")
    for name in ("model", "plan", "moves", "ms", "speed-up", "GB", "search, s"):
        out.add_column(name)
    for row in found:
        moves = "overlapped" if row.count == "overlapped" else "waited for"
        numbers = f"{1e3 * row.seconds:.1f}", f"{row.speedup:.2f}", f"{row.peak:.1f}", f"{row.search:.0f}"
        out.add_row(row.model, row.plan, moves, *numbers)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Unity's Figure 15a.")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts-by", nargs="*", choices=PARTS_BY, default=PARTS_BY)
    parser.add_argument("--machine", default="summit:16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = load(options.machine)
    found: list[Row] = []
    for model in options.models:
        found += rows(model, machine, options.parts_by)
        if options.json:
            content = {"machine": options.machine, "paper": PAPER, "rows": [asdict(row) for row in found]}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    Console(width=140).print(table(found))


if __name__ == "__main__":
    main()
