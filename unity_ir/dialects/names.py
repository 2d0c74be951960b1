"""Names in text: of weights, inputs, functions and machines. Any string is one, if it can be seen."""

from __future__ import annotations

import re
from unicodedata import category

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
