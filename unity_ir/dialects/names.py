"""Names in text: of weights, inputs, functions and machines. Any string is one, if it can be seen."""

from __future__ import annotations

import re
from unicodedata import category

from xdsl.dialects.builtin import BytesAttr, StringAttr
from xdsl.ir import Attribute
from xdsl.irdl import AttrConstraint, BaseAttr
from xdsl.parser import AttrParser

from unity_ir.errors import UnityError

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories: control, format (text direction), surrogate, private, unassigned, line and paragraph ends."""


def check_name(what: str, name: str) -> None:
    """Raises `UnityError` for an empty name and for characters that change how text around them is read."""
    if not name:
        raise UnityError(f"{what}: the name is empty; give it one")
    bad = next((c for c in name if category(c) in _UNSEEN), None)
    if bad is not None:
        raise UnityError(f"{what}: the name {name!a} has the control character U+{ord(bad):04X}; remove it")


def hint(name: str, default: str) -> str:
    """
    A name for an SSA value, as like to `name` as MLIR's syntax and xDSL's printer allow.

    Given `layer1.weight`, returns it; given `a/b_2`, returns `a_b`, since the printer itself numbers equal names by
    `_2`. `default` where nothing is left.
    """
    text = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    while stripped := re.search(r"_\d+$", text):
        text = text[: stripped.start()]
    return text if re.match(r"[A-Za-z]", text) else default


def parse_name(parser: AttrParser) -> StringAttr:
    """A string literal. xDSL reads one with escapes beyond ASCII, which is how it prints them, as bytes."""
    position = parser.pos
    if (text := parser.parse_optional_str_literal()) is not None:
        return StringAttr(text)
    if (data := parser.parse_optional_bytes_literal()) is None:
        parser.raise_error("expected a name in double quotes")
    try:
        return StringAttr(data.decode())
    except UnicodeDecodeError:
        parser.raise_error("the name is not UTF-8 text", position)


def name_text(what: str, attribute: Attribute) -> str:
    """The text of a name that xDSL has read. Raises `UnityError` for what is no text."""
    match attribute:
        case StringAttr():
            return attribute.data
        case BytesAttr():
            try:
                return attribute.data.decode()
            except UnicodeDecodeError:
                raise UnityError(f"{what}: the name {attribute} is not UTF-8 text") from None
        case _:
            raise UnityError(f"{what}: the name is {attribute}; it must be a string")


NAME_CONSTRAINT: AttrConstraint = BaseAttr(StringAttr) | BaseAttr(BytesAttr)
"""What may hold a name: see `parse_name`."""
