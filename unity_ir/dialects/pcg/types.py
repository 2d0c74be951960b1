"""`!pcg.tensor`: the compiler's own `TensorType` as an xDSL type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Literal, cast

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, StringAttr
from xdsl.ir import Attribute, Data, TypeAttribute
from xdsl.irdl import AttrConstraint, irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.dialects.parameters import (
    ARRAY,
    DICTIONARY,
    ELEMENT,
    ELEMENT_TYPES,
    INTEGER,
    ParameterPrinter,
    check_count,
    dictionary,
    element,
    integer,
    integers,
    pairs,
    parse_more,
    print_parameters,
    to_numbers,
)
from unity_ir.errors import UnityError
from unity_ir.pcg.types import InTime, TensorType, tensor_type


@irdl_attr_definition
class PcgTensorType(Data[TensorType], TypeAttribute):
    """
    `!pcg.tensor<[64:2, 784], f32, sum = 2, copy = 4>`: a tensor of 64 x 784 elements, with dim 0 in 2 shards, as 2
    addends of the value (partial sums), in 4 copies: see `unity_ir.pcg.types`. In `[64:8:t4, 784]`, dim 0 is in 8
    shards, and each of 4 micro-batches has 2 of them. Make one with `pcg_tensor`.
    """

    name = "pcg.tensor"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {
        "shape": ARRAY,
        "degrees": ARRAY,
        "dtype": ELEMENT,
        "sum": INTEGER,
        "copy": INTEGER,
        "more": DICTIONARY,
    }
    """
    Parameters in the spelling for IRDL (`dialects.parameters`); `more` has `grad`, `halo`, `halo_sum` and `time` where
    they are given.
    """

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> TensorType:
        """
        Parse the parameter of the type, the text in angle brackets, and return what it describes, a `TensorType`:
        `<[64:2, 784], f32, sum = 2>`. Raises `ParseError`.
        """

        def number() -> int:
            return parser.parse_integer(allow_boolean=False, allow_negative=True)

        borders: dict[str, list[tuple[int, int]]] = {"halo": [], "halo_sum": []}
        times: list[InTime] = []

        def degree_in(role: int | Literal["sum", "copy"]) -> int:
            """Parse a degree, and how many of its pieces are in time: `8`, `8:t4`."""
            degree = number()
            if parser.parse_optional_punctuation(":") is not None:
                position = parser.pos
                text = parser.parse_identifier()
                if not re.fullmatch("t[0-9]{1,9}", text):
                    parser.raise_error(f"expected t and a number of micro-batches, such as t4, got {text}", position)
                times.append(InTime(role, int(text[1:])))
            return degree

        def dim() -> tuple[int, int]:
            size = number()
            is_divided = parser.parse_optional_punctuation(":") is not None
            degree = degree_in(len(borders["halo"])) if is_divided else 1
            for kind, found in borders.items():
                found.append((0, 0))
                if parser.parse_optional_keyword(kind) is not None:
                    with parser.in_parens():
                        low = number()
                        parser.parse_punctuation(",")
                        found[-1] = (low, number())
            return size, degree

        start = parser.pos
        degrees = {"sum": 1, "copy": 1}
        with parser.in_angle_brackets():
            dims = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, dim)
            parser.parse_punctuation(",")
            own = parser.parse_optional_comma_separated_list(parser.Delimiter.SQUARE, number)
            if own is not None:
                lists = [to_numbers(tuple(s for s, _ in dims)), to_numbers(tuple(own))]
                parameters = [*lists, *parse_more(parser)]
                try:
                    return _from_parameters(parameters)
                except UnityError as error:
                    parser.raise_error(str(error), start)
            dtype = parser.parse_identifier()
            grad = ""
            left = ["grad", *degrees]
            # Each may be left out, in this order; a comma is not given back.
            while left and parser.parse_optional_punctuation(",") is not None:
                found = next((k for k in left[:-1] if parser.parse_optional_keyword(k) is not None), None)
                if found is None:
                    parser.parse_keyword(found := left[-1])
                del left[: left.index(found) + 1]
                parser.parse_punctuation("=")
                if found == "grad":
                    grad = parser.parse_identifier()
                else:
                    degrees[found] = degree_in("sum" if found == "sum" else "copy")
        if len(times) > 1:
            parser.raise_error("pcg.tensor: two of its degrees are divided in time; only one can be", start)
        try:
            more = {**degrees, **{kind: tuple(found) for kind, found in borders.items()}}
            sizes, cut = (tuple(each) for each in zip(*dims, strict=True)) if dims else ((), ())
            return tensor_type(sizes, dtype, cut, **more, grad=grad, time=times[0] if times else None)
        except UnityError as error:
            parser.raise_error(str(error), start)

    def print_parameter(self, printer: Printer) -> None:
        """Print the type in angle brackets, as `parse_parameter` reads it."""
        if isinstance(printer, ParameterPrinter):
            print_parameters(printer, _to_parameters(self.data))
            return
        printer.print_string(str(self.data).removeprefix("!pcg.tensor"))


def _to_parameters(type: TensorType) -> list[Attribute]:
    more: dict[str, Attribute] = {}
    if type.grad:
        more["grad"] = ELEMENT_TYPES[type.grad]
    borders = (("halo", type.halo), ("halo_sum", type.halo_sum))
    more |= {kind: to_numbers(border) for kind, border in borders if border}
    if type.time is not None:
        role, pieces = type.time.role, type.time.pieces
        more["time"] = ArrayAttr([StringAttr(role) if isinstance(role, str) else to_numbers(role), to_numbers(pieces)])
    numbers = [to_numbers(type.shape), to_numbers(type.degrees), ELEMENT_TYPES[type.dtype]]
    return [*numbers, to_numbers(type.sum), to_numbers(type.copy), DictionaryAttr(more)]


def _from_parameters(parameters: Sequence[Attribute]) -> TensorType:
    where = "pcg.tensor"
    check_count(where, parameters, PcgTensorType.PARAMETERS)
    shape, degrees, dtype, sum, copy, rest = parameters
    more = dictionary(where, rest, ("grad", "halo", "halo_sum", "time"))
    sizes = integers(where, shape)
    borders = {kind: pairs(where, more[kind]) for kind in ("halo", "halo_sum") if kind in more}
    if any(len(border) != len(sizes) for border in borders.values()):
        raise UnityError(f"{where}: a halo has two numbers for each dim of {list(sizes)}")
    return tensor_type(
        sizes,
        element(where, dtype),
        integers(where, degrees),
        integer(where, sum),
        integer(where, copy),
        **borders,
        grad=element(where, more["grad"]) if "grad" in more else "",
        time=_in_time(where, more["time"]) if "time" in more else None,
    )


def _in_time(where: str, attribute: Attribute) -> InTime:
    """Given `["sum", 4]` or `[0, 4]`, returns the division in time of that role and number of pieces."""
    match tuple(cast("ArrayAttr[Attribute]", attribute)) if isinstance(attribute, ArrayAttr) else ():
        case (StringAttr(data="sum" | "copy" as role), pieces):
            return InTime(role, integer(where, pieces))
        case (dim, pieces):
            return InTime(integer(where, dim), integer(where, pieces))
        case _:
            raise UnityError(f"{where}: time is {attribute}; it must be a role and a number of pieces")


@cache
def pcg_tensor(type: TensorType) -> PcgTensorType:
    """Return a `TensorType` as an xDSL type; equal types give the same object."""
    return PcgTensorType(type)
