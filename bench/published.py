"""
Compare predicted with published milliseconds of a training step, of the rows in `bench/published/*.toml`.

    python bench/published.py [--only TEXT] [--json FILE]

A row is predicted as a user would predict it: a model of the zoo, mixed precision, the plan of its published degrees,
and that plan simulated as emitted. It says which kernels ran: all fused that can be, or (`fused = "pointwise"`)
products by themselves, as of cuBLAS, or (`fused = "none"`) those that PyTorch has; attention of a flash kernel, or
(`attention = "products"`) of batched products; the loss and its gradient fused with the casts of logits, or (`loss =
"alone"`) each in a kernel that reads and writes float32. The memory's limit is lifted.
Nothing is fitted. Activation checkpoints cannot be asked for yet: with `recompute = "full"` the kernels of the blocks'
forward, and the all-reduces among tensor-parallel devices in it, are added once more, with "selective" those kernels
without attention and half of the products (torchtitan's policy).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from unity_ir.cost.lines import kernel_of_line, kernel_seconds
from unity_ir.machine import Machine, load
from unity_ir.machine.describe import machine_from
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, Node, Value, apply, rebuild, rewrite
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.collective_calls import move_of
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph
from unity_ir.plan.program import Compute, Fused, ReshardMove
from unity_ir.search import run
from unity_ir.search.baselines.recipe import Degrees
from unity_ir.simulate.full import simulate
from unity_ir.simulate.replay import replay
from unity_ir.tools.opt_arguments import mixed_precision_options, search_options

ROWS = Path(__file__).with_name("published")
ATTENTION = ("flash", "products")
LOSS = ("fused", "alone")
RECOMPUTE = ("none", "selective", "full")
FUSED = {"all": PlanOptions(), "pointwise": PlanOptions(matmul="torch"), "none": PlanOptions(kernels="torch")}
NO_LIMIT = 2**50
"""Bytes of memory of a device whose limit is lifted."""


@dataclass(frozen=True)
class Row:
    """A published step: what ran on what, and its milliseconds."""

    source: str
    name: str
    model: str
    """As `--model` has it, with the batch of all devices."""
    machine: str
    """A preset, or a file of `published/machines` with its number of devices or nodes."""
    degrees: str
    precision: str
    """As `--mixed-precision` has it; empty for f32."""
    ms: float
    kernels: str
    fused: str = "all"
    """Which operators were fused, by a compiler or by hand: `all`, `pointwise` (not with products) or `none`."""
    attention: str = "flash"
    """`flash`, or `products`: two batched products with a softmax kernel between them, which scales and masks, too."""
    loss: str = "fused"
    """`fused`, or `alone`: casts of logits and of their gradient are kernels of their own."""
    recompute: str = "none"
    optimizer: str = "adamw"
    uncertain: str = ""


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction."""

    row: Row
    ms: float
    added_ms: float
    """Milliseconds in `ms` that were added for what is recomputed."""
    seconds: float
    """Seconds the prediction took."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.ms / self.row.ms

    @property
    def kind(self) -> str:
        """The kind of GPU."""
        return next(kind for kind in ("A100", "H100", "V100", "P100", "K80") if kind.lower() in self.row.machine)


def published(folder: Path = ROWS) -> tuple[list[Row], list[tuple[str, str, str]]]:
    """Return all rows, and the source, name and reason of what cannot be expressed."""
    rows: list[Row] = []
    missing: list[tuple[str, str, str]] = []
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        own = {k: v for k, v in table.items() if k not in ("name", "source", "rows", "missing")}
        shared: dict[str, Any] = {"precision": "", **own}
        rows += [Row(**{**shared, "source": table["name"], **row}) for row in table.get("rows", ())]
        missing += [(table["name"], each["name"], each["reason"]) for each in table.get("missing", ())]
    return rows, missing


def machine_of(name: str) -> Machine:
    """Return a machine of `published/machines`, or a preset, with the limit of its memory lifted."""
    stem, _, count = name.partition(":")
    path = ROWS / "machines" / f"{stem}.toml"
    if path.exists():
        found = machine_from(name, tomllib.loads(path.read_text(encoding="utf-8")), int(count))
    else:
        found = load(name)
    return replace(found, device=replace(found.device, memory=NO_LIMIT))


def serial(row: Row, layers: int | None = None) -> Graph:
    """Return the graph of a row's model, of all its layers or of some, in its precision."""
    text = row.model
    if layers is not None:
        text = re.sub(r",layers=\d+", "", text) + f",layers={layers}"
    graph = from_text(text)
    if row.attention == "products":
        graph = rewrite(graph, of_products)
    if not row.precision:
        return graph
    options = mixed_precision_options(row.precision)
    return mixed_precision(graph, options["type"], options.get("reduce", "f32"))


