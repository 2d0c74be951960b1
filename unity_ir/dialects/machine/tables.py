"""Convert the tables of a machine's description to attributes and to text: `{size = 4, hub = {bandwidth = 1.0e10}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FloatAttr, IntegerAttr, StringAttr, f64, i1, i64
from xdsl.ir import Attribute
from xdsl.parser import Parser
from xdsl.printer import Printer

from unity_ir.errors import UnityError

MAX_DEPTH = 8
"""Maximum depth of nested tables and lists, more than any description needs."""


def _entries(table: Any) -> list[tuple[str, Any]]:
    return list(table.items())


def to_attribute(value: Any) -> Attribute:
    """
    Return a value of a machine's description as an attribute: a boolean as i1, an integer as i64 (as f64 beyond 64
    bits), a float as f64, a string, a list as an array, and a table (mapping) as a dictionary, nested ones included.
    """
    match value:
        case bool():
            return IntegerAttr(int(value), i1)
        case int() if abs(value) < 2**63:
            return IntegerAttr(value, i64)
        case int() | float():
            return FloatAttr(float(value), f64)
        case str():
            return StringAttr(value)
        case Mapping():
            return DictionaryAttr({key: to_attribute(item) for key, item in _entries(value)})
        case _:
            return ArrayAttr(to_attribute(item) for item in value)


def from_attribute(attribute: Attribute) -> Any:
    """
    Return the Python value of an attribute that `to_attribute` made: a boolean, number, string, list or dict. Raises
    `UnityError` for attributes of other kinds.
    """
    match attribute:
        case IntegerAttr():
            number = attribute.value.data
            return bool(number) if attribute.type == i1 else number
        case FloatAttr():
            return attribute.value.data
        case StringAttr():
            return attribute.data
        case DictionaryAttr():
            return {key: from_attribute(item) for key, item in attribute.data.items()}
        case ArrayAttr():
            return [from_attribute(item) for item in attribute.data]
        case _:
            raise UnityError(f"machine: {attribute} in a description; it must be a number, string, list or table")


def parse_table(parser: Parser) -> dict[str, Any]:
    """Parse a table in braces: `{size = 4, link = "switch"}`. Raises `ParseError`, also for a key given twice."""
    table: dict[str, Any] = {}

    def entry() -> None:
        start = parser.pos
        key = parser.parse_optional_identifier() or parser.parse_str_literal()
        if key in table:
            parser.raise_error(f"machine: {key} is given twice; remove one", start)
        parser.parse_punctuation("=")
        table[key] = _parse_value(parser, MAX_DEPTH)

    parser.parse_comma_separated_list(parser.Delimiter.BRACES, entry)
    return table


def _parse_value(parser: Parser, depth: int) -> Any:
    if not depth:
        parser.raise_error("machine: tables are too deep")
    if (text := parser.parse_optional_str_literal()) is not None:
        return text
    if (flag := parser.parse_optional_boolean()) is not None:
        return flag
    if (number := parser.parse_optional_number()) is not None:
        return number
    lists = parser.parse_optional_comma_separated_list(parser.Delimiter.SQUARE, lambda: _parse_value(parser, depth - 1))
    return parse_table(parser) if lists is None else lists


def print_value(printer: Printer, value: Any) -> None:
    """Print a value, a boolean, number, string, list or table, in the syntax that `parse_table` reads."""
    match value:
        case bool():
            printer.print_string("true" if value else "false")
        case int():
            printer.print_string(str(value))
        case float():
            printer.print_string(float_text(value))
        case str():
            printer.print_string_literal(value)
        case Mapping():
            printer.print_string("{")
            printer.print_list(_entries(value), lambda item: _print_entry(printer, *item))
            printer.print_string("}")
        case _:
            printer.print_string("[")
            printer.print_list(value, lambda item: print_value(printer, item))
            printer.print_string("]")


def _print_entry(printer: Printer, key: str, value: Any) -> None:
    if key.isascii() and key.isidentifier():
        printer.print_string(key)
    else:
        printer.print_string_literal(key)
    printer.print_string(" = ")
    print_value(printer, value)


def float_text(value: float) -> str:
    """Return the shortest text that MLIR reads as this number: `2.5e10`, `1.0e-6`."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return np.format_float_scientific(value, trim="0", exp_digits=1).replace("e+", "e")
    return repr(value)
