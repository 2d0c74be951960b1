"""
`unity-profile`: measures kernels and collectives on the machine it runs on, for the cost model.

    unity-profile model.pcg --machine=cpu:2 --out cpu.sqlite

First the distinct kernels of the plans found for the models, then those of all configurations of their operators, in
random order, as far as `--limit` and `--seconds` allow; and collectives, over sizes. Kernels that the profile has are
not measured again, so a stopped run can be continued.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from unity_ir.api.graphs import read_graphs
from unity_ir.cost.plan import update_bytes, update_kernel
from unity_ir.cost.time import Kernel
from unity_ir.cost.work import applied, kernel_of, repeats
from unity_ir.errors import UnityError
from unity_ir.forms.kinds import KINDS
from unity_ir.machine.device import Device, fit_path
from unity_ir.machine.fit import FEWEST, Fit, FittedLine, Measurement, fit, fit_line
from unity_ir.machine.load import PROFILE, load
from unity_ir.machine.model import Machine
from unity_ir.machine.profile import CollectiveRow, KernelRow, ProfileFile, open_profile
from unity_ir.messages import tell
from unity_ir.pcg.collectives import PROFILED
from unity_ir.pcg.differentiate import differentiate, nodes_with_gradient
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.node import Node
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.search.layouts.axes import degrees_of
from unity_ir.search.layouts.operator_table import operator_table
from unity_ir.search.layouts.space import Spaces
from unity_ir.search.run import run
from unity_ir.tools.command_line import Parser, exit_code
from unity_ir.version import __version__

if TYPE_CHECKING:
    from unity_ir.lowering.measure.operators import Job, OperatorJob

ELEMENTS = tuple(4**k for k in range(5, 12))
"""Elements of the pieces that collectives are measured on: 4 kB to 16 MB in f32."""


class MeasureRequests:
    """
    The kernels that `unity-profile` is to measure, each once, most important first, with the call that is timed
    (`jobs`), and the operators that cannot be measured (`refused`).
    """

    def __init__(self) -> None:
        self.jobs: dict[Kernel, OperatorJob] = {}
        self.refused: dict[str, str] = {}
        """Per operator that cannot be measured, the reason."""
        self.known: set[tuple[str, tuple[int, ...]]] = set()

    def add(self, node: Node) -> None:
        """
        Add the kernel of a compute node, with the shapes that one device computes, unless it was added before. If it
        cannot be measured, record the reason in `refused`.
        """
        from unity_ir.lowering.measure.operators import operator_job

        kernel = kernel_of(node)
        if self._is_new(kernel):
            try:
                self.jobs[kernel] = operator_job(node)
            except UnityError as error:
                self.refused[node.op] = str(error)

    def add_update(self, weight: Node, optimizer: Optimizer) -> None:
        """Add the kernel by which `optimizer` updates one device's piece of a weight, unless it was added before."""
        from unity_ir.lowering.measure.operators import update_job

        (type,) = weight.types
        elements = 1
        for size in type.piece_shape:
            elements *= size
        moved = update_bytes(elements * ELEMENT_BYTES[type.dtype], optimizer)
        kernel = update_kernel(elements, moved, type.dtype, optimizer)
        if self._is_new(kernel):
            self.jobs[kernel] = update_job(elements, type.dtype, optimizer)

    def _is_new(self, kernel: Kernel) -> bool:
        key = (kernel.operator, kernel.sizes)
        new = key not in self.known
        self.known.add(key)
        return new


