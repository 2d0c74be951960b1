"""
Price the lines of a step's plan: kernels, alone or in groups, moves, and the optimizer's updates.

A group of operators (`plan.groups`) is one kernel: one launch, each operand read once, each result written once. A
bucket is one collective over the bytes of all its members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache

from unity_ir.cost.plan import update_bytes, update_seconds
from unity_ir.cost.time import Kernel, is_measured, seconds
from unity_ir.cost.work import computes_in, kernel_operator, kind_of_operator, mask_of_operator
from unity_ir.forms.float8 import rounding_reads
from unity_ir.forms.kinds import KINDS
from unity_ir.machine.device import Device
from unity_ir.ops import operator, savings
from unity_ir.ops.operator import Attributes
from unity_ir.pcg.optimizer import Optimizer
from unity_ir.pcg.sharding import Assignment, Mesh, Pins, pins_of
from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Compute, Fused, Tensor, TimeStep, UpdateWeight
from unity_ir.plan.plan import Plan
from unity_ir.plan.program import Program, global_line, most_of_a_device, piece_of_line
from unity_ir.plan.routes import OF_ROWS
from unity_ir.plan.saved_softmax import attributes_of_variant
from unity_ir.tdl.counts import flops
from unity_ir.tdl.element_types import FLOAT8


def kernel_seconds(program: Program, compute: Compute, device: Device, added: int = 0) -> float:
    """
    Return the seconds on a device of the kernel of `compute`, an operator or fused group of the rank's program
    `program`. If the kernel adds its result to a running total, `added` is the bytes of that total, which it also
    reads.

    If the device has a profile, measured seconds are used. Those of a group are the measured seconds of its heaviest
    member, plus the time of the bytes that the group reads and writes beyond that member's. The heaviest member is the
    first by kind (contractions before others, in the order of `forms.kinds.KINDS`), then the one of most FLOPs. An
    operator that saves values for the backward, or reads saved ones, takes the measured seconds of the operator that
    does not. What was not measured is estimated.
    """
    kernel = kernel_of_line(program, compute)
    if added:
        kernel = replace(kernel, bytes=kernel.bytes + added)
    if device.profile is None:
        return seconds(kernel, device)
    if not isinstance(compute, Fused):
        plain = kernel_of_line(program, _unsaved(compute))
        return seconds(plain if is_measured(plain, device) else kernel, device)
    members = [kernel_of_line(program, member) for member in compute.members]
    heaviest = max(members, key=lambda member: (-KINDS.index(member.kind), member.flops, member.bytes))
    if not is_measured(heaviest, device):
        return seconds(kernel, device)
    more = max(kernel.bytes - heaviest.bytes, 0)
    return seconds(heaviest, device) + more / (device.memory_bandwidth * device.efficiency)


def work_key(program: Program, compute: Compute) -> object:
    """Return a key that is equal for operators, or fused groups, of a program whose kernels take the same seconds."""
    if not isinstance(compute, Fused):
        return program.number(compute)
    sizes = program.bytes
    moved = sum([sizes[r] for r in {*compute.operands, *compute.results}])
    return moved, *[program.number(member) for member in compute.members]


def kernel_of_line(program: Program, compute: Compute) -> Kernel:
    """
    Return the kernel of `compute`, an operator or fused group of a rank's program: its sizes, FLOPs and bytes on that
    rank's pieces. A value read twice counts once in its bytes.
    """
    registers = list(dict.fromkeys((*compute.operands, *compute.results)))
    if not isinstance(compute, Fused):
        at = {r: n for n, r in enumerate(registers)}
        tensors = tuple(program.tensors[r] for r in registers)
        operands = tuple(at[r] for r in compute.operands)
        return _kernel(compute.operator, tensors, operands, compute.attributes, compute.assignment, program.mesh)
    members = [kernel_of_line(program, member) for member in compute.members]
    heaviest = max(members, key=lambda member: member.flops)
    return Kernel(
        compute.operator,
        heaviest.sizes,
        min((member.kind for member in members), key=KINDS.index),
        sum(member.flops for member in members),
        sum(program.bytes[r] for r in registers) - sum(member.halved for member in members),
        heaviest.dtype,
        sum(member.rounded for member in members),
        sum(member.halved for member in members),
    )


@lru_cache(maxsize=65536)
def _kernel(
    name: str,
    tensors: tuple[Tensor, ...],
    operands: tuple[int, ...],
    attributes: Attributes,
    assignment: Assignment,
    mesh: Mesh,
) -> Kernel:
    """Return the kernel of an operator that reads and writes `tensors`; `operands` are their numbers."""
    read = [tensors[n] for n in operands]
    dtypes = tuple(t.dtype for t in read)
    analysis = global_line(name, read, attributes)
    local = piece_of_line(analysis, assignment, mesh)
    mask = mask_of_operator(name, tuple(t.shape for t in read), attributes, dtypes)
    seen = live_part(attributes) if mask is None else mask.seen(local.extents)
    # All rows that have arrived pick from the experts of a device: of those of all devices rows go to each alike.
    picked = local if name in OF_ROWS.values() else analysis.bound
    made = Kernel(
        kernel_operator(name, attributes, dtypes),
        (*(size for t in read for size in t.local(mesh)), *local.extents.values()),
        kind_of_operator(name, tuple(t.shape for t in read), attributes, dtypes),
        int(flops(local, picked.extents) * seen),
        sum(t.bytes(mesh) for t in tensors),
        computes_in(dtypes, analysis),
    )
    if made.dtype != FLOAT8:
        return made
    return made.rounding([t.bytes(mesh) for t in read], rounding_reads(analysis.bound.results))


def live_part(attributes: Attributes) -> float:
    """Return the part of an operator's rows that it computes: `live` of products of received rows (`ops.routes`)."""
    live = dict(attributes).get("live", 1.0)
    return live if isinstance(live, float) else 1.0


