"""
`unity-aot`: compiles every kernel of models' programs for GPUs that need not be present, and checks their resources.

    unity-aot bert_large dlrm --types bf16 --targets cuda:90

A kernel must compile, keep everything in registers, fit shared memory, and contain the matrix and copy instructions
that its launch expects. Exits with code 1 where one does not, where time ran out before all were compiled, or where a
model has no program on any of the machines.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.table import Table

from unity_ir.errors import UnityError
from unity_ir.kernels.triton.launch import Compiled
from unity_ir.lowering.emit.printer import emit
from unity_ir.lowering.measure.aot import INSTRUCTIONS, SHARED_LIMITS, Job, Outcome, Resources
from unity_ir.lowering.measure.aot_check import (
    CHECKS,
    Cache,
    compile_jobs,
    jobs,
    merged,
    triton_version,
    violations,
)
from unity_ir.machine import load
from unity_ir.machine.model import Machine
from unity_ir.machine.tuned import IMPLEMENTATIONS
from unity_ir.messages import tell
from unity_ir.models import from_text, names
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.elements import with_dtype
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.search.baselines.recipe import Degrees, recipe
from unity_ir.search.run import run
from unity_ir.search.strategy import all_strategies
from unity_ir.tdl.counts import rounds
from unity_ir.tdl.functions import ROUNDED
from unity_ir.tools.command_line import Parser, exit_code
from unity_ir.version import __version__

RING = "ring"
"""Among plans: keys and values of attention go around all devices (`plan.rings`), of models that have attention."""
PLANS = ("data-parallel", "expert", "joint", RING)
MIXED = "mixed"
"""Among element types: float32 weights and gradients, read and computed in bf16."""
TYPES = ("f32", "bf16", ROUNDED, MIXED)
"""`float8` is mixed precision in which products of large weights read their operands in 8 bits."""
MACHINES = ("dgx-h100", "dgx-h100:8")
"""The second machine is for mixtures of experts: their weights and optimizer states in float32 exceed 8 H100s."""


@dataclass
class CompileRequests:
    """
    The kernels that `unity-aot` is to compile, each once, as compilations to do (`jobs`, by their digest,
    `aot_check.key`); the models that use each; and the programs that they come from (`programs`, each as the text
    `model, plan, element type, GPUs`).
    """

    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    models: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    """Per kernel key, the models that use it."""
    programs: list[str] = field(default_factory=list[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Per program that could not be made, the error on the last machine tried."""
    without: list[str] = field(default_factory=list[str])
    """Models without a program on any machine."""

    def of(self, target: str) -> dict[str, Job]:
        """
        Return those of `jobs`, by the same digests, whose kernel is launched on GPUs of `target`, such as `cuda:90`.
        """
        return {name: job for name, job in self.jobs.items() if job.compiled.is_for(target)}

    def add(self, other: CompileRequests) -> None:
        """
        Add the kernels, programs and errors of `other` to this object, in place. A kernel in both is kept once, with
        the models of both.
        """
        for name, job in other.jobs.items():
            self.jobs[name] = merged(self.jobs[name], job) if name in self.jobs else job
            self.models.setdefault(name, {}).update(other.models[name])
        self.programs += other.programs
        self.refused |= other.refused
        self.without += other.without


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """
    A kernel compiled for a target. `outcome` is what it takes of the device (registers, shared memory, ..), or the
    compiler's error; `wrong` has a text for each check that it fails.
    """

    job: Job
    models: tuple[str, ...]
    target: str
    outcome: Outcome
    wrong: tuple[str, ...]


def compile_requests(
    models: Sequence[str],
    plans: Sequence[str],
    types: Sequence[str],
    machines: Sequence[str],
    convolution: str,
    processes: int = 1,
) -> CompileRequests:
    """
    Plan and emit a program for each model, plan and element type; return the distinct kernels of all programs, to be
    compiled.

    Models and machines are given by name, `plans` are names of search strategies, or `ring`, `types` element types, or
    `mixed` (mixed precision) or `float8` (mixed precision with products in 8 bits); `convolution` is the implementation
    of convolutions, `triton` or `torch`. Each plan is made on the first of `machines` where it fits; programs that
    cannot be made are listed in the result. Programs of the last of `types` train with Adam, the others with SGD.
    `processes` is the number of processes that work on different models in parallel. Raises `UnityError` if one of them
    is killed.
    """
    asked = CompileRequests()
    one = partial(_ask, plans=plans, types=types, machines=machines, convolution=convolution)
    if processes == 1 or len(models) == 1:
        for found in map(one, models):
            asked.add(found)
        return asked
    try:
        with ProcessPoolExecutor(processes) as pool:
            for found in pool.map(one, models):
                asked.add(found)
    except BrokenProcessPool as error:
        raise UnityError("unity-aot: a process was killed, perhaps for its memory; take fewer --jobs") from error
    return asked


