"""
Measure what the search would gain if its sum knew which operators are one kernel.

    python bench/group_prices.py [--models MODEL ..] [--machine M] [--json FILE]

The exact search sums the seconds of operators alone; which of them are one kernel is decided for each candidate, and
only the last choice knows. Pointwise operators in a group cost less than alone, at most nothing. So the search is
repeated on the graph of the plan given with their price at a half, a tenth and a hundredth, and at each with every
share of the weights' moves hidden, as the last choice has it. Prints the emitted milliseconds of the plan given, the
sum of its operators alone, that of its kernels, and the best emitted milliseconds at each price.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unity_ir.cost.kernels import kernel_seconds
from unity_ir.machine import Machine, load
from unity_ir.machine.curve import RooflineCurve
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute
from unity_ir.plan.plan import plan_graph
from unity_ir.search.exact.plan_graph import realise
from unity_ir.search.exact.solver import Solver
from unity_ir.search.layouts.limits import limits
from unity_ir.search.layouts.objective import Price
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.run import run
from unity_ir.simulate.report import as_emitted

MODELS = (
    "bert_large,layers=4,batch=64",
    "gpt2,batch=64",
    "llama3_8b,batch=8,sequence=4096,layers=4",
    "resnext50,batch=64",
    "inception_v3,batch=64",
    "candle_uno,batch=2048",
)
SHARES = (0.5, 0.1, 0.01)
ADAMW = Optimizer("adamw")


@dataclass(frozen=True)
class Row:
    """Milliseconds of a model's plan, and of the best plans at each share of the price of pointwise operators."""

    model: str
    given: float
    alone: float
    kernels: float
    best: dict[str, float]


def with_pointwise_at(machine: Machine, share: float) -> Machine:
    """The machine on which pointwise operators take a share of their seconds."""
    device = machine.device
    top = device.efficiency / share
    curve = RooflineCurve(device.launch * share, top, 0.0, 0.0, top, 0.0, 0.0)
    return replace(machine, device=replace(device, curves={**device.curves, "elementwise": curve, "copy": curve}))


def emitted(graph: Graph, machine: Machine) -> float:
    return 1e3 * as_emitted(graph, machine, ADAMW)[0]


def best(serial: Graph, machine: Machine, share: float) -> float:
    """The least emitted milliseconds of the exact search's plans at a share of the price, which fit or not."""
    solver = Solver(Spaces(with_pointwise_at(machine, share)), ADAMW)
    plans: set[Graph] = set()
    for hidden in (0.0, *limits().hidden_shares):
        own = solver.with_price(Price(hidden=hidden))
        plans.add(realise(serial, own.solve(serial), own))
    return min(emitted(plan, machine) for plan in plans)


def measured(model: str, machine: Machine) -> Row:
    graph = mixed_precision(from_text(model), "bf16")
    found = run(graph, machine, "joint", ADAMW)
    program = plan_graph(found.graph, machine, ADAMW).program
    kernels = sum(kernel_seconds(program, c, machine.device) for c in program.body if isinstance(c, Compute))
    alone = found.cost.compute_time - found.cost.update
    at = {f"{share:g}": best(erase(found.graph), machine, share) for share in SHARES}
    return Row(model, emitted(found.graph, machine), 1e3 * alone, 1e3 * kernels, at)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[1])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--machine", default="dgx-h100:1", help="of at most four mesh axes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = load(options.machine)
    rows = [measured(model, machine) for model in options.models]
    table = Table("model", "emitted ms", "operators alone", "kernels", *(f"best at {share:g}" for share in SHARES))
    for row in rows:
        numbers = row.given, row.alone, row.kernels, *row.best.values()
        table.add_row(row.model, *(f"{n:.3f}" for n in numbers))
    Console().print(table)
    if options.json is not None:
        found = {"machine": options.machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
