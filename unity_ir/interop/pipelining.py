"""Say a plan in stages for torch.distributed.pipelining: the modules of each stage, and the schedule's CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.plan.instructions import Leaf, Register, makers_of, reads
from unity_ir.plan.lower import lower
from unity_ir.plan.pipeline.catalogue import pipeline_schedule
from unity_ir.plan.pipeline.csv_text import to_csv
from unity_ir.plan.pipeline.parts import step_parts
from unity_ir.plan.pipeline.sends import with_sends
from unity_ir.plan.program import Program


def stages(graph: Graph, machine: Machine) -> dict[str, Any]:
    """
    Return a placed graph that has stages, on `machine`, in the terms of torch.distributed.pipelining, as data that JSON
    can hold. A graph without a backward is differentiated first.

    The data has `schedule`, `micro_batches`, `csv` (a row per rank, as torch's `_load_csv` reads it with format
    `compute_only`), and a list of `stages`. Each of these has its number, the `rank` of the pipeline that runs it, its
    `parameters`, and the `modules` all of whose parameters are among these. A parameter that several stages read
    belongs to the first of them, one that none reads to stage 0.

    Raises `UnityError` for a plan without stages, and for a schedule that never drains, which torch does not have.
    """
    pipeline = graph.pipeline
    if pipeline is None:
        raise UnityError(f"stages: @{graph.name} has no stages; plan with stages and micro_batches")
    if not graph.updates:
        graph = training_step(graph, graph.optimizer or Optimizer(), machine.mesh)
    program = lower(graph, machine)
    order = pipeline_schedule(pipeline.order, pipeline.ranks, program.micro_batches, pipeline.chunks)
    if order.gradient_delay:
        raise UnityError(
            f"stages: {order.name} of @{graph.name} goes on from step to step, which torch's do not; use 1f1b"
        )
    parts = step_parts(program, with_sends(order))
    names = _weights_alone(program)
    owned: dict[str, int] = {}
    for stage in range(order.stages):
        read = {r for part in parts.run_by(stage, "F") for i in part.program.body for r in (*reads(i), *_leaf(i))}
        for name in sorted({n for r in read for n in names.get(r, ())}):
            owned.setdefault(name, stage)
    order_of = [leaf.name for leaf in program.leaves("weight")]
    owners = {name: owned.get(name, 0) for name in order_of}
    return {
        "schedule": order.name,
        "micro_batches": order.micro_batches,
        "csv": to_csv(order),
        "stages": [
            {
                "stage": stage,
                "rank": order.rank_of[stage],
                "modules": modules(owners, stage),
                "parameters": [name for name, of in owners.items() if of == stage],
            }
            for stage in range(order.stages)
        ],
    }


def _leaf(instruction: object) -> tuple[Register, ...]:
    return (instruction.result,) if isinstance(instruction, Leaf) else ()


def _weights_alone(program: Program) -> Mapping[Register, frozenset[str]]:
    """Return the weights that each register is made of, of those that are made of weights and constants alone."""
    found: dict[Register, frozenset[str]] = {}
    for register, instruction in makers_of(program.body).items():
        if isinstance(instruction, Leaf):
            if instruction.op in ("weight", "constant"):
                found[register] = frozenset({instruction.name} if instruction.op == "weight" else ())
        elif all(r in found for r in reads(instruction)):
            found[register] = frozenset[str]().union(*(found[r] for r in reads(instruction)))
    return found


def modules(owners: Mapping[str, int], stage: int) -> list[str]:
    """
    Return the names of the outermost modules all of whose parameters belong to stage `stage`, and the full names of
    those of its parameters that are in none of these modules. `owners` maps each parameter's full name to its stage.

    Given `layers.0.w` and `layers.0.b` of stage 0, `layers.1.w` of stage 1, returns `["layers.0"]` for stage 0.
    """

    def within(prefix: Sequence[str]) -> Iterable[str]:
        below = {name: of for name, of in owners.items() if name.split(".")[: len(prefix)] == list(prefix)}
        if stage not in below.values():
            return
        if prefix and set(below.values()) == {stage}:
            yield ".".join(prefix)
            return
        for part in dict.fromkeys(name.split(".")[len(prefix)] for name in below):
            yield from within((*prefix, part))

    return list(within(()))