def _ask(
    model: str, plans: Sequence[str], types: Sequence[str], machines: Sequence[str], convolution: str
) -> CompileRequests:
    asked, loaded = CompileRequests(), [load(name) for name in machines]
    graph = from_text(model)
    plans_made: dict[tuple[str, str], tuple[Graph, Machine] | None] = {}
    has_attention = any(node.op.startswith("attention") for node in graph.nodes())
    for plan, dtype in product([p for p in plans if p != RING or has_attention], types):
        precision = dtype if dtype in (MIXED, ROUNDED) else ""
        key = plan, precision
        if key not in plans_made:
            products = ROUNDED if dtype == ROUNDED else ""
            given = mixed_precision(graph, "bf16", products=products) if precision else graph
            # Where no weight is large, it is the same program.
            if products and not any(rounds(n.analysis.bound, ("bf16",)) for n in given.nodes() if n.is_compute):
                continue
            name = f"{model}, {plan}{f', {precision}' if precision else ''}"
            plans_made[key] = _planned(asked, given, name, plan, loaded)
        if (planned := plans_made[key]) is None:
            continue
        placed, on = planned
        what = f"{model}, {plan}, {dtype}"
        typed = placed if precision else with_dtype(placed, dtype)
        optimizer = Optimizer("adam" if dtype == types[-1] else "sgd")
        try:
            step = fuse_collectives(differentiate(typed, optimizer, on.mesh))
            emitted = emit(plan_step(lower(step, on), PlanOptions("triton", convolution=convolution)), erase(typed))
        except UnityError as error:
            asked.refused[what] = str(error)
            continue
        found = jobs(emitted)
        asked.add(CompileRequests(found, {name: {model: None} for name in found}, [f"{what}, {on.mesh.devices} GPUs"]))
    if not asked.programs:
        asked.without.append(model)
    return asked


def _planned(
    asked: CompileRequests, graph: Graph, what: str, plan: str, on: Sequence[Machine]
) -> tuple[Graph, Machine] | None:
    """
    Return a model's plan on the first machine that has one, and that machine; None, and an entry in `refused` called
    `what`, otherwise.
    """
    refusal = ""
    for machine in on:
        try:
            if plan == RING:
                return recipe(graph, machine, Degrees(cp=machine.mesh.devices, ring=True), "ring"), machine
            return run(graph, machine, plan).graph, machine
        except UnityError as error:
            refusal = str(error)
    asked.refused[what] = refusal
    return None


def compile_and_check(asked: CompileRequests, targets: Sequence[str], options: Namespace) -> Iterator[CompiledKernel]:
    """
    Compile the requested kernels for each target, such as `cuda:90`, and check them; yield a result for each kernel and
    target. No kernel is begun after `options.seconds`.

    `options` is the parsed command line: `cache` is the SQLite file in which results are looked up and kept, `jobs` the
    number of processes, `seconds` the time limit.
    """
    cache, end = Cache(options.cache), monotonic() + options.seconds
    for target in targets:
        for name, outcome in compile_jobs(asked.of(target), target, cache, options.jobs, end - monotonic()):
            job = asked.jobs[name]
            yield CompiledKernel(
                job, tuple(asked.models[name]), target, outcome, tuple(violations(job, outcome, target))
            )


# --- the report


