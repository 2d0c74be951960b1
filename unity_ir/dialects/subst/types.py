"""Types of a pattern's values: constraints on inputs, and results, whose shapes follow from the inputs'."""

from __future__ import annotations

from xdsl.ir import Data, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.dialects.subst.attributes import parse_body
from unity_ir.rules.parse import parse_tensor
from unity_ir.rules.text import tensor_text


@irdl_attr_definition
class SubstTensorType(Data[str], TypeAttribute):
    """`!subst.tensor<[a.., d*n:d] sum = d>`: any value of this shape, divided so; `int [b..]` one of integers."""

    name = "subst.tensor"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> str:
        return parse_body(parser, lambda text: tensor_text(parse_tensor(text)))

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.data}>")


@irdl_attr_definition
class SubstValueType(ParametrizedAttribute, TypeAttribute):
    """`!subst.value`: a result of an operator; its shape follows from the inputs'."""

    name = "subst.value"
