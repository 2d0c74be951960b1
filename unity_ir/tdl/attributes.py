"""Checks given attributes against those an operator's line declares, and fills in defaults."""

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
        fits = {
            "int": _is_int(value),
            "ints": isinstance(value, tuple) and all(map(_is_int, value)),
            "float": isinstance(value, float) or _is_int(value),
            "name": value in ACTIVATIONS,
            "dtype": value in DTYPES,
        }[attribute.kind]
        if not fits:
            wanted = " or ".join({"name": ACTIVATIONS, "dtype": DTYPES}.get(attribute.kind, (attribute.kind,)))
            raise UnityError(f"pcg.{line.operator}: attribute {name} is {value!r}; it must be {wanted}")
        full[name] = value
    return full


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