def _summary(rows: Sequence[CompiledKernel], asked: CompileRequests) -> list[dict[str, object]]:
    """
    Return a table row per target, as values by column title: numbers of kernels and violations, most registers and
    shared bytes, and how many kernels have each instruction.

    `rows` are the compiled kernels, `asked` those that were to be compiled.
    """
    found: list[dict[str, object]] = []
    for target in dict.fromkeys(row.target for row in rows):
        own = [row for row in rows if row.target == target]
        taken = [row.outcome for row in own if isinstance(row.outcome, Resources)]
        found.append(
            {
                "target": target,
                "kernels": len(own),
                "not compiled for lack of time": len(asked.of(target)) - len(own),
                "violations": sum(bool(row.wrong) for row in own),
                **{f"violations: {check}": n for check, n in _by_check(own).items()},
                "most registers": max((r.registers for r in taken), default=0),
                "spilling": sum(r.spills > 0 for r in taken),
                "most shared bytes": max((r.shared_bytes for r in taken), default=0),
                "shared bytes allowed": SHARED_LIMITS[target],
                "expected to use a matrix unit": sum("mma" in row.job.compiled.expects for row in own),
                "expected to be pipelined": sum("pipelined" in row.job.compiled.expects for row in own),
                **{name: sum(name in r.instructions for r in taken) for name in INSTRUCTIONS},
                "compiler seconds": round(sum(r.seconds for r in taken), 1),
            }
        )
    return found


def _by_check(rows: Sequence[CompiledKernel]) -> dict[str, int]:
    """
    Return the number of compiled kernels that fail each check (`aot_check.CHECKS`), by the check's name; 0 for none.
    """
    return {check: sum(any(w.startswith(check) for w in row.wrong) for row in rows) for check in CHECKS}


def _by_model(rows: Sequence[CompiledKernel]) -> list[dict[str, object]]:
    """
    Return a table row per model and target, sorted, as values by column title: numbers of kernels and violations, and
    of kernels that fail each check, where any do.
    """
    found: dict[tuple[str, str], list[CompiledKernel]] = {}
    for row in rows:
        for model in row.models:
            found.setdefault((model, row.target), []).append(row)
    return [
        {
            "model": model,
            "target": target,
            "kernels": len(own),
            "violations": sum(bool(row.wrong) for row in own),
            **{check: n for check, n in _by_check(own).items() if n},
        }
        for (model, target), own in sorted(found.items())
    ]


def launch_text(one: Compiled) -> str:
    """
    Describe how a kernel is launched, as text: element types of its pointers, tile sizes, number of warps, such as
    `bf16 bf16 128x128x64, 8 warps`.
    """
    types = dict.fromkeys(t.lstrip("*") for t in one.signature.values() if t.startswith("*"))
    tiles = [str(v) for n, v in one.constants.items() if n.isupper() and isinstance(v, int) and v is not True and v > 1]
    return f"{' '.join(types)} {'x'.join(tiles)}, {one.num_warps} warps"


def table_row(row: CompiledKernel) -> dict[str, object]:
    """
    Return a compiled kernel as a table row (values by column title): its name, models, target, launch, resources and
    failed checks. The numbers are None if it did not compile.
    """
    took = row.outcome if isinstance(row.outcome, Resources) else None
    return {
        "kernel": row.job.compiled.kernel,
        "models": ", ".join(row.models),
        "target": row.target,
        "launch": launch_text(row.job.compiled),
        "registers": took.registers if took else None,
        "spills": took.spills if took else None,
        "shared bytes": took.shared_bytes if took else None,
        "instructions": ", ".join(took.instructions) if took else "",
        "wrong": "; ".join(row.wrong),
    }


def show(rows: Sequence[CompiledKernel], asked: CompileRequests, every: bool) -> None:
    """
    Print the results of `unity-aot` as tables: one with a column per target, one with a row per model and target, and
    one of the kernels that fail a check (with `every`, of all kernels).

    `rows` are the compiled kernels, `asked` those that were to be compiled.
    """
    console = Console(width=None if sys.stdout.isatty() else 200)
    found = _summary(rows, asked)
    if found:
        lines = [{"": name, **{str(each["target"]): each[name] for each in found}} for name in found[0]]
        console.print(_table("kernels", lines[1:]))
        columns = ("model", "target", "kernels", "violations")
        console.print(_table("by model", [{name: each[name] for name in columns} for each in _by_model(rows)]))
    shown = [table_row(row) for row in rows if every or row.wrong]
    if shown:
        console.print(_table("every kernel" if every else "violations", shown))


def _table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*("" if v is None else str(v) for v in row.values()))
    return table


