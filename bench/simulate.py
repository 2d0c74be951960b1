"""
The simulator and its search: delta against full simulation, the time of a whole search, and what it finds.

    python bench/simulate.py [--part PART ..] [--equal N] [--models M ..] [--gpus G ..] [--proposals N] [--json FILE]

Parts are `equal`, `table`, `nmt` and `optimum`; all by default. What follows from shapes alone is in
`bench/figures.py`, what pricing takes in `bench/costs.py`, and how right the times are in `bench/simulate_accuracy.py`.
`--json` keeps what the file says of other parts.

`equal`: `--equal` random changes of single operators over five models: delta must equal full simulation, to the
picosecond; every hundredth is also written out as a parallel graph, and costed and simulated from scratch.

`table`: FlexFlow's Table 5 for its six models on 4 to 64 GPUs: microseconds per proposal by full simulation (every
block built and simulated) and by delta simulation, with the costs of operators and reshards known to both, as FlexFlow
caches them; the ratio beside the paper's; and how many proposals a minute holds when costs are not known before. A
proposal is accepted if it is not slower, so that the plans are such as a search visits. Microseconds are of the
processor, so that what else runs on the machine does not count.

`nmt`: the whole `--search=mcmc` of NMT, 40 steps, on 64 K80 (paper: 2,190 s), and its plan beside data parallelism.

`optimum`: on 4 devices, what mcmc finds and what exhaustive search proves over the same space (FlexFlow, section 8.3):
of LeNet every plan that pins nothing, of RNNLM (2 steps) those in which what an operator does it does on all devices.

Exits with code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from exhaustive import exhaustive, space_of
from rich.console import Console
from rich.table import Table

from unity_ir.cost.plan import cost
from unity_ir.machine import Machine, load
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import REPEAT, Assignment
from unity_ir.search.flexflow.mcmc import mcmc
from unity_ir.simulate.build import task_graph
from unity_ir.simulate.choices import random_assignment
from unity_ir.simulate.delta import Simulation
from unity_ir.simulate.full import simulate

PAPER = {
    "alexnet": (2.9, 3.0, 2.9, 3.0, 3.0),
    "resnet101": (3.2, 3.1, 3.2, 3.2, 3.3),
    "inception_v3": (3.4, 3.9, 5.0, 5.9, 6.9),
    "rnntc": (2.2, 2.3, 2.4, 2.6, 3.0),
    "rnnlm": (2.3, 2.5, 2.7, 3.2, 3.5),
    "nmt": (2.5, 2.7, 3.0, 3.8, 4.1),
}
"""Ratios of full to delta simulation on 4, 8, 16, 32 and 64 GPUs (FlexFlow, Table 5)."""

GPUS = (4, 8, 16, 32, 64)

AIMS = {("inception_v3", 64): 10.0, ("nmt", 64): 10.0}
"""Minimum ratios of full to delta simulation."""

EQUAL = [
    ("alexnet,batch=64", "box:4"),
    ("inception_v3,batch=64", "2gpu"),
    ("rnnlm,batch=64,steps=10", "box:8"),
    ("nmt,batch=64,steps=6", "box:4"),
    ("gpt2,batch=8,layers=4", "dgx-h100:2"),
]


OPTIMUM = {"lenet,batch=64": False, "rnnlm,batch=64,steps=2": True}
"""The models, and whether all mesh axes have one role."""

PAPER_NMT = 2190.0
"""Seconds of FlexFlow's search for NMT on 64 GPUs (Table 5)."""


def cluster(gpus: int) -> Machine:
    """Return the paper's K80 cluster, with 4 GPUs per node."""
    return load(f"k80:{gpus // 4}")


