"""Convert attributes of operators between the core's plain Python values and xDSL's attributes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from xdsl.dialects.builtin import DenseArrayBase, FloatAttr, IntegerAttr, StringAttr, UnitAttr, f64, i64
from xdsl.ir import Attribute
from xdsl.irdl import AttrConstraint, BaseAttr
from xdsl.printer import Printer

from unity_ir.errors import UnityError
from unity_ir.tdl.syntax import AttrValue

CONSTRAINTS: dict[str, AttrConstraint] = {
    "int": IntegerAttr.constr(i64),
    "ints": DenseArrayBase.constr(i64),
    "float": FloatAttr.constr(f64),
    "name": BaseAttr(StringAttr),
    "dtype": BaseAttr(StringAttr),
}
"""The xDSL attribute for each kind of TDL attribute."""


def to_attribute(kind: str, value: AttrValue) -> Attribute:
    """
    Return an operator's attribute value as an xDSL attribute; `kind` is the kind that the operator declares for it:
    `int`, `ints`, `float`, `name` or `dtype`.

    Given `"float"` and `1`, returns `1.0 : f64`. Raises `UnityError` for integers beyond 64 bits, for infinities and
    NaN, and for a float where `kind` is not `float`.
    """
    match value:
        case int() | float() if kind == "float":
            if not math.isfinite(value):
                raise UnityError(f"pcg: {value} is not a finite number")
            return FloatAttr(float(value), f64)
        case int():
            return IntegerAttr(_checked(value), i64)
        case tuple():
            return DenseArrayBase.from_list(i64, [_checked(v) for v in value])
        case str():
            return StringAttr(value)
        case float():
            raise UnityError(f"pcg: {value} is not an {kind}")


def _checked(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise UnityError(f"pcg: {value} does not fit 64 bits")
    return value


def to_value(where: str, name: str, attribute: Attribute) -> AttrValue:
    """
    Return an operator's attribute, given as an xDSL attribute, as a plain Python value. Messages name it by `where`,
    the operation, and `name`, the attribute's name.

    Raises `UnityError` for attributes that no operator has: numbers of other than 64 bits, nested ones.
    """
    match attribute:
        case IntegerAttr(type=t) if t == i64:
            return attribute.value.data
        case FloatAttr(type=t) if t == f64:
            return attribute.value.data
        case StringAttr():
            return attribute.data
        case DenseArrayBase() if DenseArrayBase.constr(i64).verifies(attribute):
            return tuple(int(v) for v in attribute.iter_values())
        case _:
            raise UnityError(
                f"{where}: attribute {name} is {attribute}; it must be a 64-bit number, a string, or array<i64: ...>"
            )


def float_text(value: float) -> str:
    """
    Return the shortest MLIR literal of a number.

    Given 1e-08, returns `1.0e-08`, since MLIR requires the point.
    """
    mantissa, e, exponent = repr(value).partition("e")
    return mantissa + ("" if "." in mantissa else ".0") + e + exponent


def print_dictionary(printer: Printer, attributes: Mapping[str, Attribute]) -> None:
    """Print attributes as ` {act = "relu", dim = 1}`, 64-bit numbers without type; print nothing if there are none."""

    def entry(name: str, attribute: Attribute) -> None:
        printer.print_identifier_or_string_literal(name)
        if isinstance(attribute, UnitAttr):
            return
        printer.print_string(" = ")
        match attribute:
            case FloatAttr(type=t) if t == f64 and math.isfinite(attribute.value.data):
                printer.print_string(float_text(attribute.value.data))
            case IntegerAttr(type=t) if t == i64:
                printer.print_int(attribute.value.data)
            case _:
                printer.print_attribute(attribute)

    if attributes:
        printer.print_string(" ")
        with printer.in_braces():
            printer.print_list(attributes.items(), lambda item: entry(*item))
