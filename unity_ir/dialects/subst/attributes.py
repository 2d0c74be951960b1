"""
Attributes of the operators in a rewrite rule's pattern: polynomials in the rule's symbols (sizes, degrees), parameters
that take the value which a match finds (`$act`), and fixed values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from xdsl.dialects.builtin import ArrayAttr, FloatAttr, StringAttr, f64
from xdsl.ir import Attribute, Data
from xdsl.irdl import AttrConstraint, irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.dialects.parameters import STRING, ParameterPrinter
from unity_ir.errors import UnityError
from unity_ir.rules import pattern
from unity_ir.rules.parse import RuleTextError, parse_poly
from unity_ir.rules.pattern import AttrParameter
from unity_ir.rules.poly import Poly

T = TypeVar("T")


def parse_body(parser: AttrParser, read: Callable[[str], T]) -> T:
    """
    Parse the text in angle brackets with the function `read`, and return what it returns. The text may be in double
    quotes, as in the spelling for IRDL (`dialects.parameters`).

    MLIR's tokens do not cover that text, so it is taken from the source, and the lexer is moved behind it. Raises
    `ParseError`: at the place of a `RuleTextError` that `read` raises, and for its other `UnityError`s.
    """
    text, start = parser.lexer.input.content, parser.pos
    end = text.find(">", start)
    if text[start : start + 1] != "<" or end < 0:
        parser.raise_error("expected `<...>`")
    first, last = start + 1, end
    if text[first] == text[last - 1] == '"' and last - first > 1:
        first, last = first + 1, last - 1
    try:
        found = read(text[first:last])
    except RuleTextError as error:
        parser.raise_error(str(error), first + error.position, end)
    except UnityError as error:
        parser.raise_error(str(error), start + 1, end)
    parser.lexer.pos = end
    parser.parse_punctuation("<")
    parser.parse_punctuation(">")
    return found


def print_body(printer: Printer, text: str) -> None:
    """Print a text in angle brackets, as `parse_body` reads it."""
    printer.print_string(f'<"{text}">' if isinstance(printer, ParameterPrinter) else f"<{text}>")


@irdl_attr_definition
class PolyAttr(Data[Poly]):
    """
    `#subst.poly<2*d*m + n - 1>`: a polynomial in a rewrite rule's symbols, which stand for sizes and degrees
    (`unity_ir.rules.poly`).
    """

    name = "subst.poly"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {"text": STRING}

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> Poly:
        """Parse the polynomial in angle brackets. Raises `ParseError`."""
        return parse_body(parser, parse_poly)

    def print_parameter(self, printer: Printer) -> None:
        """Print the polynomial in angle brackets."""
        print_body(printer, str(self.data))


@irdl_attr_definition
class ParameterAttr(Data[str]):
    """
    `#subst.parameter<act>`: a name in a rewrite rule that stands for the value of an operator's attribute, whichever a
    match finds.
    """

    name = "subst.parameter"

    PARAMETERS: ClassVar[dict[str, AttrConstraint]] = {"text": STRING}

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> str:
        """Parse the name in angle brackets. Raises `ParseError`."""
        with parser.in_angle_brackets():
            text = parser.parse_optional_str_literal()
            return parser.parse_identifier() if text is None else text

    def print_parameter(self, printer: Printer) -> None:
        """Print the name in angle brackets."""
        print_body(printer, self.data)


def to_attribute(value: pattern.AttrExpr) -> Attribute:
    """
    Return the xDSL attribute that holds the value of an operator's attribute in a rule's pattern: a polynomial, a tuple
    of them, a parameter bound by the match (`$act`), a name or a float.
    """
    match value:
        case Poly():
            return PolyAttr(value)
        case tuple():
            return ArrayAttr(map(PolyAttr, value))
        case AttrParameter(name):
            return ParameterAttr(name)
        case str():
            return StringAttr(value)
        case _:
            return FloatAttr(value, f64)


def from_attribute(name: str, attribute: Attribute) -> pattern.AttrExpr:
    """
    Return the value of an operator's attribute in a rule's pattern, given the xDSL attribute that `to_attribute` made
    of it. Messages name the attribute by `name`.

    Raises `UnityError` for attributes that no pattern has.
    """
    match attribute:
        case PolyAttr():
            return attribute.data
        case ArrayAttr():
            items: list[Poly] = []
            for item in attribute:
                if not isinstance(item, PolyAttr):
                    raise UnityError(f"subst.apply: attribute {name} has {item}; it must be a list of #subst.poly")
                items.append(item.data)
            return tuple(items)
        case ParameterAttr():
            return AttrParameter(attribute.data)
        case StringAttr():
            return attribute.data
        case FloatAttr(type=t) if t == f64:
            return attribute.value.data
        case _:
            raise UnityError(f"subst.apply: attribute {name} is {attribute}; it must be a #subst.poly, string or f64")
