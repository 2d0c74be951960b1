"""Refuse what DTensor cannot say of a plan: pinned parts of a machine, halos, and whatever is in time."""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.errors import UnityError
from unity_ir.interop.dtensor.names import value_names
from unity_ir.machine.model import Machine
from unity_ir.pcg.differentiate import training_step
from unity_ir.pcg.graph import Graph
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import coordinate_of, pins_of
from unity_ir.plan.lower import lower
from unity_ir.plan.program import Compute, HaloExchange, Program, Register, makes, reads

INEXPRESSIBLE: Mapping[str, str] = {
    "stages": "a stage is on a part of the mesh, DTensors are on all of it; plan with stages=1, or take Plan.stages",
    "micro-batches": "DTensor has no placement in time; plan with micro_batches=1",
    "loss pieces": "DTensor has no placement in time; plan with loss_pieces=1",
    "halo": "DTensor has no placement with its neighbours' borders; plan with a strategy that divides other dims",
    "pinned": "DTensors are on all of the mesh; plan with data-parallel, fsdp, expert or degrees",
}
"""By each thing that DTensor cannot say of a plan: why, and what to plan instead, as docs/pytorch.md has it."""


def step_program(graph: Graph, machine: Machine) -> Program:
    """
    Return one rank's program of a placed graph's training step, for DTensor. A graph without a backward is
    differentiated first, with its optimizer or, if it names none, the default one.

    Raises `UnityError` where DTensor cannot express a layout, in a message that names the operator and the value; also
    for stages, loss pieces and micro-batches.
    """
    where = f"dtensor: @{graph.name}"
    if graph.pipeline is not None:
        raise UnityError(
            f"{where} has {graph.pipeline.ranks * graph.pipeline.chunks} stages: {INEXPRESSIBLE['stages']}"
        )
    if graph.loss_pieces > 1:
        raise UnityError(f"{where} makes its loss in {graph.loss_pieces} pieces: {INEXPRESSIBLE['loss pieces']}")
    if not graph.updates:
        graph = training_step(graph, graph.optimizer or Optimizer(), machine.mesh)
    program = lower(graph, machine)
    if program.micro_batches > 1:
        raise UnityError(f"{where} has {program.micro_batches} micro-batches: {INEXPRESSIBLE['micro-batches']}")
    check(program)
    return program


def check(program: Program) -> None:
    """
    Raise `UnityError` if DTensor cannot express a layout of the program: a pinned value or a halo. The message names
    the first such value and its operator.
    """
    names = value_names(program)
    where = f"dtensor: @{program.name}"
    for instruction in program.body:
        for register in makes(instruction):
            if pinned := pins_of(program.tensors[register].layout):
                axis, role = pinned[0][0], program.tensors[register].layout[pinned[0][0]]
                raise UnityError(
                    f"{where}: {names[register]} is pinned, at {coordinate_of(role)} along mesh axis {axis}: "
                    f"{INEXPRESSIBLE['pinned']}"
                )
        if isinstance(instruction, HaloExchange):
            reader = _reader(program, instruction.result, names)
            raise UnityError(
                f"{where}: {reader} reads {names[instruction.operand]} with a halo along dim {instruction.dim}: "
                f"{INEXPRESSIBLE['halo']}"
            )


def _reader(program: Program, register: Register, names: Mapping[Register, str]) -> str:
    """Return the name of the first operator that reads a register, or what is moved of it."""
    reached = {register}
    for instruction in program.body:
        if not reached.isdisjoint(reads(instruction)):
            if isinstance(instruction, Compute):
                return names[instruction.results[0]]
            reached.update(makes(instruction))
    return "an update"