def _report(rows: Sequence[CompiledKernel], asked: CompileRequests, options: Namespace) -> dict[str, object]:
    """
    Return the results as a JSON object, the content of the file that `--json` names.

    `rows` are the compiled kernels, `asked` the programs they are of and those that could not be emitted; of `options`,
    the parsed command line, only the machines are read.
    """
    return {
        "triton": triton_version(),
        "unity-ir": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machines": options.machine or MACHINES,
        "programs": asked.programs,
        "not emitted": asked.refused,
        "models without a program": asked.without,
        "distinct kernels": len(asked.jobs),
        "targets": _summary(rows, asked),
        "models": _by_model(rows),
        "violations": [table_row(row) for row in rows if row.wrong],
    }


# --- the command line


def _list(known: Sequence[str], what: str, text: str) -> list[str]:
    found = [name for name in text.split(",") if name]
    for name in found or [text]:
        if name not in known:
            raise UnityError(f"unity-aot: no {what} {name!a}; known are {', '.join(known)}")
    return found


def _parser() -> Parser:
    parser = Parser(prog="unity-aot", description="Compiles the kernels of models' programs ahead of time.")
    parser.add_argument("--version", action="version", version=f"unity-aot {__version__}")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of the zoo, such as gpt2,layers=2 (default: all)")
    parser.add_argument(
        "--machine",
        action="append",
        metavar="M",
        help=f"whose plans; if given again, where a plan does not fit those before (default: {', '.join(MACHINES)})",
    )
    parser.add_argument("--plans", default=",".join(PLANS), help="strategies, or ring (default: %(default)s)")
    parser.add_argument(
        "--types",
        default=",".join(TYPES),
        help="element types, mixed: f32 read as bf16, or float8: so with products in 8 bits (default: %(default)s)",
    )
    parser.add_argument("--targets", default=",".join(SHARED_LIMITS), help="GPUs (default: %(default)s)")
    parser.add_argument("--convolution", default="triton", help="kernels of convolutions, or torch (default: triton)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="begin no kernel after these")
    parser.add_argument("--cache", type=Path, default=Path("build/aot.sqlite"), metavar="FILE", help="what is known")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to a file")
    parser.add_argument("--all", action="store_true", help="show every kernel, not only those with something wrong")
    return parser


def check(options: Namespace) -> int:
    """
    Run `unity-aot` with its parsed options: emit the programs, compile and check their kernels, print the report;
    return the exit code.

    It is 1 if a check fails, time runs out before all are compiled, or a model has no program. Raises `UnityError` for
    wrong options.
    """
    targets = _list(list(SHARED_LIMITS), "target", options.targets)
    types = _list(("f32", "bf16", "f16", ROUNDED, MIXED), "element type", options.types)
    plans = _list((*all_strategies(), RING), "plan", options.plans)
    _list(IMPLEMENTATIONS, "implementation", options.convolution)
    if options.jobs < 1 or not options.seconds >= 0:
        raise UnityError("unity-aot: --jobs is 1 or more, --seconds 0 or more")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UnityError(f"unity-aot: {options.json}: there is no folder {options.json.parent}")
    for model in options.models:
        # At once, rather than in a process of its own.
        from_text(model)
    asked = compile_requests(
        options.models or names(), plans, types, options.machine or MACHINES, options.convolution, options.jobs
    )
    rows = list(compile_and_check(asked, targets, options))
    show(rows, asked, options.all)
    for what, reason in asked.refused.items():
        tell(f"not emitted: {what}: {reason}")
    if options.json is not None:
        options.json.write_text(json.dumps(_report(rows, asked, options), indent=1) + "\n", encoding="utf-8")
    wrong, left = sum(bool(row.wrong) for row in rows), sum(len(asked.of(t)) for t in targets) - len(rows)
    print(f"{len(asked.jobs)} distinct kernels, {len(rows)} compilations, {wrong} violations, {left} left out")
    for model in asked.without:
        tell(f"unity-aot: none of the programs of {model} could be emitted")
    return 1 if wrong or left or asked.without else 0


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run `unity-aot` on the arguments `argv` (None: those of the process); return the exit code. Errors in the input
    print one line on stderr: exit code 1.
    """
    return exit_code(_parser(), check, argv)


if __name__ == "__main__":
    sys.exit(main())
