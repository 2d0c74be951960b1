"""
The operators: one small file per family, one TDL line (its definition in the tensor description language) and one
gradient per operator.

Every module of this package that defines `OPERATORS` is found automatically; nothing else lists operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from unity_ir.errors import UnityError
from unity_ir.ops.operator import Operator, Saving


@cache
def operators() -> Mapping[str, Operator]:
    """Return every operator by name, sorted by name."""
    found: dict[str, Operator] = {}
    for module in iter_modules(__path__):
        family: tuple[Operator, ...] = getattr(import_module(f"{__name__}.{module.name}"), "OPERATORS", ())
        for operator in family:
            if operator.name in found:
                raise ValueError(f"operator {operator.name} is defined twice")
            found[operator.name] = operator
    return MappingProxyType(dict(sorted(found.items())))


@cache
def savings() -> tuple[Saving, ...]:
    """
    Return every `Saving` that operators declare: the names of a forward operator and its backward, and of variants of
    both in which the forward also returns values that the backward then reads instead of computing them again.
    """
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    return tuple(saving for module in modules for saving in getattr(module, "SAVINGS", ()))


def operator(name: str) -> Operator:
    """Return the operator of that name. Raises `UnityError`, which suggests similar names, if there is none."""
    found = operators().get(name)
    if found is None:
        from difflib import get_close_matches

        near = get_close_matches(name, operators(), n=3)
        hint = f"; did you mean {' or '.join(near)}" if near else f"; known are {', '.join(operators())}"
        raise UnityError(f"pcg.{name}: unknown operator{hint}")
    return found
