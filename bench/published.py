"""
Compare predicted with published milliseconds of a training step, of the rows in `bench/published/*.toml`.

    python bench/published.py [--only TEXT] [--json FILE] [--jobs N]

A row (`published_rows.py`) is predicted as a user would predict it: a model of the zoo, mixed precision, the plan of
its published degrees, and that plan simulated as emitted. It says which kernels ran: all fused that can be, or
(`fused = "pointwise"`) products by themselves, as of cuBLAS, or (`fused = "none"`) those that PyTorch has, all with
casts and additions of gradients in kernels of their own; attention of a flash kernel, or (`attention = "products"`) of
batched products; the loss and its gradient fused with the casts of logits, or (`loss = "alone"`) each in a kernel that
reads and writes float32. The memory's limit is lifted. Nothing is fitted to a row. What no degrees say, torchtitan's
selective checkpoints (`checkpoints = "op"`), is added: once more the kernels of the blocks' forward, without attention
and half of the products.

With `--json`, rows that the file already has with the same text are kept, so that a run that was stopped goes on.
`docs/update_accuracy.py` makes docs/accuracy.md of it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from published_figures import Predicted, by, figures
from published_kernels import STEPS, host_seconds_of_layer, library, library_seconds, steps_seconds
from published_rows import NO_LIMIT, ROWS, Published, Row, machine_of, published
from rich.console import Console
from rich.table import Table

from unity_ir.api.options import search_options
from unity_ir.cost.kernels import kernel_of_line, kernel_seconds
from unity_ir.machine import Machine
from unity_ir.machine.profile import Profile
from unity_ir.models import from_text
from unity_ir.pcg.graph import Graph, rewrite
from unity_ir.pcg.mixed_precision import in_mixed_precision
from unity_ir.pcg.node import Node, Value, apply, rebuild
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Compute, Fused, ReshardMove
from unity_ir.plan.plan import Plan, PlanOptions, plan_graph
from unity_ir.search import run
from unity_ir.search.pipeline.staged import Stages
from unity_ir.simulate.report import step_seconds
from unity_ir.simulate.stages import simulate_stages

FUSED = {
    "all": PlanOptions(eager=True),
    "pointwise": PlanOptions(matmul="torch", eager=True),
    "none": PlanOptions(kernels="torch", eager=True),
}
"""
The options of a plan by what a row says was fused. Nobody's published step casts weights in their updates, adds
gradients up in products, or moves parts of tensors in other kernels, as our programs do.
"""


def serial(row: Row, layers: int | None = None) -> Graph:
    """Return the graph of a row's model, of all its layers or of some, in its precision."""
    text = row.model
    if layers is not None:
        text = re.sub(r",layers=\d+", "", text) + f",layers={layers}"
    graph = from_text(text)
    if row.attention == "products":
        graph = rewrite(graph, lambda node, operands: of_products(node, operands, row.dropout))
    return in_mixed_precision(graph, row.precision) if row.precision else graph


def of_products(node: Node, operands: tuple[Value, ...], drop: float) -> Sequence[Value]:
    """
    Replace attention by the operators of code without a flash kernel, as far as their seconds go.

    rewrite: attention(q, k, v) -> batch_matmul(dropout(softmax(batch_matmul_nt(q, k))), v)
    """
    if node.op != "attention":
        return rebuild(node, operands, node.view).results
    q, k, v = operands
    shares = apply("softmax", apply("batch_matmul_nt", [q, k]).results).result
    if drop:
        shares = apply("dropout", [shares], {"p": drop, "seed": 0}).result
    return apply("batch_matmul", [shares, v]).results


def plan_of(row: Row, machine: Machine, layers: int | None = None) -> Plan:
    """Return the plan of a row's degrees, as `-t triton` emits it with the options for its kernels."""
    options: dict[str, Any] = search_options(",".join(filter(None, ("degrees", row.degrees))))
    strategy, count, schedule = options.pop("strategy"), options.pop("stages", None), options.pop("schedule", None)
    stages = None if count is None else Stages.of(int(count), schedule)
    times = {key: options.pop(key) for key in ("micro_batches", "recompute") if key in options}
    times["micro_batches"] = int(times.get("micro_batches", 1))
    optimizer = Optimizer(row.optimizer)
    placed = run(serial(row, layers), machine, strategy, optimizer, options, stages=stages, **times).graph
    return plan_graph(placed, machine, optimizer, FUSED[row.fused])


