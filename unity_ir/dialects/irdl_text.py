"""Define the dialects in IRDL, as `mlir-opt --irdl-file` reads them: types, attributes and operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.dialects import irdl
from xdsl.dialects.builtin import (
    ArrayAttr,
    BytesAttr,
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    SymbolRefAttr,
    UnitAttr,
)
from xdsl.ir import Attribute, Block, Dialect, Region, SSAValue, TypeAttribute
from xdsl.irdl import AttrConstraint, IRDLOperation, OptPropertyDef

from unity_ir.dialects.irdl_names import IRDL_DIALECTS, counts, has_regions, irdl_name
from unity_ir.dialects.pcg import ComputeOp

BUILTIN: dict[type[Attribute], str] = {
    ArrayAttr: "#builtin.array",
    BytesAttr: "#builtin.string",
    DenseArrayBase: "#builtin.dense_array",
    DictionaryAttr: "#builtin.dictionary",
    FloatAttr: "#builtin.float",
    IntegerAttr: "#builtin.integer",
    StringAttr: "#builtin.string",
    UnitAttr: "#builtin.unit",
}
"""MLIR's names of the attributes of `builtin` that the dialects use."""


def irdl_text() -> str:
    """
    Return the text of one MLIR module that defines all of this project's dialects in IRDL.

    It declares the number and kinds of operands, results, attributes and parameters. Whether they fit each other, such
    as the sizes of a product's operands, is checked only by the verifiers in xDSL. Operations with regions are left
    out.
    """
    return str(ModuleOp([_dialect(dialect) for dialect in IRDL_DIALECTS])) + "\n"


def _dialect(dialect: Dialect) -> irdl.DialectOp:
    operations = [op for op in dialect.operations if issubclass(op, IRDLOperation) and not has_regions(op)]
    block = Block([_attribute(kind) for kind in dialect.attributes])
    block.add_ops(_operation(kind, *n) for kind in operations for n in counts(kind))
    return irdl.DialectOp(dialect.name, Region(block))


def _attribute(kind: type[Any]) -> irdl.TypeOp | irdl.AttributeOp:
    """Return the definition of a type or attribute, from its `PARAMETERS`."""
    block = Block()
    parameters: dict[str, AttrConstraint] = kind.PARAMETERS
    if parameters:
        values = [_constraint(block, constraint) for constraint in parameters.values()]
        block.add_op(irdl.ParametersOp(values, ArrayAttr(map(StringAttr, parameters))))
    name = _local(kind.name)
    return (irdl.TypeOp if issubclass(kind, TypeAttribute) else irdl.AttributeOp)(name, Region(block))


def _operation(kind: type[IRDLOperation], operands: int, results: int) -> irdl.OperationOp:
    """Return the definition of operations of a class with these numbers of operands and results."""
    block = Block()
    definition = kind.get_irdl_definition()
    needed = {
        name: property.constr
        for name, property in definition.properties.items()
        if not isinstance(property, OptPropertyDef) and property.default_value is None
    }
    if needed:
        block.add_op(irdl.AttributesOp.get({name: _constraint(block, c) for name, c in needed.items()}))
    for make, number, defs in (
        (irdl.OperandsOp, operands, definition.operands),
        (irdl.ResultsOp, results, definition.results),
    ):
        if number:
            names, constraints = zip(*((name, own.constr) for name, own in defs), strict=True)
            if len(defs) == 1:
                names, constraints = [f"{names[0]}{i}" for i in range(number)], constraints * number
            if make is irdl.OperandsOp and issubclass(kind, ComputeOp):
                names = _operand_names(kind, number)
            # Each has a constraint of its own: MLIR takes values of one constraint to be of one type.
            values = [_constraint(block, constraint) for constraint in constraints]
            single = irdl.VariadicityArrayAttr(ArrayAttr([irdl.VariadicityAttr.SINGLE] * number))
            block.add_op(make(values, single, ArrayAttr(map(StringAttr, names))))
    return irdl.OperationOp(_local(irdl_name(kind, operands, results)), Region(block))


def _operand_names(kind: type[ComputeOp], number: int) -> Sequence[str]:
    parameters = kind.operator().line.parameters
    return [p.name for p in parameters] if len(parameters) == number else [f"operand{i}" for i in range(number)]


def _local(name: str) -> str:
    return name.partition(".")[2]


def _constraint(block: Block, constraint: Any) -> SSAValue:
    """
    Add the constraint to attributes of one kind to a block; any attribute where there are several kinds.

    MLIR 22 crashes on `irdl.any_of` several kinds.
    """
    # Of a range, the constraint of each of its members.
    inner = getattr(constraint, "constraint", constraint)
    inner = getattr(inner, "constr", inner)
    names = {BUILTIN.get(base, base.name) for base in inner.get_bases() or ()}
    name = names.pop() if len(names) == 1 else None
    op = irdl.AnyOp() if name is None else irdl.BaseOp(_base(name))
    block.add_op(op)
    return op.output


def _base(name: str) -> SymbolRefAttr | str:
    """Given `pcg.tensor`, returns `@pcg::@tensor`; names of `builtin` stay."""
    dialect, _, rest = name.partition(".")
    return name if name.startswith("#") else SymbolRefAttr(dialect, [rest])
