"""
Count what one training step of emitted programs costs a GPU: launches, and bytes read and written, by kind.

    python bench/counts.py [--only bert_large,gpt2] [--json FILE]

The programs are those of `gpu_prepare.py`: full size, one H100, mixed precision, AdamW. Bytes are those of all operands
and results of every kernel, each once. The floor has all tensors that a plan with the largest groups would store: a
group has at most one product, attention, convolution, gather or scatter, and any number of other operators around it,
as long as no group depends on itself through another one. The optimizer's floor is 28 bytes of a parameter: weight and
two states read and written in float32, the gradient read in bf16, and the weight's cast to bf16 written.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from gpu_prepare import FULL
from models import processor
from rich.console import Console
from rich.table import Table

from unity_ir.cost.kernels import bytes_of_update
from unity_ir.forms.attention import Attention
from unity_ir.forms.classify import classify
from unity_ir.forms.kinds import kind
from unity_ir.forms.rewrite import simplified
from unity_ir.kernels.launchers import launcher
from unity_ir.machine import load
from unity_ir.models import from_text
from unity_ir.pcg.differentiate import differentiate
from unity_ir.pcg.fuse_collectives import fuse_collectives
from unity_ir.pcg.mixed_precision import mixed_precision
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute, Fused, Leaf, Register, UpdateWeight, makes
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.lower import lower
from unity_ir.plan.plan import Plan, PlanOptions, plan_step
from unity_ir.plan.program import Program, global_line
from unity_ir.search.run import run

ANCHORS = ("product", "attention", "gather")
"""Kinds of operators of which a group has one at most."""
LOSSES = ("cross_entropy", "mse")


def plan_of(model: str, options: PlanOptions | None = None) -> Plan:
    """Return the plan of a model's training step on one H100, as gpu_prepare.py emits it."""
    machine = load("dgx-h100:1x1")
    graph = run(mixed_precision(from_text(model), "bf16"), machine, "data-parallel").graph
    return plan_step(lower(fuse_collectives(differentiate(graph, Optimizer("adamw"), machine.mesh)), machine), options)


def kind_of(program: Program, each: Compute) -> str:
    """Return the kind of a kernel in the table of counts."""
    members = each.members if isinstance(each, Fused) else (each,)
    if any(m.operator.startswith(LOSSES) for m in members):
        return "loss"
    if all(m.operator == "cast" for m in members):
        return "cast"
    kinds = {kind(global_line(m.operator, [program.tensors[r] for r in m.operands], m.attributes)) for m in members}
    if "contraction" in kinds:
        operator = local_operator(program, each)
        return "attention" if isinstance(classify(simplified(operator.line, {}), {}), Attention) else "product"
    return "gather" if "gather" in kinds else "reduction" if "reduction" in kinds else "pointwise"


def size(program: Program, register: Register) -> int:
    """Return the bytes of a register on one rank."""
    tensor = program.tensors[register]
    return prod(tensor.local(program.mesh)) * ELEMENT_BYTES[tensor.dtype]


def counts(model: str) -> dict[str, Any]:
    """Return launches and bytes of a step by kind, those of the optimizer, and the floor of bytes."""
    planned = plan_of(model)
    program = planned.program
    launches, moved = Counter[str](), Counter[str]()
    for each in program.body:
        if isinstance(each, Compute):
            operator = local_operator(program, each)
            made = launcher(operator.line, operator.dtypes, planned.implementations[each], operator.divided)
            what = kind_of(program, each)
            launches[what] += (len(made.work or made.compiled) or 1) + made.roundings
            moved[what] += sum(size(program, r) for r in (*dict.fromkeys(each.operands), *each.results))
    weights = [r for i in program.body if isinstance(i, Leaf) and i.op == "weight" for r in makes(i)]
    parameters = sum(size(program, r) for r in weights) // 4
    updates = [i for i in program.body if isinstance(i, UpdateWeight)]
    launches["optimizer"] = len({tuple(program.tensors[r].dtype for r in (i.weight, i.grad)) for i in updates})
    moved["optimizer"] = sum(bytes_of_update(program, i, Optimizer("adamw")) for i in updates)
    return {
        "model": model,
        "launches": dict(launches),
        "bytes": dict(moved),
        "floor": floor(plan_of(model, PlanOptions(fuse=False)).program) + 28 * parameters,
        "parameters": parameters,
    }


def floor(program: Program) -> int:
    """Return the bytes that operators read and write in the largest groups, greedily, in the order of the program."""
    body = [i for i in program.body if isinstance(i, Compute)]
    maker = {r: n for n, i in enumerate(body) for r in i.results}
    group: list[int] = []
    above: list[set[int]] = []
    anchors: list[int] = []
    for each in body:
        made = [maker[r] for r in each.operands if r in maker]
        before = {group[n] for n in made}
        all_above = set[int]().union(before, *(above[g] for g in before))
        is_anchor = kind_of(program, each) in ANCHORS
        # Into the group of an operand, unless another operand depends on that group.
        fits = (
            g
            for g in sorted(before, reverse=True)
            if not (is_anchor and anchors[g]) and not any(g in above[o] for o in before if o != g)
        )
        into = next(fits, None)
        if into is None:
            into = len(above)
            above.append(all_above)
            anchors.append(0)
        else:
            above[into] |= all_above - {into}
            for other in above:
                if into in other:
                    other |= above[into]
        anchors[into] += is_anchor
        group.append(into)
    readers: dict[Register, set[int]] = {}
    for n, each in enumerate(body):
        for register in each.operands:
            readers.setdefault(register, set()).add(group[n])
    total = 0
    out = {*program.outputs}
    for register, those in readers.items():
        inside = {group[maker[register]]} if register in maker else set[int]()
        total += len(those - inside) * size(program, register)
    for n, each in enumerate(body):
        stored = (r for r in each.results if r in out or readers.get(r, set()) - {group[n]})
        total += sum(size(program, r) for r in stored)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[1])
    parser.add_argument("--only", help="models, by their zoo names")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [counts(text) for name, (text, _) in FULL.items() if not options.only or name in options.only.split(",")]
    names = list(dict.fromkeys(k for row in rows for k in row["bytes"]))
    table = Table(title="launches, and GB read and written, in one training step on one H100", title_justify="left")
    for heading in ("model", "launches", *names, "GB in all", "floor GB"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{row['launches'].get(k, 0)}: {row['bytes'].get(k, 0) / 1e9:.2f}" for k in names]
        total = sum(row["bytes"].values()) / 1e9
        table.add_row(
            row["model"], str(sum(row["launches"].values())), *cells, f"{total:.1f}", f"{row['floor'] / 1e9:.1f}"
        )
    Console(width=200).print(table)
    if options.json is not None:
        found = {"processor": processor(), "python": platform.python_version(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
