"""Say a plan as one device's program: tensors of local shapes, and the plan's collectives in the `shard` dialect."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import IndexType, IntegerAttr, TensorType
from xdsl.ir import SSAValue

from unity_ir.interop.linalg.collectives import collective, process_index
from unity_ir.interop.linalg.lines import compute
from unity_ir.interop.linalg.scalars import INT, TYPES, constant
from unity_ir.interop.linalg.tensors import element_of, emit, filled, inserted, shape_of
from unity_ir.interop.mesh import MeshDims
from unity_ir.pcg.collectives import COLLECTIVES
from unity_ir.pcg.sharding import SUM, is_shard
from unity_ir.plan.instructions import Compute, HaloExchange, Register, ReshardMove, TimeStep
from unity_ir.plan.local_operator import local_operator
from unity_ir.plan.program import Program


class LocalStep:
    """
    Makes the values of a step on one device's pieces, where `builder` stands; `dims` says which axes of the program's
    mesh each axis of the grid is made of.
    """

    def __init__(self, program: Program, dims: MeshDims, builder: Builder):
        self.program, self.dims, self.builder = program, dims, builder
        self._indices: dict[int, SSAValue] = {}

    def type_of(self, register: Register) -> TensorType:
        """Return the type of this device's piece."""
        held = self.program.tensors[register]
        return TensorType(TYPES[held.dtype], held.local(self.program.mesh))

    def made(self, value: SSAValue, register: Register) -> SSAValue:
        """Return a value as it is: its type says what it is."""
        assert value.type == self.type_of(register)
        return value

    def constant(self, register: Register, value: float) -> SSAValue:
        """Return a tensor that is one number; of addends only the first devices have it, the others 0."""
        element, layout = TYPES[self.program.tensors[register].dtype], self.program.tensors[register].layout
        number = emit(self.builder, constant(value, element))
        summed = [axis for axis, role in enumerate(layout) if role == SUM]
        if summed:
            number = self._on_first(summed, number, emit(self.builder, constant(0, element)))
        return filled(self.builder, number, self.type_of(register))

    def compute(self, step: Compute, operands: Sequence[SSAValue]) -> tuple[SSAValue, ...]:
        """Return the results of an operator on this device's pieces."""
        operator = local_operator(self.program, step)
        offsets: dict[str, SSAValue] = {}
        for variable in operator.divided:
            piece = self._piece_number(step, variable)
            start = emit(self.builder, arith.MuliOp(piece, self._index(operator.line.extents[variable])))
            offsets[variable] = emit(self.builder, arith.IndexCastOp(start, INT))
        return compute(operator.line, operands, self.builder, offsets=offsets)

    def moved(self, step: ReshardMove | HaloExchange | TimeStep, value: SSAValue) -> SSAValue:
        """Return a value after a move of a reshard, by the collective of the plan."""
        assert isinstance(step, ReshardMove), "halos and loops are refused before"
        if COLLECTIVES[step.kind].is_free:
            return value
        result, axes = self.type_of(step.result), self.grid_axes(step.axes)
        match step.kind:
            case "all_reduce":
                return emit(self.builder, collective("all_reduce", value, axes, (), result))
            case "all_gather":
                return emit(self.builder, collective("all_gather", value, axes, (step.source,), result))
            case "reduce_scatter" | "slice":
                return emit(self.builder, collective(step.kind, value, axes, (step.target,), result))
            case "all_to_all":
                return emit(self.builder, collective("all_to_all", value, axes, (step.target, step.source), result))
            case "zero_pad":
                return self._among_zeros(step, value, result)
            case _:
                raise TypeError(f"{step.kind} is of one device with others, which is refused before")

    def total(self, register: Register, value: SSAValue) -> SSAValue:
        """Return a result of the step without partial sums: what devices have is added up."""
        layout = self.program.tensors[register].layout[: self.program.axes]
        axes = self.grid_axes([axis for axis, role in enumerate(layout) if role == SUM])
        if not axes:
            return value
        return emit(self.builder, collective("all_reduce", value, axes, (), self.type_of(register)))

    def grid_axes(self, axes: Sequence[int]) -> list[int]:
        """Return the axes of the grid that contain any of these axes of the program's mesh."""
        return [n for n, own in enumerate(self.dims.axes) if not set(own).isdisjoint(axes)]

    def device_index(self, axis: int) -> SSAValue:
        """Return the position of this device along an axis of the grid, as `index`."""
        if axis not in self._indices:
            self._indices[axis] = emit(self.builder, process_index(axis))
        return self._indices[axis]

    # -- inside

    def _index(self, value: int) -> SSAValue:
        return emit(self.builder, arith.ConstantOp(IntegerAttr(value, IndexType())))

    def _at(self, axis: int) -> SSAValue:
        """Return where this device is along an axis of the program's mesh."""
        number = self.grid_axes([axis])[0]
        own, sizes = self.dims.axes[number], self.program.mesh.sizes
        found = self.device_index(number)
        later = prod(sizes[a] for a in own[own.index(axis) + 1 :])
        if later > 1:
            found = emit(self.builder, arith.DivUIOp(found, self._index(later)))
        if own.index(axis):
            found = emit(self.builder, arith.RemUIOp(found, self._index(sizes[axis])))
        return found

    def _joined(self, axes: Sequence[int]) -> SSAValue:
        """Return where this device is along several axes of the program's mesh, the first the outermost."""
        found = self._index(0)
        for axis in axes:
            scaled = emit(self.builder, arith.MuliOp(found, self._index(self.program.mesh.sizes[axis])))
            found = emit(self.builder, arith.AddiOp(scaled, self._at(axis)))
        return found

    def _piece_number(self, step: Compute, variable: str) -> SSAValue:
        """Return which piece of an index variable this device has."""
        return self._joined([axis for axis, role in enumerate(step.assignment) if role == variable])

    def _on_first(self, axes: Sequence[int], value: SSAValue, other: SSAValue) -> SSAValue:
        """Return a value on the first device along some axes of the program's mesh, else another."""
        is_first = emit(self.builder, arith.CmpiOp(self._joined(axes), self._index(0), "eq"))
        return emit(self.builder, arith.SelectOp(is_first, value, other))

    def _among_zeros(self, step: ReshardMove, value: SSAValue, result: TensorType) -> SSAValue:
        """Return a piece as an addend of the whole: zeros where others have shards, or on all devices but the first."""
        zeros = filled(self.builder, emit(self.builder, constant(0, element_of(value))), result)
        if not is_shard(step.source):
            return self._on_first(step.axes, value, zeros)
        shape = shape_of(value)
        start = emit(self.builder, arith.MuliOp(self._joined(step.axes), self._index(shape[step.source])))
        offsets: list[SSAValue | int] = [start if d == step.source else 0 for d in range(len(shape))]
        return inserted(self.builder, value, zeros, offsets)
