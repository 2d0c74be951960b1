"""`!pcg.tensor`: the compiler's own `TensorType` as an xDSL type."""

from __future__ import annotations

from functools import cache

from xdsl.ir import Data, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.errors import UnityError
from unity_ir.pcg.types import TensorType, tensor_type


@irdl_attr_definition
class PcgTensorType(Data[TensorType], TypeAttribute):
    """
    `!pcg.tensor<[64:2, 784], f32, sum = 2, copy = 4>`: 64 x 784 elements, dim 0 in 2 shards, as 2 addends of the value
    (partial sums) in 4 copies: see `unity_ir.pcg.types`. Make one with `pcg_tensor`.
    """

    name = "pcg.tensor"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> TensorType:
        """Parse the type in angle brackets: `<[64:2, 784], f32, sum = 2>`. Raises `ParseError`."""

        def integer() -> int:
            return parser.parse_integer(allow_boolean=False, allow_negative=True)

        borders: dict[str, list[tuple[int, int]]] = {"halo": [], "halo_sum": []}

        def dim() -> tuple[int, int]:
            size = integer()
            degree = 1 if parser.parse_optional_punctuation(":") is None else integer()
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
                    degrees[found] = integer()
        try:
            more = {**degrees, **{kind: tuple(found) for kind, found in borders.items()}}
            return tensor_type(tuple(s for s, _ in dims), dtype, tuple(d for _, d in dims), **more, grad=grad)
        except UnityError as error:
            parser.raise_error(str(error), start)

    def print_parameter(self, printer: Printer) -> None:
        """Print the type in angle brackets, as `parse_parameter` reads it."""
        printer.print_string(str(self.data).removeprefix("!pcg.tensor"))


@cache
def pcg_tensor(type: TensorType) -> PcgTensorType:
    """Return a `TensorType` as an xDSL type; equal types give the same object."""
    return PcgTensorType(type)