def equal(changes: int) -> int:
    """Return how many of `changes` random changes, over five models, simulate differently in full."""
    wrong = 0
    for text, machine_name in EQUAL:
        graph, machine, random = from_text(text), load(machine_name), Random(text)
        nodes = [n for n in graph.nodes() if n.is_compute]
        state = Simulation(graph, machine, {n: random_assignment(n, machine, random) for n in nodes})
        for i in range(changes // len(EQUAL)):
            before = state.makespan
            node = random.choice(nodes)
            found = state.propose(node, random_assignment(node, machine, random))
            wrong += found != state.full_makespan()
            if random.random() < 0.5:
                state.accept()
            else:
                state.reject()
                wrong += state.makespan != before
            if i % 100 == 0:
                written = state.realised()
                wrong += simulate(task_graph(written, cost(written, machine))).makespan != state.makespan
    return wrong


def walk(
    graph: Graph, machine: Machine, start: dict[Node, Assignment], state: Simulation, proposals: int
) -> tuple[float, list[float]]:
    """Return the seconds of `proposals` proposals from `start`, and of a few full simulations along the way."""
    for node, assignment in start.items():
        state.propose(node, assignment)
        state.accept()
    random = Random(1)
    spent, fulls = 0.0, list[float]()
    now = state.makespan
    for i in range(proposals):
        node = random.choice(state.nodes)
        assignment = random_assignment(node, machine, random)
        begin = time.process_time()
        found = state.propose(node, assignment)
        if found <= now:
            state.accept()
            now = found
        else:
            state.reject()
        spent += time.process_time() - begin
        if i % max(1, proposals // 10) == 0:
            begin = time.process_time()
            full = state.full_makespan()
            fulls.append(time.process_time() - begin)
            assert full == state.makespan
    return spent, fulls


def measure(model: str, gpus: int, proposals: int) -> dict[str, Any]:
    """Return one cell of the table."""
    machine = cluster(gpus)
    batch = gpus * (256 if model == "alexnet" else 64)
    graph = from_text(f"{model},batch={batch}")
    random = Random(0)
    nodes = [n for n in graph.nodes() if n.is_compute]
    state = Simulation(graph, machine, {n: (REPEAT,) * len(machine.mesh.sizes) for n in nodes})
    start = {n: random_assignment(n, machine, random) for n in nodes}
    cold, _ = walk(graph, machine, start, state, proposals)
    warm, fulls = walk(graph, machine, start, state, proposals)
    full, delta = sorted(fulls)[len(fulls) // 2], warm / proposals
    return {
        "model": model,
        "gpus": gpus,
        "machine": machine.name,
        "operators": len(nodes),
        "full_us": full * 1e6,
        "delta_us": delta * 1e6,
        "ratio": full / delta,
        "paper": PAPER[model][GPUS.index(gpus)],
        "per_minute": 60 * proposals / cold,
    }


def search_nmt() -> dict[str, Any]:
    """Run the whole search for NMT; return its seconds and results."""
    machine, optimizer = cluster(64), Optimizer()
    graph = from_text("nmt,batch=4096")
    begin, cpu = time.perf_counter(), time.process_time()
    found = mcmc(graph, machine, optimizer)
    took, used = time.perf_counter() - begin, time.process_time() - cpu
    starts = {c.start: c.first for c in found.chains}
    return {
        "machine": machine.name,
        "seconds": took,
        "cpu_seconds": used,
        "paper_seconds": PAPER_NMT,
        "proposals": sum(c.proposed for c in found.chains),
        "found_ms": found.seconds * 1e3,
        "data_parallel_ms": starts["data-parallel"] * 1e3,
        "expert_ms": starts.get("expert", starts["data-parallel"]) * 1e3,
        "chains": [{"start": c.start, "best_ms": c.best * 1e3, "proposed": c.proposed} for c in found.chains],
    }


def optimum(text: str, alike: bool) -> dict[str, Any]:
    """Return what mcmc finds, and the optimum that exhaustive search proves, pruning by it."""
    graph, machine, optimizer = from_text(text), load("box:4"), Optimizer()
    space = space_of(graph, machine, alike)
    begin = time.perf_counter()
    found = mcmc(graph, machine, optimizer, space=space)
    took = time.perf_counter() - begin
    proved = exhaustive(graph, machine, optimizer, space, found.assignments)
    return {
        "model": text,
        "machine": machine.name,
        "space": float(proved.space),
        "mcmc_ms": found.seconds * 1e3,
        "mcmc_s": took,
        "optimum_ms": proved.seconds * 1e3,
        "exhaustive_s": proved.took,
        "prefixes": proved.prefixes,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows with the same keys as a table."""
    table = Table(title=title, box=None, title_justify="left")
    shown = [k for k, v in rows[0].items() if not isinstance(v, list)]
    for heading in shown:
        table.add_column(heading, justify="left" if isinstance(rows[0][heading], str) else "right")
    for row in rows:
        table.add_row(*(f"{row[k]:.4g}" if isinstance(row[k], float) else str(row[k]) for k in shown))
    Console(width=140).print(table)


PARTS = ("equal", "table", "nmt", "optimum")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--equal", type=int, default=10_000)
    parser.add_argument("--models", nargs="*", default=list(PAPER), choices=list(PAPER))
    parser.add_argument("--gpus", nargs="*", type=int, default=list(GPUS), choices=GPUS)
    parser.add_argument("--proposals", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    failed = False
    found: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        found = json.loads(arguments.json.read_text())
    about = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    print(about)

    def keep(part: str, rows: Any) -> None:
        found[part] = {"on": about, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")

    if "equal" in arguments.part:
        begin = time.perf_counter()
        wrong = equal(arguments.equal)
        rows = [{"changes": arguments.equal, "differ": wrong, "seconds": time.perf_counter() - begin}]
        show("delta equals full", rows)
        keep("equal", rows)
        failed |= wrong > 0
    if "optimum" in arguments.part:
        rows = [optimum(text, alike) for text, alike in OPTIMUM.items()]
        show("mcmc and the optimum", rows)
        keep("optimum", rows)
        failed |= any(row["mcmc_ms"] != row["optimum_ms"] for row in rows)
    if "nmt" in arguments.part:
        rows = [search_nmt()]
        show("the whole search for NMT on 64 GPUs", rows)
        keep("nmt", rows)
        failed |= rows[0]["seconds"] > 60
    if "table" in arguments.part:
        rows = []
        for model in arguments.models:
            for gpus in arguments.gpus:
                row = measure(model, gpus, arguments.proposals)
                rows.append(row)
                print(f"{model} {gpus}: {row['ratio']:.1f}", file=sys.stderr)
                failed |= row["ratio"] < AIMS.get((model, gpus), 0.0)
        show("full and delta simulation (FlexFlow, Table 5)", rows)
        keep("table", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
