"""
`unity-tune`: measures Triton's and PyTorch's implementation of every operator of models' programs, on this GPU.

    unity-tune bert_large,layers=1 --types bf16 --out h200.json
    unity-tune plan.pcg --machine=dgx-h200 --out h200.json
    unity-opt plan.pcg -t 'triton{tune="h200.json"}'
    unity-opt model.pcg --search --machine=dgx-h200,profile=h200.json

Operators that the table has are not measured again, so a stopped run can be continued. Without a GPU, Triton is
interpreted and its times are meaningless: programs for CPUs use PyTorch only, `-t triton{kernels=torch}`.
"""

from __future__ import annotations

import platform
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as Shown

from unity_ir.api.graphs import read_graphs
from unity_ir.errors import UnityError
from unity_ir.machine import load
from unity_ir.machine.tuned import IMPLEMENTATIONS, TuningTable, read_table
from unity_ir.messages import tell
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.mixed_precision import in_mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import devices_of
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Program
from unity_ir.search.run import run
from unity_ir.tools.command_line import Parser, exit_code
from unity_ir.version import __version__

if TYPE_CHECKING:
    from unity_ir.lowering.measure.implementations import Measure, TuningTask


def programs(
    models: Sequence[str], types: Sequence[str], plan: str, machine: str, mixed: str | None = None
) -> Iterator[Program]:
    """
    Yield one rank's training step, as a program, for each model and element type. `models` are names in the zoo, or
    `.pcg` files.

    Each model is yielded in every one of the element types, or in its own if `types` is empty; then, unless `mixed` is
    None, in mixed precision with that type. A graph that is a plan for several devices is kept; for others, the search
    strategy `plan` makes one on the machine called `machine`. Raises `UnityError` for graphs that are whole training
    steps already, and for graphs that are plans if `mixed` is given.
    """
    on = load(machine)

    def step(graph: Graph) -> Program:
        return lower(fuse_collectives(differentiate(graph, Optimizer(), on.mesh)), on)

    for graph in (graph for model in models for graph in read_graphs(model)):
        if graph.updates:
            raise UnityError(f"unity-tune: @{graph.name} is a whole training step; give the forward")
        is_plan = devices_of(graph) > 1
        if is_plan and mixed is not None:
            raise UnityError(f"unity-tune: @{graph.name} is a plan already; search with --mixed-precision")
        placed = graph if is_plan else run(graph, on, plan).graph
        for typed in [with_dtype(placed, dtype) for dtype in types] or [placed]:
            yield step(typed)
        if mixed is not None:
            yield step(run(in_mixed_precision(graph, mixed, "unity-tune: --mixed-precision"), on, plan).graph)


def tune(
    wanted: Iterable[TuningTask], measure: Measure, table: TuningTable, refused: dict[str, str], seconds: float
) -> None:
    """
    Time Triton's and PyTorch's implementation of each operator in `wanted` that `table` lacks, and add the times to the
    table, in place. None is begun after `seconds`.

    `measure(task, implementations)` returns, for each implementation, its seconds, or as text why it has none; these
    reasons are added to `refused`, by operator and implementation. Operators without a time for PyTorch are left out of
    the table, which is for choosing between the two.
    """
    end = monotonic() + seconds
    for task in wanted:
        if task.key in table.seconds:
            continue
        if monotonic() > end:
            refused[task.key] = "no time was left"
            continue
        found = measure(task, IMPLEMENTATIONS)
        refused.update({f"{task.key}, {n}": s for n, s in found.items() if isinstance(s, str)})
        row = {n: s for n, s in found.items() if isinstance(s, float)}
        if "torch" in row:
            table.seconds[task.key] = row
            table.kernels[task.key] = task.priced


def describe(machine: str) -> dict[str, str]:
    """
    Describe where a tuning table is measured, as its `about` table (text by key): the kind of device of the machine
    called `machine`, the GPU of this process, and versions.
    """
    import torch
    import triton

    there = torch.cuda.is_available()
    return {
        "machine's device": load(machine).device.name,
        "device": torch.cuda.get_device_name() if there else "none",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if there else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "unity-ir": __version__,
    }


