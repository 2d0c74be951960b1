"""
Measure the joint search on large graphs whose layers do not repeat.

    python bench/nasnet.py [--seeds N ..] [--operators N] [--json FILE]

Graphs are like NASNet (Zoph et al., 2018), cut off at 1,000 operators: a cell reads the two before it, and adds five
pairs of separable convolutions, poolings and identities of values drawn at random; what nothing in the cell reads is
concatenated. Every cell is drawn anew, so no layer repeats. 64 images of 32 x 32, 8 H100, SGD in f32. Each search is a
process of its own; building the graph is not counted. `step` and `gap` are of the sum, every move waited for. With
`--seeds`, other rows of the file stay. Exits with code 1 where a search takes more than 60 s.
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
from itertools import count
from pathlib import Path
from random import Random

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.machine import load
from unity_ir.models.vision import Vision
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Value
from unity_ir.search.run import run

SEEDS = (0, 1, 2)
OPERATORS = 1000
PLACE = "dgx-h100:1"
BLOCKS = 5
"""Pairs of operations that a cell adds (NASNet-A has as many)."""
AIM = 60.0
"""Seconds of wall time that a search may take on two quiet cores."""


class Cells(Vision):
    """Builds cells drawn by `random`."""

    def __init__(self, random: Random):
        super().__init__("nasnet")
        self.random = random

    def normalised(self, x: Value, name: str, channels: int, stride: int = 1) -> Value:
        """Return relu, a 1 x 1 convolution and batch norm of images."""
        y = self.conv(self.op("relu", x), f"{name}.conv", channels, 1, stride)
        return self.batch_norm(y, f"{name}.bn")

    def separable(self, x: Value, name: str, kernel: int) -> Value:
        """Return relu, a depthwise convolution, a 1 x 1 convolution and batch norm of images."""
        channels = x.shape[1]
        y = self.conv(self.op("relu", x), f"{name}.depthwise", channels, kernel, 1, kernel // 2, channels)
        return self.batch_norm(self.conv(y, f"{name}.pointwise", channels, 1), f"{name}.bn")

    def operation(self, x: Value, name: str) -> Value:
        """Return one of NASNet's operations, drawn at random, of images; it keeps their shape."""
        kind = self.random.choice(("separable3", "separable5", "separable7", "avg", "max", "identity"))
        if kind == "avg":
            return self.avg_pool(x, 3, 1, 1)
        if kind == "max":
            return self.max_pool(x, 3, 1, 1)
        return x if kind == "identity" else self.separable(x, name, int(kind[-1]))

    def cell(self, before: Value, last: Value, name: str, channels: int, stride: int) -> Value:
        """Return a cell of the values of the two cells before; `stride` divides the size of images."""
        reduced = before.shape[2] // (last.shape[2] // stride)
        found = [
            self.normalised(before, f"{name}.before", channels, reduced),
            self.normalised(last, f"{name}.last", channels, stride),
        ]
        read = set[int]()
        for block in range(BLOCKS):
            ends = [self.random.randrange(len(found)) for _ in range(2)]
            read.update(ends)
            pair = (self.operation(found[end], f"{name}.{block}.{side}") for side, end in enumerate(ends))
            found.append(self.op("add", *pair))
        return self.op("concat", *(v for i, v in enumerate(found) if i not in read), dim=1)


def graph(seed: int, operators: int = OPERATORS, batch: int = 64, image: int = 32, channels: int = 32) -> Graph:
    """
    Return a classifier of `batch` images of cells drawn by `seed`, up to its loss: the first with at least `operators`
    operators. Images halve, and channels double, after each third of them.
    """
    b = Cells(Random(seed))
    x, labels = b.input("x", batch, 3, image, image), b.input("labels", batch, dtype="i64")
    before = last = b.batch_norm(b.conv(x, "stem.conv", channels, 3, 1, 1), "stem.bn")
    stage = 0
    for number in count():
        made = b.graph(last)
        done = sum(node.is_compute for node in made.nodes())
        if done >= operators:
            break
        stride = 2 if 3 * done > (stage + 1) * operators else 1
        stage += stride - 1
        before, last = last, b.cell(before, last, f"cell{number}", channels << stage, stride)
    return b.graph(b.op("cross_entropy", b.linear(b.global_pool(b.op("relu", last)), "fc", 10), labels))


@dataclass(frozen=True)
class Row:
    """A row of the table; seconds, and GB of the process."""

    seed: int
    operators: int
    wall: float
    processor: float
    resident: float
    step: float
    gap: float | None


def measure(seed: int, operators: int) -> Row:
    """Search the plan of one graph in this process."""
    made = graph(seed, operators)
    start, before = time.perf_counter(), time.process_time()
    found = run(made, load(PLACE), "joint")
    wall, used = time.perf_counter() - start, time.process_time() - before
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Row(
        seed,
        sum(node.is_compute for node in made.nodes()),
        wall,
        used + children.ru_utime + children.ru_stime,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        found.cost.time,
        found.gap,
    )


def main() -> int:
    """Measure every seed asked for, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--operators", type=int, default=OPERATORS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(asdict(measure(args.one, args.operators))))
        return 0
    found: list[Row] = []
    table = Table("seed", "operators", "wall, s", "CPU, s", "GB", "step, ms", "gap")
    for seed in args.seeds:
        command = [sys.executable, __file__, "--one", str(seed), "--operators", str(args.operators)]
        row = Row(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        found.append(row)
        search = f"{row.wall:.0f}", f"{row.processor:.0f}", f"{row.resident:.2f}"
        gap = "" if row.gap is None else f"{row.gap:.3%}"
        table.add_row(str(row.seed), str(row.operators), *search, f"{row.step * 1e3:.4f}", gap)
    Console(width=100).print(table)
    if args.json is not None:
        on = {"processor": processor(), "python": platform.python_version()}
        kept = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        rows = {(row["seed"], row["operators"]): row for row in [*kept, *map(asdict, found)]}
        args.json.write_text(json.dumps({"machine": on, "rows": [*rows.values()]}, indent=1) + "\n")
    return int(any(row.wall > AIM for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