def _measure_requests(
    graphs: Sequence[Graph], machine: Machine, optimizers: Sequence[Optimizer], limit: int, seed: int
) -> MeasureRequests:
    """
    Return the kernels to measure: those whose time a search on `machine` asks for, for these graphs and for training
    with each of `optimizers`.

    The kernels of plans found for the graphs (or of the graph, if it is a plan) come first, all of them; others follow,
    in an order drawn from `seed`, until there are `limit`.
    """
    asked = MeasureRequests()
    for graph in graphs:
        for step in _steps(graph, machine, optimizers):
            for node in step.nodes():
                if node.is_compute:
                    asked.add(node)
            for update in step.updates:
                asked.add_update(update.weight.node, step.optimizer or Optimizer())
    random = Random(seed)
    configurations = [c for g in graphs if not _is_planned(g) for c in _configurations(g, machine)]
    random.shuffle(configurations)
    for node, needs, degrees in configurations:
        if len(asked.jobs) >= limit:
            break
        operands = tuple((v.type.shape, v.type.dtype) for v in node.operands)
        forward, backward = applied(node.op, operands, node.attributes, degrees, needs, repeats(node))
        for each in (forward, *backward):
            asked.add(each)
    return asked


def _is_planned(graph: Graph) -> bool:
    return bool(graph.updates) or any(node.is_parallel or node.view is not None for node in graph.nodes())


def _steps(graph: Graph, machine: Machine, optimizers: Sequence[Optimizer]) -> Iterator[Graph]:
    """Yield the training steps of the graph, if it is placed, or of the plans that a search finds for it."""
    plans: list[Graph] = [graph] if _is_planned(graph) else []
    if not plans:
        for strategy in ("joint", "data-parallel"):
            with suppress(UnityError):
                plans.append(run(graph, machine, strategy).graph)
    for plan in plans:
        for optimizer in optimizers:
            step = plan if plan.updates else differentiate(plan, optimizer, machine.mesh)
            yield fuse_collectives(step)


def _configurations(
    graph: Graph, machine: Machine
) -> Iterator[tuple[Node, tuple[bool, ...], tuple[tuple[str, int], ...]]]:
    """
    Yield every operator in every configuration of its table: node, whether each operand's gradient is computed, and
    degrees by index variable.
    """
    spaces = Spaces(machine)
    with_gradient = nodes_with_gradient(graph)
    for node in graph.nodes():
        if not node.is_compute:
            continue
        needs = tuple(node in with_gradient and v.node in with_gradient for v in node.operands)
        table = operator_table(node, needs, spaces)
        variables = [role for role in table.roles if isinstance(role, str)]
        rows: list[list[int]] = degrees_of(table.counts, spaces.groups)[:, : len(variables)].tolist()
        for row in dict.fromkeys(map(tuple, rows)):
            yield node, needs, tuple((v, d) for v, d in zip(variables, row, strict=True) if d > 1)


def collectives(ranks: int) -> list[tuple[str, int, int]]:
    """
    Return the collectives to measure on `ranks` ranks, as (name, number of ranks in a group, elements of a rank's
    piece); [] for one rank.
    """
    members = [m for m in range(2, ranks + 1) if ranks % m == 0]
    return [(kind, m, size) for m in members for size in ELEMENTS for kind in PROFILED]


# --- measuring