def forward_seconds(row: Row, machine: Machine, layers: int) -> dict[str, float]:
    """Return the seconds of a plan's forward with `layers` layers: `product`, `attention` and `other`."""
    program = plan_of(row, machine, layers).program
    found: dict[str, float] = {"product": 0.0, "attention": 0.0, "other": 0.0}
    for line in program.body:
        if isinstance(line, Compute):
            kernel = kernel_of_line(program, line)
            kind = "product" if kernel.kind == "contraction" else "other"
            kind = "attention" if "attention" in line.operator else kind
            found[kind] += kernel_seconds(program, line, machine.device)
            if program.outputs[0] in line.results:
                break
    return found


def apart_seconds(row: Row, plan: Plan, machine: Machine) -> float:
    """
    Return the seconds that kernels of the loss, or of the dropout of attention's weights, take more where each is a
    kernel of its own, if the row says so; in a pipeline, of a stage's share, with the bubble of 1F1B.
    """
    apart = [*(["cross_entropy"] if row.loss == "alone" else []), *(["dropout"] if row.dropout else [])]

    def seconds(of: Plan, compute: Compute) -> float:
        return kernel_seconds(of.program, compute, machine.device)

    def more(of: Plan) -> float:
        """Return the seconds of a whole step, or of one micro-batch of a part of it."""
        groups = [i for i in of.program.body if isinstance(i, Fused) and any(name in i.operator for name in apart)]
        times = of.program.times if of.program.part_of is None else lambda _: 1
        return sum(times(group) * (sum(seconds(of, m) for m in group.members) - seconds(of, group)) for group in groups)

    if (shape := plan.program.pipeline) is None:
        return more(plan)
    whole = sum(more(part) for _, part in plan.parts)
    return whole * (plan.program.micro_batches + (shape.ranks - 1) / shape.chunks) / shape.ranks


def with_kernels(row: Row, plan: Plan, machine: Machine) -> Machine:
    """
    Return a machine whose products and convolutions take as long as those of the libraries that the row's code called
    (`published_kernels.py`), norms as long as their steps where the row says so, and flash attention as long as the
    kernels that the row names were measured to, of the FLOPs that the mask leaves (`published/kernels/attention.toml`),
    by way of a profile with those kernels alone.
    """
    device, of = machine.device, library(row.device)
    reached = tomllib.loads((ROWS / "kernels" / "attention.toml").read_text(encoding="utf-8")).get(row.attention)
    known: dict[str, dict[tuple[int, ...], float]] = {}
    for line in plan.program.body:
        for member in line.members if isinstance(line, Fused) else [line]:
            if not isinstance(member, Compute):
                continue
            kernel = kernel_of_line(plan.program, member)
            if kernel.sizes in known.get(kernel.operator, {}):
                continue
            if member.operator.startswith("attention") and reached is not None:
                seconds = device.launch + kernel.flops / (device.peak(kernel.dtype) * reached[row.device])
            elif row.norms == "steps" and member.operator in STEPS:
                seconds = steps_seconds(plan.program, member, device)
            else:
                seconds = library_seconds(plan.program, member, device, of)
            if seconds is not None:
                known.setdefault(kernel.operator, {})[kernel.sizes] = seconds
    return replace(machine, device=replace(device, profile=Profile(device.name, known)))


def recomputed_seconds(row: Row, machine: Machine) -> float:
    """Return the seconds of the blocks' forward that selective checkpoints add: the difference of two depths."""
    if not row.checkpoints:
        return 0.0
    one, two = (forward_seconds(row, machine, n) for n in (1, 2))
    block = {kind: two[kind] - one[kind] for kind in one}
    return row.size("layers") * (block["product"] / 2 + block["other"])


def predicted_seconds(row: Row) -> float:
    """Predict the seconds of a row's step."""
    machine = machine_of(row.machine)
    plan = plan_of(row, machine)
    machine = with_kernels(row, plan, machine)
    more = apart_seconds(row, plan, machine) + recomputed_seconds(row, machine) + host_seconds(row)
    return moved_seconds(row, plan, machine) + copied_seconds(row, plan, machine) + more


def copied_seconds(row: Row, plan: Plan, machine: Machine) -> float:
    """
    Return the seconds of copies of gathered weights, if the row's code makes them, that the plan does not: it copies
    those that one call gathers for several weights, and gathers large weights to where they are read.
    """
    if row.weights == "views":
        return 0.0
    program, copied = plan.program, 0
    for line in plan.schedule.lines:
        if isinstance(line.action, ReshardMove) and line.action.kind == "all_gather":
            already = sum(each.bytes for each in plan.copies(line.action))
            copied += program.times(line.action) * max(0, 2 * program.bytes[line.action.result] - already)
    return copied / (machine.device.memory_bandwidth * machine.device.efficiency)


