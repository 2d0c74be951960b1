"""Annotate values with the layouts of a plan, in upstream MLIR's `shard` dialect."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects.builtin import (
    ArrayAttr,
    BytesAttr,
    DenseArrayBase,
    FlatSymbolRefAttr,
    StringAttr,
    UnitAttr,
    i16,
    i64,
)
from xdsl.dialects.shard import GridOp, ShardAxesArrayAttr, ShardingOp, ShardingType, ShardOp
from xdsl.ir import SSAValue

from unity_ir.interop.linalg.reads import shape_of
from unity_ir.interop.mesh import MeshDims
from unity_ir.pcg.sharding import SUM
from unity_ir.plan.program import Program, Register

GRID = "mesh"
"""The symbol of the grid of devices."""

SplitAxes = tuple[tuple[int, ...], ...]
"""For each dim of a tensor, the dims of the mesh that divide it, outermost first."""


def grid(dims: MeshDims) -> GridOp:
    """Return the `shard.grid` of a mesh; given dims of 2 and 4 devices, `shard.grid @mesh(shape = 2x4)`."""
    shape = DenseArrayBase.from_list(i64, dims.sizes)
    return GridOp(properties={"sym_name": StringAttr(GRID), "shape": shape})


class Annotations:
    """
    Annotates the values of a program with their layouts on a mesh, where `builder` stands.

    A `shard.shard` says in which layout a value is made, one that is for its users in which it is read: between the two
    it is moved. Values in partial sums have no annotation, as they exist in `shard` only inside of operations.
    """

    def __init__(self, program: Program, dims: MeshDims, builder: Builder):
        self.program, self.dims, self.builder = program, dims, builder
        self._shardings: dict[SplitAxes, SSAValue] = {}
        self._last: dict[SSAValue, SplitAxes] = {}

    def made(self, value: SSAValue, register: Register) -> SSAValue:
        """Annotate a value, which is in a register, with the layout in which it is made; return the annotated value."""
        axes = self._split_axes(register)
        if axes is None or axes == self._last.get(value):
            return value
        return self._annotated(value, axes, for_users=False)

    def moved(self, value: SSAValue, register: Register) -> SSAValue:
        """Annotate a value with the layout to which a move brings it in a register; return the annotated value."""
        axes, before = self._split_axes(register), self._last.get(value)
        if axes is None or axes == before:
            return value
        return self._annotated(value, axes, for_users=before is not None)

    def replicated(self, value: SSAValue) -> SSAValue:
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
        """Return the dims of the mesh that divide each dim of a tensor, or None if it is in partial sums."""
        tensor = self.program.tensors[register]
        roles = self.dims.roles(tensor.layout)
        if SUM in roles:
            return None
        # MLIR reads no empty list: a number has a list of no axes, though it has no dim.
        dims = range(max(1, len(tensor.shape)))
        return tuple(tuple(n for n, role in enumerate(roles) if role == dim) for dim in dims)


def _sharding(axes: SplitAxes) -> ShardingOp:
    return ShardingOp(
        operands=[[], []],
        result_types=[ShardingType()],
        properties={
            "grid": FlatSymbolRefAttr(GRID),
            "split_axes": ShardAxesArrayAttr(ArrayAttr([_numbers(own) for own in axes])),
        },
    )


def _numbers(axes: Sequence[int]) -> DenseArrayBase:
    return DenseArrayBase(i16, BytesAttr(i16.pack(tuple(axes))))
