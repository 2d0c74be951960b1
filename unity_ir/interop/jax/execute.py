# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""
Run one rank's program on a device's pieces, inside of `jax.shard_map`: operators by `lines`, moves by `moves`, and the
loop over micro-batches as a `lax.scan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax

from unity_ir.interop.jax.lines import DTYPES, HALVES, compute
from unity_ir.interop.jax.moves import exchange, move
from unity_ir.interop.mesh import MeshDims
from unity_ir.interop.names import value_names
from unity_ir.pcg.sharding import SUM, is_shard
from unity_ir.plan.instructions import (
    Compute,
    HaloExchange,
    Instruction,
    Leaf,
    Register,
    ReshardMove,
    StateMove,
    TimeStep,
    UpdateWeight,
    makes,
    reads,
    repeated_registers,
)
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.program import Program

Pieces = dict[Register, Array]
"""A device's pieces by register."""


class DeviceStep:
    """
    Runs a training step's program, without its updates, on a device's pieces; `dims` says which of its mesh axes each
    dim of the mesh is made of. What is in micro-batches is one array for all of them, with those as its first dim.
    """

    def __init__(self, program: Program, dims: MeshDims):
        self.program, self.dims = program, dims
        self._names = value_names(program)
        self._repeated = repeated_registers(program.body)
        body = [i for i in program.body if not isinstance(i, UpdateWeight | StateMove)]
        when = {i: {program.when[r] for r in makes(i)} for i in body}
        for instruction in body:
            # What a loop makes and reads is in it; what all micro-batches read is made before.
            if _is_reuse(instruction) and "early" not in when[instruction]:
                when[instruction] = set()
        self._early = [i for i in body if "early" in when[i]]
        self._loop = [i for i in body if "every" in when[i]] if program.micro_batches > 1 else []
        inside = {*self._early, *self._loop}
        self._once = [i for i in body if i not in inside]

    def run(self, leaves: Pieces) -> Pieces:
        """
        Return the pieces that a step makes outside of its loops, by register, given those of its inputs and weights:
        the loss, gradients and all that is in no micro-batch.
        """
        pieces = dict(leaves)
        left = self._all(self._once, pieces)
        for loop in (self._early, self._loop):
            if loop:
                self._scan(loop, pieces)
                left = self._all(left, pieces)
        return pieces

    def _all(self, body: Sequence[Instruction], pieces: Pieces) -> list[Instruction]:
        """Run the instructions whose operands are there, in order; return the others."""
        left: list[Instruction] = []
        for instruction in body:
            if all(r in pieces for r in makes(instruction)):
                continue
            if all(r in pieces for r in reads(instruction)):
                self._run(instruction, pieces, 0)
            else:
                left.append(instruction)
        return left

    def _scan(self, loop: Sequence[Instruction], pieces: Pieces) -> None:
        """Run a loop over the micro-batches; add to `pieces` what it adds up, and what it joins."""
        program, made = self.program, set[Register]()
        inside: list[Instruction] = []
        after: list[Instruction] = []
        for instruction in loop:
            is_after = not made.isdisjoint(reads(instruction))
            (after if is_after else inside).append(instruction)
            if is_after or (isinstance(instruction, TimeStep) and instruction.kind in ("accumulate", "batch")):
                made.update(makes(instruction))
        steps = [i for i in inside if isinstance(i, TimeStep)]
        sums, joined = ([i for i in steps if i.kind == kind] for kind in ("accumulate", "batch"))
        given = {i.result for i in program.leaves("input") if is_in_time(program, i.result)}
        outside = {r: piece for r, piece in pieces.items() if r not in given}
        zeros: Pieces = {}
        for step in sums:
            dtype = DTYPES[program.tensors[step.result].dtype]
            held = jnp.float32 if dtype in HALVES else dtype
            zeros[step.result] = jnp.zeros(program.tensors[step.result].local(program.mesh), held)

        def body(totals: Pieces, each: tuple[Array, Pieces]) -> tuple[Pieces, Pieces]:
            number, inputs = each
            own = {**outside, **inputs}
            for instruction in inside:
                if not isinstance(instruction, TimeStep) or instruction.kind in ("pipeline", "reuse"):
                    self._run(instruction, own, number)
            added = {s.result: totals[s.result] + own[s.operand].astype(zeros[s.result].dtype) for s in sums}
            return added, {s.result: own[s.operand] for s in joined}

        each = jnp.arange(program.micro_batches), {r: pieces[r] for r in given}
        totals, parts = lax.scan(body, zeros, each)
        for step in sums:
            pieces[step.result] = totals[step.result].astype(DTYPES[program.tensors[step.result].dtype])
        for step in joined:
            # The pieces of micro-batches are along the dim that they divide.
            dim = program.tensors[step.operand].layout[-1]
            whole = jnp.moveaxis(parts[step.result], 0, dim)
            pieces[step.result] = whole.reshape((*whole.shape[:dim], -1, *whole.shape[dim + 2 :]))
        self._all(after, pieces)

    def _run(self, instruction: Instruction, pieces: Pieces, number: Array | int) -> None:
        """Run an instruction in micro-batch `number`; add what it makes to `pieces`."""
        if any(r in pieces for r in makes(instruction)):
            return
        given = {r: pieces[r] for r in reads(instruction)}
        if given and not self._repeated.isdisjoint(makes(instruction)):
            # It is made again, not before what precedes it here is there: XLA would take what was made first.
            given, _ = lax.optimization_barrier((given, pieces[next(reversed(pieces))]))
        match instruction:
            case Leaf("constant", result, _, value):
                pieces[result] = self._constant(result, value, number)
            case Compute():
                with jax.named_scope(self._names[instruction.results[0]]):
                    made = self._compute(instruction, [given[r] for r in instruction.operands], number)
                pieces.update(zip(instruction.results, made, strict=True))
            case ReshardMove(operand, result, _, axes):
                by = move(instruction, self.dims.dims_of(axes), self._ways(axes))
                pieces[result] = given[operand] if by is None else by(given[operand])
            case HaloExchange(operand, result, _, axes):
                by = exchange(instruction, self.dims.dims_of(axes), self._ways(axes))
                pieces[result] = by(given[operand])
            case TimeStep(operand, result, "pipeline"):
                dim = self.program.tensors[result].layout[-1]
                size = given[operand].shape[dim] // self.program.micro_batches
                pieces[result] = lax.dynamic_slice_in_dim(given[operand], number * size, size, dim)
            case TimeStep(operand, result):
                pieces[result] = given[operand]
            case _:
                raise TypeError(f"{instruction} is given")

    def _ways(self, axes: Sequence[int]) -> int:
        return prod(self.program.mesh.sizes[a] for a in axes)

    def _at(self, axis: int, number: Array | int) -> Array | int:
        """Return where this device is along an axis of the program's mesh, which may be that of micro-batches."""
        if axis >= self.program.axes:
            return number
        name, axes = next((n, a) for n, a in zip(self.dims.names, self.dims.axes, strict=True) if axis in a)
        later = self._ways(axes[axes.index(axis) + 1 :])
        return lax.axis_index(name) // later % self.program.mesh.sizes[axis]

    def _constant(self, register: Register, value: float, number: Array | int) -> Array:
        tensor, mesh = self.program.tensors[register], self.program.mesh
        full = jnp.full(tensor.local(mesh), value, DTYPES[tensor.dtype])
        for axis, role in enumerate(tensor.layout):
            if role == SUM:
                full = jnp.where(self._at(axis, number) == 0, full, jnp.zeros_like(full))
        return full

    def _compute(self, step: Compute, operands: Sequence[Array], number: Array | int) -> tuple[Array, ...]:
        operator = local_operator(self.program, step)
        line = operator.line
        offsets = {v: self._index(step, v, number) * line.extents[v] for v in operator.divided}
        return compute(line, operands, offsets)

    def _index(self, step: Compute, variable: str, number: Array | int) -> Array | int:
        """Return which piece of an index variable this device has; micro-batches divide it first."""
        found: Array | int = 0
        roles = list(enumerate(step.assignment))
        for axis, role in (*roles[self.program.axes :], *roles[: self.program.axes]):
            if role == variable:
                found = found * self.program.mesh.sizes[axis] + self._at(axis, number)
        return found


def _is_reuse(instruction: Instruction) -> bool:
    """Return whether an instruction says that all micro-batches read one value, as what is made before the loop may."""
    return isinstance(instruction, TimeStep) and instruction.kind == "reuse"


def is_in_time(program: Program, register: Register) -> bool:
    """Return whether a register holds a micro-batch's part of a tensor."""
    return program.micro_batches > 1 and is_shard(program.tensors[register].layout[-1])


def by_register(program: Program, arrays: Mapping[str, Array]) -> Pieces:
    """Return the pieces of inputs and weights by register, given them by name."""
    return {leaf.result: arrays[leaf.name] for op in ("input", "weight") for leaf in program.leaves(op)}
