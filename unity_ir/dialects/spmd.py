"""
The spmd dialect: one rank's program, with local shapes and explicit collectives.

Every value is a rank's piece; its type says of what: `!spmd.piece<[32, 784] of [64, 784], f32, [dim 0]>` is the local
shape, the global shape, the element type, and the role of every mesh axis (`dim i`, `copy`, `sum`, `repeat`).
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    StringAttr,
    SymbolNameConstraint,
    f64,
    i64,
)
from xdsl.ir import Data, Dialect, Region, TypeAttribute
from xdsl.irdl import (
    BaseAttr,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, IsTerminator, NoTerminator, SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

from unity_ir.errors import UnityError
from unity_ir.pcg.layout import COPY, PINNED, REPEAT, SUM, Layout, at, pins, role_name
from unity_ir.pcg.reshard import KINDS, PINNED_KINDS, move_kind
from unity_ir.pcg.types import tensor_type

ROLES = {"copy": COPY, "sum": SUM, "repeat": REPEAT}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a piece is: its own shape, the whole tensor's, the element type, the role of every mesh axis."""

    local: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout

    def __str__(self) -> str:
        roles = ", ".join(map(role_name, self.layout))
        return f"<{list(self.local)} of {list(self.shape)}, {self.dtype}, [{roles}]>"


@irdl_attr_definition
class PieceType(Data[Piece], TypeAttribute):
    """`!spmd.piece<[32, 784] of [64, 784], f32, [dim 0]>`."""

    name = "spmd.piece"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> Piece:
        def number() -> int:
            return parser.parse_integer(allow_boolean=False, allow_negative=False)

        def role() -> int:
            if parser.parse_optional_keyword("dim") is not None:
                return number()
            if parser.parse_optional_keyword("at") is not None:
                return at(number())
            for word, code in ROLES.items():
                if parser.parse_optional_keyword(word) is not None:
                    return code
            parser.raise_error("expected a role: dim i, copy, sum, repeat or at i")

        position = parser.pos
        with parser.in_angle_brackets():
            local = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, number)
            parser.parse_keyword("of")
            shape = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, number)
            parser.parse_punctuation(",")
            dtype = parser.parse_identifier()
            parser.parse_punctuation(",")
            layout = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, role)
        try:
            tensor_type(tuple(shape), dtype)
        except UnityError as error:
            parser.raise_error(str(error), position)
        if len(local) != len(shape) or any(role >= len(shape) for role in layout):
            parser.raise_error(f"spmd.piece: {local} is not a piece of {shape} with these roles", position)
        return Piece(tuple(local), tuple(shape), dtype, tuple(layout))

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(str(self.data))


PIECE = BaseAttr(PieceType)


@irdl_op_definition
class ProgramOp(IRDLOperation):
    """`spmd.program @name mesh array<i64: 2, 2> {...}`: what every rank of the mesh runs."""

    name = "spmd.program"

    sym_name = prop_def(SymbolNameConstraint())
    mesh = prop_def(DenseArrayBase.constr(i64))
    body = region_def("single_block")

    traits = traits_def(SymbolOpInterface(), NoTerminator(), IsolatedFromAbove())
    assembly_format = "$sym_name `mesh` $mesh attr-dict-with-keyword $body"

    def __init__(self, name: str, mesh: tuple[int, ...], body: Region):
        super().__init__(
            properties={"sym_name": StringAttr(name), "mesh": DenseArrayBase.from_list(i64, mesh)}, regions=[body]
        )

    def verify_(self) -> None:
        sizes = self.mesh.get_values()
        for op in self.body.block.ops:
            for value in op.results:
                if isinstance(value.type, PieceType):
                    _check_piece(value.type.data, tuple(int(s) for s in sizes), op.name)


def _check_piece(piece: Piece, mesh: tuple[int, ...], where: str) -> None:
    if len(piece.layout) != len(mesh):
        raise VerifyException(f"{where}: {piece} has {len(piece.layout)} roles, but the mesh has {len(mesh)} axes")
    for axis, coordinate in pins(piece.layout):
        if coordinate >= mesh[axis]:
            raise VerifyException(f"{where}: {piece} is at {coordinate} of an axis of {mesh[axis]} devices")
    for dim, (local, size) in enumerate(zip(piece.local, piece.shape, strict=True)):
        degree = 1
        for axis, role in zip(mesh, piece.layout, strict=True):
            degree *= axis if role == dim else 1
        if local * degree != size:
            raise VerifyException(
                f"{where}: {piece}: dim {dim} is in {degree} pieces, so its local size is {size}/{degree}"
            )


@irdl_op_definition
class InputOp(IRDLOperation):
    """`spmd.input "x" : type`: this rank's piece of a batch."""

    name = "spmd.input"
    input_name = prop_def(StringAttr, prop_name="name")
    result = result_def(PIECE)
    assembly_format = "$name attr-dict `:` type($result)"


