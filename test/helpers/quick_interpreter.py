"""
Makes Triton's interpreter remember what it computes again for every operation and every launch.

It computes the same with or without: what is remembered depends on nothing but the arguments.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


def quicken() -> None:
    """Let the interpreter of this process remember types of elements, and which functions of Triton it replaces."""
    made: Any = interpreter
    numpy_type, kinds = made._get_np_dtype, dict[tuple[type, str], Any]()

    def remembered_type(type_: Any) -> Any:
        key = type(type_), type_.name
        if key not in kinds:
            kinds[key] = numpy_type(type_)
        return kinds[key]

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            made._patch_attr(package, name, member, builder, scope)

    made._get_np_dtype, made._patch_builtin = remembered_type, patch_builtins
