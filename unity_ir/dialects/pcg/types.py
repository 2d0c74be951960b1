"""`!pcg.tensor`: the compiler's own `TensorType` as an xDSL type."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from xdsl.ir import Data, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.errors import UnityError
from unity_ir.pcg.types import InTime, TensorType, tensor_type


@irdl_attr_definition
class PcgTensorType(Data[TensorType], TypeAttribute):
    """
    `!pcg.tensor<[64:2, 784], f32, sum = 2, copy = 4>`: 64 x 784 elements, dim 0 in 2 shards, as 2 addends of the value
    (partial sums) in 4 copies: see `unity_ir.pcg.types`. `[64:8:t4, 784]`: of 8 shards each of 4 micro-batches has 2.
    Make one with `pcg_tensor`.
    """

    name = "pcg.tensor"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> TensorType:
        """Parse the type in angle brackets: `<[64:2, 784], f32, sum = 2>`. Raises `ParseError`."""

        def integer() -> int:
            return parser.parse_integer(allow_boolean=False, allow_negative=True)

        borders: dict[str, list[tuple[int, int]]] = {"halo": [], "halo_sum": []}
        times: list[InTime] = []

        def degree_in(role: int | Literal["sum", "copy"]) -> int:
            """Parse a degree, and how many of its pieces are in time: `8`, `8:t4`."""
            degree = integer()
            if parser.parse_optional_punctuation(":") is not None:
                position = parser.pos
                text = parser.parse_identifier()
                if not re.fullmatch("t[0-9]{1,9}", text):
                    parser.raise_error(f"expected t and a number of micro-batches, such as t4, got {text}", position)
                times.append(InTime(role, int(text[1:])))
            return degree

        def dim() -> tuple[int, int]:
            size = integer()
            is_divided = parser.parse_optional_punctuation(":") is not None
            degree = degree_in(len(borders["halo"])) if is_divided else 1
            for kind, found in borders.items():
                found.append((0, 0))
                if parser.parse_optional_keyword(kind) is not None:
                    with parser.in_parens():
                        low = integer()
                        parser.parse_punctuation(",")
                        found[-1] = (low, integer())
            return size, degree

        start = parser.pos
        degrees = {"sum": 1, "copy": 1}
        with parser.in_angle_brackets():
            dims = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, dim)
            parser.parse_punctuation(",")
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
        printer.print_string(str(self.data).removeprefix("!pcg.tensor"))


@cache
def pcg_tensor(type: TensorType) -> PcgTensorType:
    """Return a `TensorType` as an xDSL type; equal types give the same object."""
    return PcgTensorType(type)
