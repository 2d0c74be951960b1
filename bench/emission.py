"""
Measure emitted programs: seconds to print them, their lines, and what fused groups of operators save.

    python bench/emission.py [--model M] [--machines M ..] [--plans S ..] [--groups M ..] [--json FILE]

Prints processor seconds from a plan to its Triton program, and the program's lines; aims for BERT-Large are 10 s and
5,500 lines. Then, for each model of `--groups` in data parallelism on the first machine: lines of the step, launches,
and bytes read and written by all operators, with operators alone and in groups (`plan/groups.py`). Exits with
code 1 where an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.kernels.launchers import launcher
from unity_ir.lowering.emit.printer import emit
from unity_ir.machine import load
from unity_ir.machine.model import Machine
from unity_ir.models import from_text
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.graph import Graph, erase
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import PlanOptions, plan_step
from unity_ir.plan.program import Program
from unity_ir.search.run import run

SECONDS, LINES = 10.0, 5500
"""Aims for BERT-Large."""


def program_of(plan: Graph, machine: Machine) -> Program:
    """Return one rank's training step of a plan."""
    return lower(fuse_collectives(differentiate(plan, Optimizer(), machine.mesh)), machine)


def emission(model: str, where: str, strategy: str) -> dict[str, Any]:
    """Measure emission of a model's plan: processor seconds and lines."""
    machine = load(where)
    plan = run(from_text(model), machine, strategy).graph
    start = time.process_time()
    text = emit(plan_step(program_of(plan, machine)), erase(plan)).text
    seconds = time.process_time() - start
    return {"machine": where, "plan": strategy, "seconds": seconds, "lines": text.count("\n")}


def groups(model: str, where: str, fuse: bool) -> dict[str, Any]:
    """Count what one rank's operators launch, read and write in data parallelism, fused or not."""
    machine = load(where)
    plan = run(from_text(model), machine, "data-parallel").graph
    planned = plan_step(program_of(plan, machine), PlanOptions(fuse=fuse))
    program = planned.program
    functions = emit(planned, erase(plan)).text.split("\ndef ")
    (step,) = (text for text in functions if "# --- backward" in text)
    launches = moved = 0
    for each in program.body:
        if isinstance(each, Compute):
            operator = local_operator(program, each)
            made = launcher(operator.line, operator.dtypes, planned.implementations[each], operator.divided)
            launches += len(made.work) or 1
            tensors = [program.tensors[r] for r in (*dict.fromkeys(each.operands), *each.results)]
            moved += sum(prod(t.local(program.mesh)) * ELEMENT_BYTES[t.dtype] for t in tensors)
    return {"model": model, "groups": fuse, "lines": step.rstrip().count("\n"), "launches": launches, "bytes": moved}


def shown(value: object) -> str:
    match value:
        case bool() | str():
            return str(value)
        case float():
            return f"{value:.2f}"
        case _:
            return f"{value:,}"


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(shown, row.values()))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[1])
    parser.add_argument("--model", default="bert_large")
    parser.add_argument("--machines", nargs="+", default=["box:4", "box:8"])
    parser.add_argument("--plans", nargs="+", default=["data-parallel", "expert", "joint", "unity", "fsdp", "tofu"])
    parser.add_argument("--groups", nargs="*", default=["bert_large", "gpt2"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    emitted = [emission(options.model, m, s) for m in options.machines for s in options.plans]
    show(f"emission of {options.model}", emitted)
    grouped = [groups(model, options.machines[0], fuse) for model in options.groups for fuse in (False, True)]
    if grouped:
        show(f"operators alone and in groups, data-parallel on {options.machines[0]}", grouped)
    if options.json is not None:
        found = {"processor": processor(), "python": platform.python_version(), "model": options.model}
        found |= {"emission": emitted, "groups": grouped}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    missed = [e for e in emitted if e["seconds"] > SECONDS or e["lines"] > LINES]
    for each in missed:
        print(f"missed: {each['plan']} on {each['machine']}: {each['seconds']:.1f} s, {each['lines']} lines")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
