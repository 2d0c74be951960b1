"""
Spell types and attributes by parameters that are attributes themselves, as MLIR reads those of dialects it is given in
IRDL, its language for the definition of dialects, without code for their syntax.

`!pcg.tensor<[64:2, 784], f32>` is `!pcg.tensor<[64, 784], [2, 1], f32, 1, 1, {}>`. Every parser reads both spellings;
a `ParameterPrinter` prints the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, IntegerAttr, StringAttr, bf16, f16, f32, f64, i1, i32, i64
from xdsl.ir import Attribute
from xdsl.irdl import AttrConstraint, AttrSetConstraint, BaseAttr
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from unity_ir.errors import UnityError

Numbers: TypeAlias = "int | tuple[Numbers, ...]"
"""An integer, or a list of these or of lists."""

ELEMENT_TYPES: dict[str, Attribute] = {
    "f32": f32,
    "f64": f64,
    "bf16": bf16,
    "f16": f16,
    "i64": i64,
    "i32": i32,
    "bool": i1,
}
"""MLIR's type for each element type."""

ARRAY: AttrConstraint = BaseAttr(ArrayAttr)
INTEGER: AttrConstraint = BaseAttr(IntegerAttr)
STRING: AttrConstraint = BaseAttr(StringAttr)
DICTIONARY: AttrConstraint = BaseAttr(DictionaryAttr)
ELEMENT: AttrConstraint = AttrSetConstraint(frozenset(ELEMENT_TYPES.values()))


class ParameterPrinter(Printer):
    """Prints types and attributes of the dialects as lists of parameters, as MLIR reads them by the dialects' IRDL."""


def print_parameters(printer: Printer, parameters: Sequence[Attribute]) -> None:
    """Print parameters in angle brackets, integers without their type, which is i64, as MLIR does in lists."""

    def parameter(attribute: Attribute) -> None:
        match attribute:
            case ArrayAttr():
                with printer.in_square_brackets():
                    printer.print_list(attribute, parameter)
            case IntegerAttr(type=t) if t == i64:
                printer.print_int(attribute.value.data)
            case _:
                printer.print_attribute(attribute)

    with printer.in_angle_brackets():
        printer.print_list(parameters, parameter)


def parse_more(parser: AttrParser) -> list[Attribute]:
    """Parse `, attribute` any number of times; return the attributes, [] if there are none. Raises `ParseError`."""
    found: list[Attribute] = []
    while parser.parse_optional_punctuation(",") is not None:
        found.append(parser.parse_attribute())
    return found


def to_numbers(value: Numbers) -> Attribute:
    """Return an integer, or nested tuples of integers, as an i64 or nested arrays of i64."""
    return IntegerAttr(value, i64) if isinstance(value, int) else ArrayAttr(map(to_numbers, value))


def from_numbers(where: str, attribute: Attribute | None, depth: int) -> Numbers:
    """
    Return the integer (`depth` 0), or the lists of integers nested `depth` deep, of an attribute; `where` is for
    errors.

    Given `[[1, 0]]` and 2, returns `((1, 0),)`. Raises `UnityError` for another attribute.
    """
    if depth and isinstance(attribute, ArrayAttr):
        items = cast("ArrayAttr[Attribute]", attribute)
        return tuple(from_numbers(where, item, depth - 1) for item in items)
    if not depth and isinstance(attribute, IntegerAttr):
        number = cast("IntegerAttr", attribute)
        if number.type == i64:
            return number.value.data
    wanted = ("an integer", "a list of integers")[depth] if depth < 2 else "nested lists of integers"
    raise UnityError(f"{where}: the parameter {attribute} must be {wanted}")


def integer(where: str, attribute: Attribute | None) -> int:
    """Return the value of an i64 attribute. Raises `UnityError`, which begins with `where`, for another attribute."""
    return cast(int, from_numbers(where, attribute, 0))


def integers(where: str, attribute: Attribute | None) -> tuple[int, ...]:
    """
    Return a list of i64 attributes as a tuple. Raises `UnityError`, which begins with `where`, for another attribute.
    """
    return cast("tuple[int, ...]", from_numbers(where, attribute, 1))


def pairs(where: str, attribute: Attribute | None) -> tuple[tuple[int, int], ...]:
    """
    Return a list of pairs of i64, such as `[[1, 0], [0, 0]]`, as tuples. Raises `UnityError`, which begins with
    `where`, for another attribute.
    """
    found = cast("tuple[tuple[int, ...], ...]", from_numbers(where, attribute, 2))
    if any(len(pair) != 2 for pair in found):
        raise UnityError(f"{where}: the parameter {attribute} must be a list of pairs")
    return cast("tuple[tuple[int, int], ...]", found)


def element(where: str, attribute: Attribute) -> str:
    """
    Return the compiler's name of an element type of MLIR, such as `bool` for `i1`. Raises `UnityError`, which begins
    with `where`, for other attributes.
    """
    found = next((name for name, type in ELEMENT_TYPES.items() if type == attribute), None)
    if found is None:
        raise UnityError(f"{where}: the parameter {attribute} must be an element type: {', '.join(ELEMENT_TYPES)}")
    return found


def dictionary(where: str, attribute: Attribute, known: Sequence[str]) -> Mapping[str, Attribute]:
    """
    Return the entries of a dictionary attribute, by key. Raises `UnityError`, which begins with `where`, for other
    attributes, and for keys that are not `known`.
    """
    if not isinstance(attribute, DictionaryAttr) or set(attribute.data) - set(known):
        raise UnityError(f"{where}: the parameter {attribute} must be a dictionary of {', '.join(known)}")
    return attribute.data


def check_count(where: str, parameters: Sequence[Attribute], names: Mapping[str, AttrConstraint]) -> None:
    """
    Check that there are as many `parameters` as `names` (by parameter name) has. Raises `UnityError`, which begins with
    `where`, otherwise.
    """
    if len(parameters) != len(names):
        raise UnityError(f"{where}: {len(parameters)} parameters; there must be {len(names)}: {', '.join(names)}")
