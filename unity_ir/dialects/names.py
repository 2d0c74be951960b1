"""
Check and parse names of weights, inputs, functions and machines. A name is any string without invisible characters.
"""

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

REGION = "region."
"""Begins the name for IRDL of an operation with regions (`dialects.irdl_names`)."""


def check_name(what: str, name: str) -> None:
    """
    Raise `UnityError` if `name` is empty or has invisible characters; `what` begins the message, such as `pcg.weight`.
    """
    if not name:
        raise UnityError(f"{what}: the name is empty; give it one")
    bad = next((c for c in name if category(c) in _UNSEEN), None)
    if bad is not None:
        raise UnityError(f"{what}: the name {name!a} has the control character U+{ord(bad):04X}; remove it")


def ssa_name(name: str, default: str) -> str:
    """
    Return a name for an SSA value: `name` with every character that MLIR does not allow replaced by `_`.

    Given `layer1.weight`, returns it; given `a/b_2`, returns `a_b`, since the printer itself numbers equal names by
    `_2`. Returns `default` if the result would not begin with a letter.
    """
    text = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    while stripped := re.search(r"_\d+$", text):
        text = text[: stripped.start()]
    return text if re.match(r"[A-Za-z]", text) else default


def parse_name(parser: AttrParser) -> StringAttr:
    """
    Parse a name as a string literal; decode it as UTF-8 if it has escapes, which xDSL reads as bytes.

    Raises `ParseError` for other tokens, and for bytes that are not UTF-8.
    """
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
    """
    Return the text of a name attribute as xDSL parsed it (a string, or bytes if it has escapes). Raises `UnityError`,
    in a message that begins with `what`, for an attribute that is no UTF-8 string.
    """
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
"""Attributes that may hold a name: see `parse_name`."""


def own_name(name: str) -> str:
    """
    Return an operation's name in its dialect, given the name that it has in IRDL (`dialects.irdl_names`); any other
    name is returned as it is.

    Given `pcg.concat_3`, returns `pcg.concat`; given `region.spmd.program`, returns `spmd.program`.
    """
    if name.startswith(REGION):
        return name.removeprefix(REGION)
    found = re.fullmatch(r"((?:pcg|spmd|subst)\.[a-z0-9_]+?)(?:_\d{1,3}){1,2}", name)
    return name if found is None else found[1]