def describe(device: str, machine: Machine) -> dict[str, str]:
    """
    Describe where a profile is measured, as its `about` table (text by key): the kind of the machine's device, and the
    host, versions and date of this process, which measures on `device` (`cpu` or `cuda`).
    """
    import torch

    try:
        import triton

        with_triton = str(triton.__version__)
    except ImportError:
        with_triton = "none"
    host = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {os.cpu_count()} CPUs"
    return {
        "device": machine.device.name,
        "host": host,
        "runs on": device,
        "threads": "1",
        "torch": torch.__version__,
        "triton": with_triton,
        "python": platform.python_version(),
        "unity-ir": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(file: ProfileFile, asked: MeasureRequests, ranks: int, options: Namespace) -> int:
    """
    Measure the requested kernels that the profile `file` lacks, and on CPUs the collectives, too, and add them to it;
    return the number added. `ranks` processes run each kernel at the same time.

    `options` is the parsed command line: `seconds` is the time after which no measurement is begun, `each` the seconds
    for one measurement, `limit` the most kernels (collectives, which come first, are not counted), `device` what to
    measure on, `cpu` or `cuda`. Kernels that fail are added to `asked.refused`. Raises `UnityError` if a process dies.
    """
    from unity_ir.lowering.measure.operators import CollectiveJob, RankPool

    have = {(row.operator, row.sizes) for row in file.kernels(ranks)}
    kernels = [(k, job) for k, job in asked.jobs.items() if (k.operator, k.sizes) not in have][: options.limit]
    moved = {(row.kind, row.members, row.bytes) for row in file.collectives(ranks)}
    moves = [CollectiveJob(*c) for c in (collectives(ranks) if options.device == "cpu" else ())]
    moves = [c for c in moves if (c.kind, c.members, c.bytes) not in moved]
    jobs: list[tuple[Kernel | None, Job]] = [*((None, c) for c in moves), *kernels]
    end = monotonic() + options.seconds
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    added = 0
    with (
        RankPool(ranks, options.device, options.each) as processes,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("measuring", total=len(jobs))
        for kernel, job in jobs:
            if monotonic() > end:
                break
            bar.advance(task)
            try:
                found = processes.measure(job)
            except UnityError as error:
                if "died" in str(error):
                    raise
                asked.refused[str(job.kind if isinstance(job, CollectiveJob) else job.name)] = str(error)
                continue
            now = datetime.now(UTC).isoformat(timespec="seconds")
            if kernel is None:
                assert isinstance(job, CollectiveJob)
                row = CollectiveRow(job.kind, job.members, job.bytes, ranks, **asdict(found), measured=now)
                file.add_collective(row)
            else:
                file.add_kernel(
                    KernelRow(
                        kernel.operator,
                        kernel.sizes,
                        ranks,
                        kernel.kind,
                        kernel.dtype,
                        kernel.flops,
                        kernel.bytes,
                        **asdict(found),
                        measured=now,
                    )
                )
            added += 1
    return added


# --- fitting


def fits(file: ProfileFile, device: Device, ranks: int) -> dict[str, Fit]:
    """
    Fit the efficiency of `device` to the kernels in `file` that were measured with `ranks` processes at the same time;
    return the fitted curve of each kind of kernel, by kind. Kinds with fewer than `FEWEST` measurements are left out.
    """
    samples: dict[str, list[Measurement]] = {}
    for row in file.kernels(ranks):
        if row.dtype in device.flops:
            sample = Measurement(row.flops, row.bytes, device.flops[row.dtype], row.seconds)
            samples.setdefault(row.kind, []).append(sample)
    return {k: fit(samples[k], device.memory_bandwidth) for k in KINDS if len(samples.get(k, ())) >= FEWEST}


def lines(file: ProfileFile, ranks: int) -> dict[str, FittedLine]:
    """
    Fit a line (latency in seconds, bandwidth in bytes/s) to the measurements in `file` of each collective and group
    size, made with `ranks` ranks; return the lines by names such as `all_reduce-2`. Those measured at fewer than 3
    sizes are left out.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in file.collectives(ranks):
        points.setdefault(f"{row.kind}-{row.members}", []).append((row.bytes, row.seconds))
    return {name: fit_line(each) for name, each in sorted(points.items()) if len(each) > 2}


def fit_text(found: Mapping[str, Fit], moves: Mapping[str, FittedLine], about: Mapping[str, str], ranks: int) -> str:
    """
    Return the text of the `.toml` file that is written beside a profile measured with `ranks` ranks: the fitted curves
    `found` by kind of kernel, the fitted lines `moves` by collective and group size (`all_reduce-2`), their errors, and
    the profile's `about` table.
    """
    text = [
        f"# Fitted by unity-profile to what was measured with {ranks} ranks at work at once: see docs/profiles.md.",
        "",
        "[about]",
        *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in about.items()),
        f"ranks = {ranks}",
    ]
    for kind, each in found.items():
        text += ["", f"[curves.{kind}]", *(f"{name} = {value!r}" for name, value in asdict(each.curve).items())]
        text += [
            f"samples = {each.samples}",
            f"median_error = {each.median:.3f} # |estimated / measured - 1|",
            f"ninety_percent_error = {each.percentile_90:.3f} # 90% of the samples are no further off",
        ]
    for name, line in moves.items():
        text += [
            "",
            f"[collectives.{name}]",
            f"latency = {line.latency:.3g} # seconds",
            f"bandwidth = {line.bandwidth:.3g} # bytes/s of a rank's piece",
            f"samples = {line.samples}",
            f"median_error = {line.median:.3f}",
        ]
    return "\n".join(text) + "\n"


def write(path: Path, text: str) -> None:
    """Write text to the file at `path` in UTF-8, replacing it atomically."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


# --- the command line


def _parser() -> Parser:
    parser = Parser(prog="unity-profile", description="Measures operators and collectives for the cost model.")
    parser.add_argument("--version", action="version", version=f"unity-profile {__version__}")
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a .pcg file, or a model of the zoo such as gpt2,layers=2; of a plan, the operators of that plan",
    )
    parser.add_argument("--machine", required=True, metavar="M", help="the machine that a search is for: cpu:2, ...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure on (default cpu)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.sqlite", help="the profile to make or add to")
    parser.add_argument("--limit", type=int, default=500, metavar="N", help="kernels at most (default 500)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="stop measuring after so many (default 300)"
    )
    parser.add_argument(
        "--each", type=float, default=0.1, metavar="S", help="seconds to spend on each measurement (default 0.1)"
    )
    parser.add_argument("--adam", action="store_true", help="measure the updates of Adam, too")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order in which configurations are tried (default 0)"
    )
    return parser


