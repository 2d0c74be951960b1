"""
The type of a value of the spmd dialect: a rank's piece of a tensor.

`!spmd.piece<[32, 784] of [64, 784], f32, [dim 0]>` gives the local shape, the global shape, the element type, and the
role of every mesh axis (`dim i`, `copy`, `sum`, `repeat`). A halo, the elements by which a piece reaches beyond its
shard of a dim, is written at the global size: `[8, 3, 34, 32] of [8, 3, 64 halo(1, 1), 32]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    StringAttr,
)
from xdsl.ir import Attribute, Data, TypeAttribute
from xdsl.irdl import (
    AttrConstraint,
    irdl_attr_definition,
)
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.dialects.parameters import (
    ARRAY,
    DICTIONARY,
    ELEMENT,
    ELEMENT_TYPES,
    ParameterPrinter,
    check_count,
    dictionary,
    element,
    integers,
    pairs,
    parse_more,
    print_parameters,
    to_numbers,
)
from unity_ir.errors import UnityError
from unity_ir.pcg.sharding import COPY, REPEAT, SUM, Layout, pinned_at, role_name
from unity_ir.pcg.types import tensor_type
from unity_ir.tdl.divisibility import Halos

ROLES = {"copy": COPY, "sum": SUM, "repeat": REPEAT}
"""The role of a mesh axis, as a number, by its word in text; `dim i` is i, and `at i` is `pinned_at(i)`."""


@dataclass(frozen=True, slots=True)
class LocalTensorType:
    """
    The type of a rank's piece of a tensor: its local shape, the tensor's global shape and element type, and in `layout`
    the role of each mesh axis: the dim that it shards (0 or more), or below 0 one of `pcg.sharding`'s codes (`COPY`,
    `SUM`, ..).

    `halo` and `halo_sum` are, for each dim, the elements (before, after) by which the piece reaches beyond its shard:
    in `halo` they are copies of its neighbours' elements, in `halo_sum` addends to them. At most one of the two is not
    empty.
    """

    local: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    halo: Halos = ()
    halo_sum: Halos = ()

    @property
    def borders(self) -> Halos:
        """
        For each dim, the number of elements (before, after) by which the piece reaches beyond its own shard, or (0, 0):
        those of `halo` (copies of the neighbours' elements) or of `halo_sum` (partial sums, still to be added to the
        neighbours' elements), of which a piece has at most one.
        """
        return self.halo or self.halo_sum or ((0, 0),) * len(self.shape)

    def __str__(self) -> str:
        roles = ", ".join(map(role_name, self.layout))
        kind = "halo" if self.halo else "halo_sum"
        dims = (
            str(size) + (f" {kind}({b[0]}, {b[1]})" if any(b) else "")
            for size, b in zip(self.shape, self.borders, strict=True)
        )
        return f"<{list(self.local)} of [{', '.join(dims)}], {self.dtype}, [{roles}]>"


@irdl_attr_definition
class PieceType(Data[LocalTensorType], TypeAttribute):
    """
    `!spmd.piece<[32, 784] of [64, 784], f32, [dim 0]>`: the type of a rank's piece of a tensor: local shape, global
    shape, element type, and the role of each mesh axis.
    """

    name = "spmd.piece"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {
        "local": ARRAY,
        "shape": ARRAY,
        "dtype": ELEMENT,
        "roles": ARRAY,
        "more": DICTIONARY,
    }
    """Parameters in the spelling for IRDL (`dialects.parameters`); `more` has `halo` or `halo_sum`, if any."""

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> LocalTensorType:
        """
        Parse the parameter of the type, the text in angle brackets, and return what it describes, a `LocalTensorType`:
        `<[32, 784] of [64, 784], f32, [dim 0]>`. Raises `ParseError`.
        """

        def number() -> int:
            return parser.parse_integer(allow_boolean=False, allow_negative=False)

        def role() -> int:
            if parser.parse_optional_keyword("dim") is not None:
                return number()
            if parser.parse_optional_keyword("at") is not None:
                return pinned_at(number())
            for word, code in ROLES.items():
                if parser.parse_optional_keyword(word) is not None:
                    return code
            parser.raise_error("expected a role: dim i, copy, sum, repeat or at i")

        borders: dict[str, list[tuple[int, int]]] = {"halo": [], "halo_sum": []}

        def size() -> int:
            found = number()
            for kind, own in borders.items():
                border = (0, 0)
                if parser.parse_optional_keyword(kind) is not None:
                    parser.parse_punctuation("(")
                    low = number()
                    parser.parse_punctuation(",")
                    border = low, number()
                    parser.parse_punctuation(")")
                own.append(border)
            return found

        position = parser.pos
        with parser.in_angle_brackets():
            local = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, number)
            if more := parse_more(parser):
                try:
                    return _from_parameters([to_numbers(tuple(local)), *more])
                except UnityError as error:
                    parser.raise_error(str(error), position)
            parser.parse_keyword("of")
            shape = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, size)
            parser.parse_punctuation(",")
            dtype = parser.parse_identifier()
            parser.parse_punctuation(",")
            layout = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, role)
        halo, halo_sum = (tuple(b) if any(map(any, b)) else () for b in borders.values())
        try:
            return _checked(LocalTensorType(tuple(local), tuple(shape), dtype, tuple(layout), halo, halo_sum))
        except UnityError as error:
            parser.raise_error(str(error), position)

    def print_parameter(self, printer: Printer) -> None:
        """Print the type in angle brackets, as `parse_parameter` reads it."""
        if isinstance(printer, ParameterPrinter):
            print_parameters(printer, _to_parameters(self.data))
            return
        printer.print_string(str(self.data))


def _checked(piece: LocalTensorType) -> LocalTensorType:
    """Return a piece whose fields fit each other. Raises `UnityError` for another."""
    tensor_type(piece.shape, piece.dtype)
    local, shape = list(piece.local), list(piece.shape)
    if len(local) != len(shape) or any(role >= len(shape) for role in piece.layout):
        raise UnityError(f"spmd.piece: {local} is not a piece of {shape} with these roles")
    if piece.halo and piece.halo_sum:
        raise UnityError("spmd.piece: a halo holds copies or addends, not both")
    return piece


def _to_parameters(piece: LocalTensorType) -> list[Attribute]:
    borders = (("halo", piece.halo), ("halo_sum", piece.halo_sum))
    roles = ArrayAttr(StringAttr(role_name(role)) for role in piece.layout)
    more = DictionaryAttr({kind: to_numbers(border) for kind, border in borders if border})
    return [to_numbers(piece.local), to_numbers(piece.shape), ELEMENT_TYPES[piece.dtype], roles, more]


def _from_parameters(parameters: Sequence[Attribute]) -> LocalTensorType:
    where = "spmd.piece"
    check_count(where, parameters, PieceType.PARAMETERS)
    local, shape, dtype, roles, rest = parameters
    more = dictionary(where, rest, ("halo", "halo_sum"))
    borders = {kind: pairs(where, more[kind]) for kind in ("halo", "halo_sum") if kind in more}
    sizes = integers(where, shape)
    if any(len(border) != len(sizes) or min(map(min, border), default=0) < 0 for border in borders.values()):
        raise UnityError(f"{where}: a halo has two numbers for each dim of {list(sizes)}, from 0")
    if not isinstance(roles, ArrayAttr):
        raise UnityError(f"{where}: the parameter {roles} must be a list of roles")
    layout = [_role(where, role) for role in cast("ArrayAttr[Attribute]", roles)]
    return _checked(LocalTensorType(integers(where, local), sizes, element(where, dtype), tuple(layout), **borders))


def _role(where: str, attribute: Attribute) -> int:
    """Given `"dim 0"`, returns 0; the inverse of `role_name`. Raises `UnityError` for other texts."""
    text = attribute.data if isinstance(attribute, StringAttr) else ""
    kind, _, number = text.partition(" ")
    if kind in ("dim", "at") and number.isascii() and number.isdecimal():
        return int(number) if kind == "dim" else pinned_at(int(number))
    if text not in ROLES:
        raise UnityError(f"{where}: {attribute} is no role; roles are dim i, copy, sum, repeat and at i")
    return ROLES[text]
