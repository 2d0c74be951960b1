"""
Types of the values in a rewrite rule's pattern: constraints on its inputs, and results, whose shapes follow from the
inputs'.
"""

from __future__ import annotations

from typing import ClassVar

from xdsl.ir import Data, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import AttrConstraint, irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.dialects.parameters import STRING
from unity_ir.dialects.subst.attributes import parse_body, print_body
from unity_ir.rules.parse import parse_tensor
from unity_ir.rules.text import tensor_text


@irdl_attr_definition
class SubstTensorType(Data[str], TypeAttribute):
    """
    `!subst.tensor<[a.., d*n:d] sum = d>`: a rule's input, shape and sharding in symbols (`a..`: any number of dims,
    `d*n:d`: a dim of size d*n in d shards); `int [b..]`: of integers, `bool [b..]`: of conditions.
    """

    name = "subst.tensor"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {"text": STRING}

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> str:
        """
        Parse the constraint on an input in angle brackets; return it as text, in normal form. Raises `ParseError`.
        """
        return parse_body(parser, lambda text: tensor_text(parse_tensor(text)))

    def print_parameter(self, printer: Printer) -> None:
        """Print the constraint in angle brackets, as `parse_parameter` reads it."""
        print_body(printer, self.data)


@irdl_attr_definition
class SubstValueType(ParametrizedAttribute, TypeAttribute):
    """`!subst.value`: the type of an operator's result in a pattern; its shape follows from the inputs'."""

    name = "subst.value"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {}