def _parser() -> Parser:
    parser = Parser(prog="unity-tune", description="Measures what operators' implementations take, for emission.")
    parser.add_argument("--version", action="version", version=f"unity-tune {__version__}")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="of the zoo, such as gpt2,layers=2, or FILE.pcg")
    parser.add_argument("--machine", default="box:1", metavar="M", help="whose plan (default: %(default)s)")
    parser.add_argument(
        "--plan", default="data-parallel", help="the strategy (default: %(default)s); of no use for a file that has one"
    )
    parser.add_argument("--types", default="", help="element types, such as f32,bf16 (default: the model's own)")
    parser.add_argument("--mixed-precision", metavar="TYPE", help="measure what computes in bf16 (or f16) of f32, too")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the table to make or add to")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="begin nothing after these")
    return parser


def work(options: Namespace, measure: Measure | None = None) -> int:
    """
    Run `unity-tune` with its parsed options: measure, write the table (also if interrupted), print a summary; return
    the exit code, 130 if it was interrupted. `measure` times a task (see `tune`); None times it on the GPU.

    Raises `UnityError` for wrong options, for a table of another device or version, and without a GPU if `measure` is
    None.
    """
    import torch

    from unity_ir.lowering.measure.implementations import OnGPU, tuning_tasks

    if measure is None and not torch.cuda.is_available():
        raise UnityError(
            "unity-tune: PyTorch sees no GPU here, where Triton is only its interpreter; run it where there is one, "
            "or write programs for CPUs with -t triton{kernels=torch}"
        )
    if not options.seconds > 0:
        raise UnityError("unity-tune: --seconds is above 0")
    about = describe(options.machine)
    table = read_table(options.out) if options.out.exists() else TuningTable()
    different = [k for k, v in about.items() if table.about and table.about.get(k) != v]
    if different:
        raise UnityError(f"unity-tune: {options.out} was measured with another {', '.join(different)}; name a new file")
    table.about = about
    types = [t for t in options.types.split(",") if t]
    if not options.out.absolute().parent.is_dir():
        raise UnityError(f"unity-tune: {options.out}: there is no folder {options.out.parent}")
    # All before the first is measured: what is wrong with one is said at once.
    wanted = list(tuning_tasks(programs(options.models, types, options.plan, options.machine, options.mixed_precision)))
    before, interrupted = len(table.seconds), False
    refused: dict[str, str] = {}
    with OnGPU() if measure is None else nullcontext(measure) as timed:
        try:
            tune(wanted, timed, table, refused, options.seconds)
        except KeyboardInterrupt:
            interrupted = True
    table.write(options.out)
    for what, reason in refused.items():
        tell(f"not measured: {what}: {reason}")
    show(table)
    print(f"{options.out}: {len(table.seconds) - before} operators measured, {len(table.seconds)} in all")
    return 130 if interrupted else 0


def show(table: TuningTable) -> None:
    """
    Print, for each implementation in the table, for how many operators it is the fastest, and by what factor at most.
    """
    shown = Shown(title="faster implementations", title_justify="left")
    for heading in ("implementation", "operators", "most times as fast"):
        shown.add_column(heading)
    for name in IMPLEMENTATIONS:
        own = [row for key, row in table.seconds.items() if table.fastest(key) == name]
        ratios = [max(row.values()) / row[name] for row in own]
        shown.add_row(name, str(len(own)), f"{max(ratios, default=1.0):.2f}")
    Console().print(shown)


def main(argv: Sequence[str] | None = None, measure: Measure | None = None) -> int:
    """
    Run `unity-tune` on the arguments `argv` (None: those of the process); return the exit code. `measure` times a task
    (see `tune`); None times it on the GPU. Errors in the input print one line on stderr: exit code 1.
    """
    return exit_code(_parser(), lambda options: work(options, measure), argv)


if __name__ == "__main__":
    sys.exit(main())
