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
    """
    Printer that prints types and attributes of this project's dialects as lists of parameters (`dialects.parameters`),
    as MLIR reads them with only the dialects' IRDL.
    """


def print_parameters(printer: Printer, parameters: Sequence[Attribute]) -> None:
    """
    Print the parameters of a type or attribute, in angle brackets and with commas: `<[64, 2], f32>`. Integers of type
    i64 are printed without the type, arrays in square brackets.
    """

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
    """
    Parse the parameters of a type or attribute after the first: `, attribute` any number of times. Return them, [] if
    there are none. Raises `ParseError`.
    """
    found: list[Attribute] = []
    while parser.parse_optional_punctuation(",") is not None:
        found.append(parser.parse_attribute())
    return found


def to_numbers(value: Numbers) -> Attribute:
    """Return an integer as an i64 attribute, or nested tuples of integers as nested array attributes of i64."""
    return IntegerAttr(value, i64) if isinstance(value, int) else ArrayAttr(map(to_numbers, value))


def from_numbers(where: str, attribute: Attribute | None, depth: int) -> Numbers:
    """
    Return the integers in an attribute, which is an array of arrays nested `depth` deep, as nested tuples: one integer
    for `depth` 0, a tuple of integers for 1.

    Given `[[1, 0]]` and 2, returns `((1, 0),)`. Raises `UnityError`, in a message that begins with `where`, for another
    attribute.
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
    """
    Return the value of an i64 attribute as an int. Raises `UnityError`, in a message that begins with `where`, for any
    other attribute.
    """
    return cast(int, from_numbers(where, attribute, 0))


def integers(where: str, attribute: Attribute | None) -> tuple[int, ...]:
    """
    Return an array attribute of i64 as a tuple of ints. Raises `UnityError`, in a message that begins with `where`, for
    any other attribute.
    """
    return cast("tuple[int, ...]", from_numbers(where, attribute, 1))


def pairs(where: str, attribute: Attribute | None) -> tuple[tuple[int, int], ...]:
    """
    Return an array attribute of pairs of i64, such as `[[1, 0], [0, 0]]`, as a tuple of pairs. Raises `UnityError`, in
    a message that begins with `where`, for any other attribute.
    """
    found = cast("tuple[tuple[int, ...], ...]", from_numbers(where, attribute, 2))
    if any(len(pair) != 2 for pair in found):
        raise UnityError(f"{where}: the parameter {attribute} must be a list of pairs")
    return cast("tuple[tuple[int, int], ...]", found)


def element(where: str, attribute: Attribute) -> str:
    """
    Return the compiler's name of an MLIR element type: given `i1`, returns `bool`. Raises `UnityError`, in a message
    that begins with `where`, for any other attribute.
    """
    found = next((name for name, type in ELEMENT_TYPES.items() if type == attribute), None)
    if found is None:
        raise UnityError(f"{where}: the parameter {attribute} must be an element type: {', '.join(ELEMENT_TYPES)}")
    return found


def dictionary(where: str, attribute: Attribute, known: Sequence[str]) -> Mapping[str, Attribute]:
    """
    Return the entries of a dictionary attribute by key. Raises `UnityError`, in a message that begins with `where`, for
    any other attribute, and for a key that is not in `known`.
    """
    if not isinstance(attribute, DictionaryAttr) or set(attribute.data) - set(known):
        raise UnityError(f"{where}: the parameter {attribute} must be a dictionary of {', '.join(known)}")
    return attribute.data


def check_count(where: str, parameters: Sequence[Attribute], names: Mapping[str, AttrConstraint]) -> None:
    """
    Raise `UnityError`, in a message that begins with `where`, unless there are as many `parameters` as `names` has
    entries. `names` maps the name of each expected parameter to its constraint.
    """
    if len(parameters) != len(names):
        raise UnityError(f"{where}: {len(parameters)} parameters; there must be {len(names)}: {', '.join(names)}")
