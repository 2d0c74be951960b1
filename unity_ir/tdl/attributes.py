"""
Checks the attributes given to an operator against those that its TDL line (its definition in the tensor description
language) declares, and fills in defaults.
"""

from __future__ import annotations

from collections.abc import Mapping

from unity_ir.errors import UnityError
from unity_ir.tdl.functions import ACTIVATIONS, DTYPES
from unity_ir.tdl.syntax import (
    AttrValue,
    Line,
)


def check_attributes(line: Line, attributes: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
    """
    Check given attributes against those that an operator's TDL line declares; return them with defaults filled in.

    Raises `UnityError` for an attribute that is unknown, missing, or of the wrong kind.
    """
    known = {a.name: a for a in line.attributes}
    for name in attributes:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UnityError(f"pcg.{line.operator}: unknown attribute {name}; {takes}")
    full: dict[str, AttrValue] = {}
    for name, attribute in known.items():
        value = attributes.get(name, attribute.default)
        if value is None:
            raise UnityError(f"pcg.{line.operator}: attribute {name} is missing; add {{{name} = ...}}")
        if not _fits(value, attribute.kind):
            wanted = " or ".join({"name": ACTIVATIONS, "dtype": DTYPES}.get(attribute.kind, (attribute.kind,)))
            raise UnityError(f"pcg.{line.operator}: attribute {name} is {value!r}; it must be {wanted}")
        full[name] = value
    return full


def _fits(value: AttrValue, kind: str) -> bool:
    match kind:
        case "int":
            return _is_int(value)
        case "ints":
            return isinstance(value, tuple) and all(map(_is_int, value))
        case "float":
            return isinstance(value, float) or _is_int(value)
        case "name":
            return value in ACTIVATIONS
        case _:
            return value in DTYPES


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
