"""Annotate the values of a plan's step on whole tensors with their layouts, in upstream MLIR's `shard` dialect."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, StringAttr, SymbolRefAttr, TensorType, UnitAttr, i64
from xdsl.dialects.shard import GridOp, ShardAxesArrayAttr, ShardingOp, ShardingType, ShardOp
from xdsl.ir import SSAValue

from unity_ir.interop.linalg.collectives import GRID, axis_numbers
from unity_ir.interop.linalg.lines import compute
from unity_ir.interop.linalg.scalars import TYPES, constant
from unity_ir.interop.linalg.tensors import emit, filled, shape_of
from unity_ir.interop.mesh import MeshDims
from unity_ir.pcg.sharding import SUM
from unity_ir.plan.instructions import Compute, HaloExchange, Register, ReshardMove, TimeStep
from unity_ir.plan.program import Program

SplitAxes = tuple[tuple[int, ...], ...]
"""For each dim of a tensor, the axes of the grid that divide it, outermost first."""


def grid(dims: MeshDims) -> GridOp:
    """Return the `shard.grid` of a mesh; given dims of 2 and 4 devices, `shard.grid @mesh(shape = 2x4)`, with names."""
    shape = DenseArrayBase.from_list(i64, dims.sizes)
    names = ArrayAttr([StringAttr(name) for name in dims.names])
    return GridOp(properties={"sym_name": StringAttr(GRID), "shape": shape}, attributes={"pcg.axes": names})


class WholeStep:
    """
    Makes the values of a step on whole tensors, where `builder` stands, and annotates them with their layouts on a
    mesh; without one (`dims` is None) there is one device, and nothing to annotate.

    A `shard.shard` says in which layout a value is made, one that is for its users in which it is read: between the two
    it is moved. Values in partial sums have no annotation, as they exist in `shard` only inside of operations.
    """

    def __init__(self, program: Program, dims: MeshDims | None, builder: Builder):
        self.program, self.dims, self.builder = program, dims, builder
        self._shardings: dict[SplitAxes, SSAValue] = {}
        self._last: dict[SSAValue, SplitAxes] = {}

    def type_of(self, register: Register) -> TensorType:
        """Return the type of the whole tensor."""
        held = self.program.tensors[register]
        return TensorType(TYPES[held.dtype], held.shape)

    def constant(self, register: Register, value: float) -> SSAValue:
        """Return a tensor that is one number."""
        number = emit(self.builder, constant(value, TYPES[self.program.tensors[register].dtype]))
        return filled(self.builder, number, self.type_of(register))

    def compute(self, step: Compute, operands: Sequence[SSAValue]) -> tuple[SSAValue, ...]:
        """Return the results of an operator."""
        line = self.program.analysis(step).bound
        return compute(line, operands, self.builder, self.dims and self._replicated)

    def made(self, value: SSAValue, register: Register) -> SSAValue:
        """Annotate a value, which is in a register, with the layout in which it is made; return the annotated value."""
        axes = self._split_axes(register)
        if axes is None or axes == self._last.get(value):
            return value
        return self._annotated(value, axes, for_users=False)

    def moved(self, step: ReshardMove | HaloExchange | TimeStep, value: SSAValue) -> SSAValue:
        """Annotate a value with the layout to which a move brings it; return the annotated value."""
        axes, before = self._split_axes(step.result), self._last.get(value)
        if axes is None or axes == before:
            return value
        return self._annotated(value, axes, for_users=before is not None)

    def total(self, register: Register, value: SSAValue) -> SSAValue:
        """Return a result of the step as it is: a whole tensor has no partial sums."""
        return value

    def _replicated(self, value: SSAValue) -> SSAValue:
        """Annotate a tensor as one that every device makes whole; return the annotated value."""
        return self._annotated(value, ((),) * len(shape_of(value)), for_users=False)

    def _annotated(self, value: SSAValue, axes: SplitAxes, for_users: bool) -> SSAValue:
        if axes not in self._shardings:
            self._shardings[axes] = self.builder.insert(_sharding(axes)).results[0]
            self._shardings[axes].name_hint = "sharding"
        unit = UnitAttr() if for_users else None
        found = self.builder.insert(ShardOp(value, self._shardings[axes], unit)).results[0]
        found.name_hint = value.name_hint
        self._last[found] = axes
        return found

    def _split_axes(self, register: Register) -> SplitAxes | None:
        """Return the axes of the grid that divide each dim of a tensor; None if it has no annotation."""
        held = self.program.tensors[register]
        roles = () if self.dims is None else self.dims.roles(held.layout)
        if self.dims is None or SUM in roles:
            return None
        # MLIR reads no empty list: a number has a list of no axes, though it has no dim.
        dims = range(max(1, len(held.shape)))
        return tuple(tuple(n for n, role in enumerate(roles) if role == dim) for dim in dims)


def _sharding(axes: SplitAxes) -> ShardingOp:
    return ShardingOp(
        operands=[[], []],
        result_types=[ShardingType()],
        properties={
            "grid": SymbolRefAttr(GRID),
            "split_axes": ShardAxesArrayAttr(ArrayAttr([axis_numbers(own) for own in axes])),
        },
    )