@irdl_op_definition
class WeightOp(IRDLOperation):
    """`spmd.weight "w" : type`: this rank's piece of a parameter."""

    name = "spmd.weight"
    weight_name = prop_def(StringAttr, prop_name="name")
    result = result_def(PIECE)
    assembly_format = "$name attr-dict `:` type($result)"


@irdl_op_definition
class ConstantOp(IRDLOperation):
    """
    `spmd.constant 1.0 : type`: a number everywhere; where addends are wanted, the first is it and the others are 0.
    """

    name = "spmd.constant"
    value = prop_def(FloatAttr.constr(f64))
    result = result_def(PIECE)
    assembly_format = "$value attr-dict `:` type($result)"


@irdl_op_definition
class ComputeOp(IRDLOperation):
    """`spmd.compute "matmul"(%x, %w) with {act = "relu"} over ["m0", "copy"]`: an operator on pieces."""

    name = "spmd.compute"
    operator = prop_def(StringAttr)
    operator_attributes = prop_def(BaseAttr(DictionaryAttr))
    over = prop_def(ArrayAttr.constr(BaseAttr(StringAttr)))
    """What every mesh axis does in the operator's task grid: an index variable, `copy`, `sum` or `repeat`."""
    arguments = var_operand_def(PIECE)
    made = var_result_def(PIECE)
    assembly_format = (
        "$operator `(` $arguments `)` `with` $operator_attributes `over` $over attr-dict"
        " `:` functional-type($arguments, $made)"
    )


class MoveOp(IRDLOperation):
    """`spmd.all_gather %x along array<i64: 0> : from -> to`: one move of the reshard planner, by its kind."""

    operand = operand_def(PIECE)
    result = result_def(PIECE)
    axes = prop_def(DenseArrayBase.constr(i64))

    assembly_format = "$operand `along` $axes attr-dict `:` type($operand) `->` type($result)"

    @property
    def kind(self) -> str:
        """What the move does, as the planner calls it."""
        return self.name.removeprefix("spmd.")

    @property
    def roles(self) -> tuple[int, int]:
        """The role the axes have before and after; `PINNED` of pinned ones."""
        axes = self.axes.get_values()
        assert isinstance(self.operand.type, PieceType)
        assert isinstance(self.result.type, PieceType)
        before, after = self.operand.type.data.layout, self.result.type.data.layout
        found = {(max(before[int(a)], PINNED), max(after[int(a)], PINNED)) for a in axes if 0 <= int(a) < len(before)}
        if len(found) != 1 or len(before) != len(after):
            raise VerifyException(f"{self.name}: its axes {list(axes)} do not all go from one role to one other")
        return found.pop()

    def verify_(self) -> None:
        source, target = self.roles
        listed = [int(a) for a in self.axes.get_values()]
        axes = set(listed)
        if listed != sorted(axes):
            raise VerifyException(f"{self.name}: its axes {listed} must be in order, each once")
        assert isinstance(self.operand.type, PieceType)
        assert isinstance(self.result.type, PieceType)
        before, after = self.operand.type.data, self.result.type.data
        moved = tuple(a if i in axes else b for i, (b, a) in enumerate(zip(before.layout, after.layout, strict=True)))
        if (before.shape, before.dtype) != (after.shape, after.dtype) or moved != after.layout:
            raise VerifyException(f"{self.name}: takes {before} to {after}, which is more than its axes' roles")
        same = before.layout == after.layout
        if same or move_kind(source, target) != self.kind:
            wanted = "nothing" if same else move_kind(source, target)
            raise VerifyException(f"{self.name}: {role_name(source)} to {role_name(target)} is {wanted}")


MOVES: dict[str, type[MoveOp]] = {
    kind: irdl_op_definition(
        type(f"{kind.title().replace('_', '')}Op", (MoveOp,), {"name": f"spmd.{kind}", "__module__": __name__})
    )
    for kind in (*KINDS, *PINNED_KINDS)
}
"""The class of every kind of move."""


@irdl_op_definition
class UpdateOp(IRDLOperation):
    """`spmd.update %w, %g {optimizer = "sgd", lr = 0.1}`: the optimizer's step on this rank's piece."""

    name = "spmd.update"
    weight = operand_def(PIECE)
    grad = operand_def(PIECE)
    optimizer = prop_def(BaseAttr(DictionaryAttr))
    assembly_format = "$weight `,` $grad `by` $optimizer attr-dict `:` type($weight) `,` type($grad)"

    def verify_(self) -> None:
        if self.weight.type != self.grad.type:
            raise VerifyException(f"spmd.update: the gradient is {self.grad.type}, the weight {self.weight.type}")


@irdl_op_definition
class ReturnOp(IRDLOperation):
    """`spmd.return %loss`: what a step gives back, the loss first."""

    name = "spmd.return"
    values = var_operand_def(PIECE)
    traits = traits_def(IsTerminator())
    assembly_format = "$values attr-dict `:` type($values)"


SPMD = Dialect(
    "spmd",
    [ProgramOp, InputOp, WeightOp, ConstantOp, ComputeOp, *MOVES.values(), UpdateOp, ReturnOp],
    [PieceType],
)
