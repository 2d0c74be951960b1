"""
Operations of upstream MLIR's `shard` dialect that xDSL 0.74 does not have, as builders that follow the text of MLIR 22.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    BytesAttr,
    DenseArrayBase,
    FlatSymbolRefAttr,
    IndexType,
    IndexTypeConstr,
    IntegerAttr,
    SymbolRefAttr,
    TensorType,
    i16,
)
from xdsl.dialects.shard import AllReduceOp, ShardAxesAttr
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, prop_def, result_def

GRID = "mesh"
"""The symbol of the grid of devices."""

_TO = "$input `on` $grid `grid_axes` `=` $grid_axes "
_OF = " attr-dict `:` type($input) `->` type($result)"


class ShardMoveOp(IRDLOperation):
    """A collective on a tensor along axes of the grid."""

    grid = prop_def(FlatSymbolRefAttr)
    grid_axes = prop_def(ShardAxesAttr)
    input = operand_def(TensorType)
    result = result_def(TensorType)


@irdl_op_definition
class ShardAllGatherOp(ShardMoveOp):
    """Every device gets all shards of a dim."""

    name = "shard.all_gather"
    gather_axis = prop_def(IntegerAttr.constr(IndexTypeConstr))
    assembly_format = _TO + "`gather_axis` `=` $gather_axis" + _OF


@irdl_op_definition
class ShardReduceScatterOp(ShardMoveOp):
    """Addends are added up, and every device gets a shard of a dim of the sum."""

    name = "shard.reduce_scatter"
    scatter_axis = prop_def(IntegerAttr.constr(IndexTypeConstr))
    assembly_format = _TO + "`scatter_axis` `=` $scatter_axis" + _OF


@irdl_op_definition
class ShardAllToAllOp(ShardMoveOp):
    """Shards of one dim become shards of another."""

    name = "shard.all_to_all"
    split_axis = prop_def(IntegerAttr.constr(IndexTypeConstr))
    concat_axis = prop_def(IntegerAttr.constr(IndexTypeConstr))
    assembly_format = _TO + "`split_axis` `=` $split_axis `concat_axis` `=` $concat_axis" + _OF


@irdl_op_definition
class ShardAllSliceOp(ShardMoveOp):
    """Every device takes its shard of a dim, of a tensor that all have."""

    name = "shard.all_slice"
    slice_axis = prop_def(IntegerAttr.constr(IndexTypeConstr))
    assembly_format = _TO + "`slice_axis` `=` $slice_axis" + _OF


@irdl_op_definition
class ShardProcessIndexOp(IRDLOperation):
    """The position of this device along an axis of the grid."""

    name = "shard.process_multi_index"
    grid = prop_def(FlatSymbolRefAttr)
    axes = prop_def(ShardAxesAttr)
    result = result_def(IndexType)
    assembly_format = "`on` $grid `axes` `=` $axes attr-dict `:` type($result)"


_MOVES: dict[str, tuple[type[ShardMoveOp], tuple[str, ...]]] = {
    "all_gather": (ShardAllGatherOp, ("gather_axis",)),
    "reduce_scatter": (ShardReduceScatterOp, ("scatter_axis",)),
    "all_to_all": (ShardAllToAllOp, ("split_axis", "concat_axis")),
    "slice": (ShardAllSliceOp, ("slice_axis",)),
}


def collective(kind: str, value: SSAValue, axes: Sequence[int], dims: Sequence[int], result: TensorType) -> Operation:
    """
    Return the operation for a move (`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `slice`) along axes
    of the grid. `dims` are the dims of the tensor that it gathers, scatters, slices, or splits and then concatenates.
    """
    properties: dict[str, Attribute] = {"grid": SymbolRefAttr(GRID), "grid_axes": axis_numbers(axes)}
    if kind == "all_reduce":
        return AllReduceOp(operands=[value], result_types=[result], properties=properties)
    op, names = _MOVES[kind]
    of_dims = {name: IntegerAttr(dim, IndexType()) for name, dim in zip(names, dims, strict=True)}
    return op(operands=[value], result_types=[result], properties={**properties, **of_dims})


def process_index(axis: int) -> ShardProcessIndexOp:
    """Return the operation for the position of this device along an axis of the grid."""
    properties: dict[str, Attribute] = {"grid": SymbolRefAttr(GRID), "axes": axis_numbers((axis,))}
    return ShardProcessIndexOp(result_types=[IndexType()], properties=properties)


def axis_numbers(axes: Sequence[int]) -> ShardAxesAttr:
    """Return axes of the grid as MLIR has them, 16-bit integers."""
    return DenseArrayBase(i16, BytesAttr(i16.pack(tuple(axes))))