def of_products(node: Node, operands: tuple[Value, ...]) -> Sequence[Value]:
    """
    Replace attention by the operators of code without a flash kernel, as far as their seconds go.

    rewrite: attention(q, k, v) -> batch_matmul(softmax(batch_matmul_nt(q, k)), v)
    """
    if node.op != "attention":
        return rebuild(node, operands, node.view).results
    q, k, v = operands
    shares = apply("softmax", apply("batch_matmul_nt", [q, k]).results).result
    return apply("batch_matmul", [shares, v]).results


def plan_of(row: Row, machine: Machine, layers: int | None = None) -> Plan:
    """Return the plan of a row's degrees, as `-t triton` emits it with the options for its kernels."""
    placed = run(serial(row, layers), machine, "degrees", optimizer_of(row), degrees_of(row)).graph
    return plan_graph(placed, machine, optimizer_of(row), FUSED[row.fused])


def optimizer_of(row: Row) -> Optimizer:
    """Return the optimizer of a row, with its default hyperparameters."""
    return Optimizer(row.optimizer)


def degrees_of(row: Row) -> dict[str, Any]:
    """Return the options of the strategy `degrees` that a row names."""
    options = search_options(",".join(filter(None, ("degrees", row.degrees))))
    return {name: value for name, value in options.items() if name != "strategy"}


def forward_seconds(row: Row, machine: Machine, layers: int) -> dict[str, float]:
    """Return the seconds of a plan's forward with `layers` layers: `product`, `attention`, `other` and `move`."""
    plan = plan_of(row, machine, layers)
    program = plan.program
    tensor = set(Degrees(**degrees_of(row)).on(machine).tensor)
    found: dict[str, float] = {"product": 0.0, "attention": 0.0, "other": 0.0, "move": 0.0}
    for line in program.body:
        if isinstance(line, Compute):
            kernel = kernel_of_line(program, line)
            kind = "product" if kernel.kind == "contraction" else "other"
            kind = "attention" if "attention" in line.operator else kind
            found[kind] += kernel_seconds(program, line, machine.device)
            if program.outputs[0] in line.results:
                break
        if isinstance(line, ReshardMove) and tensor.issuperset(line.axes):
            found["move"] += machine.move_time(move_of(program, line), program.tensors[line.result].dtype)
    return found


def alone_seconds(row: Row, plan: Plan, machine: Machine) -> float:
    """Return the seconds that the kernels of the loss take more where none of them is fused, if the row says so."""
    if row.loss == "fused":
        return 0.0

    def seconds(compute: Compute) -> float:
        return kernel_seconds(plan.program, compute, machine.device)

    groups = [i for i in plan.program.body if isinstance(i, Fused) and "cross_entropy" in i.operator]
    return sum(sum(map(seconds, group.members)) - seconds(group) for group in groups)


def recomputed_seconds(row: Row, machine: Machine, layers: int) -> float:
    """Return the seconds that recomputing adds to a step: of the blocks' forward, the difference of two depths."""
    if row.recompute == "none":
        return 0.0
    one, two = (forward_seconds(row, machine, n) for n in (1, 2))
    block = {kind: two[kind] - one[kind] for kind in one}
    if row.recompute == "selective":
        return layers * (block["product"] / 2 + block["other"])
    return layers * sum(block.values())