def host_seconds(row: Row) -> float:
    """
    Return the seconds of the host that a step takes more where each kernel waits for its launch: those of its layers,
    of every micro-batch, in a pipeline with the bubble of 1F1B.
    """
    if row.launches == "ahead":
        return 0.0
    forwards = 2 if "recompute=block" in row.degrees else 1
    # A backward launches about twice what a forward does.
    layers = host_seconds_of_layer() * (forwards + 2) / 3 * row.size("layers") / row.degree("stages")
    return layers * (row.degree("micro_batches") + row.degree("stages") - 1)


def moved_seconds(row: Row, plan: Plan, machine: Machine) -> float:
    """
    Return the simulated seconds of a plan; moves overlap kernels where they did in the measured code.

    Moves inside of a node (tensor parallelism) that ran beside their products were cut into a piece for each rank, and
    one piece has no product beside it: these moves count for that part of what they add to a step.
    """

    def seconds(on: Machine) -> float:
        overlap = row.overlap != "none"
        staged = plan.pipeline is not None
        return simulate_stages(plan, on, overlap).seconds if staged else step_seconds(plan, on, overlap)[0]

    whole = seconds(machine)
    if row.overlap != "products":
        return whole
    *outer, inner = machine.levels
    hidden = seconds(replace(machine, levels=(*outer, replace(inner, bandwidth=NO_LIMIT))))
    return hidden + (whole - hidden) / row.degree("tp")


def key_of(row: Row) -> str:
    """Return the text by which a row is known in a file of results: all that it says."""
    return json.dumps(asdict(row), sort_keys=True)


def work(row: Row) -> int:
    """Return about how long a row takes to predict, in layers of stages: short ones come first."""
    stages = re.search(r"stages=(\d+)", row.degrees)
    return row.size("layers") * (1 if stages is None else 5 + int(stages[1]))


def timed(row: Row) -> tuple[Row, float, float]:
    """Return a row, its predicted milliseconds, and the processor seconds that took."""
    start = time.process_time()
    ms = predicted_seconds(row) * 1e3
    return row, ms, time.process_time() - start


def known(path: Path | None) -> dict[str, Predicted]:
    """Return the predictions of a file of results by `key_of`; none if there is no such file."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = [Predicted(Row(**each["row"]), each["predicted_ms"]) for each in rows]
    return {key_of(each.row): each for each in found}


def write(path: Path, found: Sequence[Predicted], of: Published) -> None:
    """Write a file of results, in the order of `published`."""
    rows = [{"row": asdict(p.row), "measured_ms": p.row.ms, "predicted_ms": round(p.ms, 3)} for p in found]
    written = {"rows": rows, "missing": [asdict(m) for m in of.missing], "sources": of.sources}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def show(found: Sequence[Predicted], of: Published) -> None:
    """Print the rows, what is missing, and the figures of each source."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("source", "step", "measured ms", "predicted ms", "ratio", "uncertain")
    for p in found:
        table.add_row(p.row.source, p.row.name, f"{p.row.ms:,.0f}", f"{p.ms:,.0f}", f"{p.ratio:.2f}", p.row.uncertain)
    console.print(table)
    for each in of.missing:
        text = f"not expressed: {each.source}: {each.name}: {each.reason}"
        console.print(text, markup=False, highlight=False)
    table = Table("source", "rows", "median ratio", "median |error|", "90%", "Spearman")
    for name, some in (*by(found, lambda p: p.row.source).items(), ("all", list(found))):
        table.add_row(name, *figures(some).cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--only", default="", help="rows whose source and name contain this text")
    parser.add_argument("--json", type=Path, help="file of results; rows that it has are not predicted again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    of = published()
    chosen = [row for row in of.rows if options.only.lower() in f"{row.source} {row.name}".lower()]
    if not chosen:
        print(f"published.py: no row contains {options.only!r}", file=sys.stderr)
        return 1
    found = known(options.json)
    left = sorted((row for row in chosen if key_of(row) not in found), key=work)
    with Pool(options.jobs) as pool:
        for row, ms, seconds in pool.imap_unordered(timed, left):
            found[key_of(row)] = Predicted(row, ms)
            print(f"{ms / row.ms:.3f} {row.source}: {row.name} ({seconds:.1f} s)", file=sys.stderr, flush=True)
            if options.json is not None:
                write(options.json, [found[key_of(r)] for r in of.rows if key_of(r) in found], of)
    show([found[key_of(row)] for row in chosen], of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
