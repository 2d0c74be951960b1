"""
Refuse what another system cannot say of a plan, by name: stages, micro-batches, pieces of the loss, halos, and values
on a part of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity_ir.errors import UnityError
from unity_ir.interop.names import value_names
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import coordinate_of, pins_of
from unity_ir.plan.host_values import without_values_at_host
from unity_ir.plan.instructions import Compute, HaloExchange, Register, makes, reads
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Program


@dataclass(frozen=True)
class System:
    """
    Another system, by the name under which its messages begin, and what it cannot say of a plan: for each of `stages`,
    `micro-batches`, `loss pieces`, `halo` and `pinned` that it lacks, why, and what to plan instead.
    """

    name: str
    lacks: Mapping[str, str]


DTENSOR = System(
    "dtensor",
    {
        "stages": "a stage is on a part of the mesh, DTensors on all of it; plan with stages=1, or take Plan.stages",
        "micro-batches": "DTensor has no placement in time; plan with micro_batches=1",
        "loss pieces": "DTensor has no placement in time; plan with loss_pieces=1",
        "halo": "DTensor has no placement with its neighbours' borders; plan with a strategy that divides other dims",
        "pinned": "DTensors are on all of the mesh; plan with data-parallel, fsdp, expert or degrees",
    },
)
"""docs/pytorch.md has the table."""

JAX = System(
    "jax",
    {
        "stages": "a stage is on a part of the mesh, and jax.shard_map is on all of it; plan with stages=1",
        "loss pieces": "XLA chooses by itself in which pieces it makes a loss; plan with loss_pieces=1",
        "pinned": "jax.shard_map is on all of the mesh; plan with data-parallel, fsdp, expert or degrees",
    },
)
"""docs/jax.md has the table."""

LINALG = System(
    "linalg",
    {
        "stages": "`shard` has no stages; plan with stages=1",
        "micro-batches": "`shard` says where, not when; plan with micro_batches=1",
        "loss pieces": "`shard` says where, not when; plan with loss_pieces=1",
        "halo": "the `shard` of whole tensors has no neighbours' borders; plan with a strategy that divides other dims",
        "pinned": "`shard` has all of the grid; plan with data-parallel, fsdp, expert or degrees",
    },
)
"""docs/mlir.md has the table."""


def step_program(graph: Graph, machine: Machine, to: System) -> Program:
    """
    Return one rank's program of a placed graph's training step, for the system `to`. A graph without a backward is
    differentiated first, with its optimizer or, if it names none, the default one.

    Raises `UnityError` where that system cannot express the plan, in a message that names the operator and the value.
    """
    where = f"{to.name}: @{graph.name}"
    if graph.pipeline is not None and (why := to.lacks.get("stages")):
        raise UnityError(f"{where} has {graph.pipeline.ranks * graph.pipeline.chunks} stages: {why}")
    if graph.loss_pieces > 1 and (why := to.lacks.get("loss pieces")):
        raise UnityError(f"{where} makes its loss in {graph.loss_pieces} pieces: {why}")
    if not graph.updates:
        graph = training_step(graph, graph.optimizer or Optimizer(), machine.mesh)
    program, _ = without_values_at_host(lower(graph, machine))
    if program.micro_batches > 1 and (why := to.lacks.get("micro-batches")):
        raise UnityError(f"{where} has {program.micro_batches} micro-batches: {why}")
    check(program, to)
    return program


def check(program: Program, to: System) -> None:
    """
    Raise `UnityError` if the system `to` cannot express a layout of the program: a pinned value or a halo. The message
    names the first such value and its operator.
    """
    names = value_names(program)
    where = f"{to.name}: @{program.name}"
    for instruction in program.body:
        for register in makes(instruction):
            pinned = pins_of(program.tensors[register].layout)
            if pinned and (why := to.lacks.get("pinned")):
                axis, role = pinned[0][0], program.tensors[register].layout[pinned[0][0]]
                at = coordinate_of(role)
                raise UnityError(f"{where}: {names[register]} is pinned, at {at} along mesh axis {axis}: {why}")
        if isinstance(instruction, HaloExchange) and (why := to.lacks.get("halo")):
            reader = _reader(program, instruction.result, names)
            given = names[instruction.operand]
            raise UnityError(f"{where}: {reader} reads {given} with a halo along dim {instruction.dim}: {why}")


def _reader(program: Program, register: Register, names: Mapping[Register, str]) -> str:
    """Return the name of the first operator that reads a register, or what is moved of it."""
    reached = {register}
    for instruction in program.body:
        if not reached.isdisjoint(reads(instruction)):
            if isinstance(instruction, Compute):
                return names[instruction.results[0]]
            reached.update(makes(instruction))
    return "an update"