def predicted(row: Row) -> Predicted:
    """Predict a row."""
    start = time.perf_counter()
    for key, known in (("recompute", RECOMPUTE), ("attention", ATTENTION), ("loss", LOSS), ("fused", FUSED)):
        if getattr(row, key) not in known:
            said = ", ".join(known)
            raise ValueError(f"{row.source}: {row.name}: {key} is {getattr(row, key)!r}; it is one of {said}")
    machine = machine_of(row.machine)
    plan = plan_of(row, machine)
    seconds = simulate(replay(plan, machine)).seconds + alone_seconds(row, plan, machine)
    depth = re.search(r",layers=(\d+)", row.model)
    added = recomputed_seconds(row, machine, int(depth[1]) if depth else 32)
    return Predicted(row, (seconds + added) * 1e3, added * 1e3, time.perf_counter() - start)


# --- figures


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    order = sorted(values)
    return [(2 * order.index(v) + order.count(v) - 1) / 2 for v in values]


def spearman(found: Sequence[Predicted]) -> float:
    """Return Spearman's rank correlation of predicted and measured milliseconds."""
    xs, ys = ranks([p.ms for p in found]), ranks([p.row.ms for p in found])
    mean = (len(found) - 1) / 2
    over = sum((x - mean) * (y - mean) for x, y in zip(xs, ys, strict=True))
    return over / (sum((x - mean) ** 2 for x in xs) * sum((y - mean) ** 2 for y in ys)) ** 0.5


def summary(found: Sequence[Predicted]) -> dict[str, float]:
    """Return figures of some rows: their number, the median ratio and |error|, and the rank correlation."""
    rank = {"spearman": spearman(found)} if len(found) > 2 else {}
    return {
        "rows": len(found),
        "median_ratio": median(p.ratio for p in found),
        "median_error": median(abs(p.ratio - 1) for p in found),
        **rank,
    }


def grouped(found: Iterable[Predicted]) -> Mapping[str, list[Predicted]]:
    """Return the rows of every source, and of every kind of GPU."""
    out: dict[str, list[Predicted]] = {}
    for each in found:
        out.setdefault(each.row.source, []).append(each)
        out.setdefault(each.kind, []).append(each)
    return out


def show(found: Sequence[Predicted], missing: Sequence[tuple[str, str, str]]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("source", "step", "measured ms", "predicted ms", "of that added", "ratio", "uncertain")
    for p in found:
        added = f"{p.added_ms:.0f}" if p.added_ms else ""
        table.add_row(
            p.row.source, p.row.name, f"{p.row.ms:.0f}", f"{p.ms:.0f}", added, f"{p.ratio:.2f}", p.row.uncertain
        )
    console.print(table)
    table = Table("", "rows", "median ratio", "median |error|", "Spearman")
    for name, some in (*grouped(found).items(), ("all", list(found))):
        s = summary(some)
        rank = f"{s['spearman']:.3f}" if "spearman" in s else ""
        table.add_row(name, str(s["rows"]), f"{s['median_ratio']:.2f}", f"{s['median_error']:.1%}", rank)
    console.print(table)
    for source, name, reason in missing:
        console.print(f"not expressed: {source}: {name}: {reason}", markup=False, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[1])
    parser.add_argument("--only", default="", help="rows whose source and name contain this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, missing = published()
    chosen = [row for row in rows if options.only.lower() in f"{row.source} {row.name}".lower()]
    if not chosen:
        print(f"published.py: no row contains {options.only!r}", file=sys.stderr)
        return 1
    found = [predicted(row) for row in chosen]
    show(found, missing)
    if options.json is not None:
        results = [{**asdict(p.row), "predicted_ms": p.ms, "added_ms": p.added_ms, "ratio": p.ratio} for p in found]
        figures = {name: summary(some) for name, some in (*grouped(found).items(), ("all", found))}
        written = {"rows": results, "figures": figures, "missing": missing}
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