def profile(options: Namespace) -> int:
    """
    Run `unity-profile` with its parsed options: find plans, measure their kernels, add the times to the profile, write
    the fitted curves beside it, and print a summary; return the exit code, 130 if it was interrupted (what was measured
    until then is kept). Raises `UnityError` for wrong options.
    """
    import torch

    # Not a number is not above 0 either.
    if options.limit < 0 or not options.seconds > 0 or not 0 < options.each < inf:
        raise UnityError("unity-profile: --limit is 0 or more, --seconds and --each are above 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UnityError(
            "unity-profile: PyTorch sees no GPU here; leave out --device cuda, or run it where there is one"
        )
    described, given, _ = options.machine.partition(PROFILE)
    if given:
        raise UnityError(f"unity-profile: what is measured goes to --out; leave {PROFILE}.. out of --machine")
    machine = load(described)
    ranks = machine.devices if options.device == "cpu" else 1
    optimizers = [Optimizer(), *([Optimizer("adam")] if options.adam else [])]
    graphs = [g for m in options.models for g in read_graphs(m)]
    about = describe(options.device, machine)
    if options.out.exists():
        # What is wrong with it is said before the search.
        with open_profile(options.out, create=about):
            pass
    asked = _measure_requests(graphs, machine, optimizers, options.limit, options.seed)
    with open_profile(options.out, create=about) as file:
        interrupted = False
        added = 0
        try:
            added = measure(file, asked, ranks, options)
        except KeyboardInterrupt:
            interrupted = True
        found = fits(file, machine.device, ranks)
        fitted = fit_path(options.out, ranks)
        if found:
            write(fitted, fit_text(found, lines(file, ranks), file.about, ranks))
        total = len(file.kernels(ranks))
    for operator, reason in sorted(asked.refused.items()):
        tell(f"not measured: {operator}: {reason}")
    if interrupted:
        tell(f"unity-profile: stopped; {options.out} has {total} kernels, and the same command goes on")
        return 130
    print(
        f"{options.out}: {added} measured, {total} kernels with {ranks} ranks in all; {len(asked.jobs)} were asked for"
    )
    if found:
        _print(found, fitted)
    return 0


def _print(found: Mapping[str, Fit], path: Path) -> None:
    table = Table(title=f"curves in {path}")
    for heading in ("kind", "samples", "median error", "90% within"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, each in found.items():
        table.add_row(kind, str(each.samples), f"{each.median:.1%}", f"{each.percentile_90:.1%}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run `unity-profile` on the arguments `argv` (None: those of the process); return the exit code. Errors in the input
    print one line on stderr: exit code 1.
    """
    return exit_code(_parser(), profile, argv)


if __name__ == "__main__":
    sys.exit(main())