@cache
def _plain() -> dict[str, str]:
    """Return the operator of each variant that saves values, or reads saved ones."""
    return {variant: of for s in savings() for variant, of in ((s.saving, s.forward), (s.saved, s.backward))}


def _unsaved(compute: Compute) -> Compute:
    """Return an operator without the values it saves or reads as saved."""
    plain = _plain().get(compute.operator)
    if plain is None:
        return compute
    reads = {s.saved: s for s in savings()}.get(compute.operator)
    # A backward that reads saved values takes them last: after the gradients and the operands of its forward.
    count = len(compute.operands)
    if reads is not None:
        count = len(operator(plain).line.parameters)
    return replace(
        compute,
        operator=plain,
        operands=compute.operands[:count],
        attributes=attributes_of_variant(plain, compute.attributes),
    )


def step_bytes(plan: Plan) -> int:
    """
    Return the bytes that a rank's kernels read and write in one step, the optimizer's updates included. If ranks
    differ, it is the rank with the most.
    """
    program = plan.program
    optimizer = program.optimizer or Optimizer()
    if plan.pipeline is not None:
        updates = (
            (pins_of(program.tensors[i.weight].layout), bytes_of_update(program, i, optimizer))
            for i in program.body
            if isinstance(i, UpdateWeight)
        )
        return plan.most_on_a_rank(step_bytes) + most_of_a_device(program.mesh, updates)

    def counts() -> Iterator[tuple[Pins, int]]:
        for i in program.body:
            if isinstance(i, Compute):
                times, loops = program.times(i), program.micro_batches if program.is_in_pieces(i) else 1
                kernel = kernel_of_line(program, i)
                moved = (kernel.bytes + kernel.rounded) * times + plan.added_bytes(i) * (times - loops)
                yield pins_of(program.tensors[i.results[0]].layout), moved
            if isinstance(i, TimeStep):
                times = program.micro_batches if i.is_of_pieces else 1
                yield pins_of(program.tensors[i.result].layout), times * sum(plan.time_step_bytes(i))
            if isinstance(i, UpdateWeight):
                yield pins_of(program.tensors[i.weight].layout), bytes_of_update(program, i, optimizer)

    return most_of_a_device(program.mesh, counts())


def bytes_of_update(program: Program, update: UpdateWeight, optimizer: Optimizer) -> int:
    """
    Return the bytes that the optimizer reads and writes to update one rank's piece of a weight, its kept cast included.
    """
    cast = 0 if update.cast is None else program.bytes[update.cast]
    return update_bytes(program.bytes[update.weight], optimizer, cast, program.bytes[update.grad])


def seconds_of_update(program: Program, update: UpdateWeight, optimizer: Optimizer, device: Device) -> float:
    """Return the seconds of the optimizer's update of one rank's piece of a weight on a device."""
    dtype = program.tensors[update.weight].dtype
    elements = program.bytes[update.weight] // ELEMENT_BYTES[dtype]
    return update_seconds(elements, bytes_of_update(program, update, optimizer), dtype, optimizer, device)
