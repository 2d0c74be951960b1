"""
Check options of searches, passes and targets, as a command line or a call of the API gives them.

`where`, with which messages begin, says what the user wrote: `unity-opt: --search`, or `plan: search`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from types import NoneType
from typing import Any, get_args, get_type_hints

from xdsl.utils.arg_spec import ArgSpec

from unity_ir.errors import UnityError

Option = str | int | float | bool


def check_arguments(where: str, spec: ArgSpec, kind: Any) -> None:
    """
    Check the arguments `spec` that a user gave to a pass or target, whose dataclass is `kind`. Raise `UnityError`, in a
    message that begins with `where`, if an argument is no field of `kind`, or is not of the field's type. The type of
    an argument with several values is not checked.
    """
    known = [field.name for field in fields(kind) if field.init and field.name != "name"]
    hints = get_type_hints(kind)
    for name, values in spec.parameters.items():
        key = name.replace("-", "_")
        if key not in known:
            has = ", ".join(known) or "none"
            raise UnityError(f"{where}: {spec.name} has no argument {name}; it has {has}")
        types = set(get_args(hints[key]) or (hints[key],)) - {NoneType}
        wanted = next((words for of, words in _KINDS if types == of), None)
        if wanted is not None and len(values) == 1 and not isinstance(values[0], tuple(types)):
            raise UnityError(f"{where}: {name} is {values[0]}; it must be {wanted}")


_KINDS = (
    ({bool}, "true or false"),
    ({int}, "a whole number"),
    ({float}, "a number with a decimal point"),
    ({int, float}, "a number"),
    ({str}, "a word"),
)
"""Names of argument types in error messages."""


_COMMON = {
    "optimizer": str,
    "ema": float,
    "work": float,
    "seconds": float,
    "micro_batches": str,
    "recompute": str,
    "offload": str,
    "loss_pieces": str,
    "stages": str,
    "schedule": str,
}
"""Options of every search, with their types."""


def search_options(text: str, where: str = "unity-opt: --search") -> dict[str, Option]:
    """
    Parse the value of `--search` into options of the pass pcg-search: given `joint,optimizer=adam`, returns
    `{"strategy": "joint", "optimizer": "adam"}`.

    Raises `UnityError` for unknown options and wrong values, in a message that begins with `where`. An unknown strategy
    is returned alone, without its options, for the search to refuse.
    """
    from unity_ir.search.strategy import all_strategies, option_types

    name, *settings = text.split(",")
    found: dict[str, Option] = {"strategy": name}
    strategy = all_strategies().get(name)
    kinds = _COMMON | ({} if strategy is None else option_types(strategy))
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.replace("-", "_")
        kind = kinds.get(key)
        if strategy is None:
            continue  # the search says which there are
        if not equals or kind is None:
            raise UnityError(f"{where}: {setting!a} is no option of {name}; it has {', '.join(kinds)}")
        if key in found:
            raise UnityError(f"{where}: {key} is given twice; leave one out")
        found[key] = _option(where, key, kind, value)
    return found


SETTINGS = {
    "micro_batches": "how many",
    "recompute": "what",
    "offload": "what",
    "loss_pieces": "how many",
    "stages": "which",
    "schedule": "which",
    "optimizer": "which",
}
"""Options of every search that can be given by themselves, too, with the word that messages have for each."""


def with_settings(
    options: Mapping[str, Option],
    given: Mapping[str, Option | None],
    tool: str,
    asked_by: str,
    written: Callable[[str], str] = str,
) -> dict[str, Option]:
    """
    Return the search's options `options` together with those in `given`, which the user gave separately (as `--stages`,
    say): values by option name (`SETTINGS`), None for one that was not given.

    Raises `UnityError`, in a message that begins with `tool`, for an option that is in both. The message says where it
    was given twice: `asked_by` is what the user wrote `options` in, such as `--search`, and `written(name)` returns how
    a separate option is written, such as `--stages`.
    """
    found = dict(options)
    for name, value in given.items():
        if value is None:
            continue
        if name in options:
            raise UnityError(f"{tool}: {asked_by} and {written(name)} both say {SETTINGS[name]}; leave one out")
        found[name] = value
    return found


def _option(where: str, key: str, kind: type, value: str) -> Option:
    if kind is bool:
        if value not in ("true", "false"):
            raise UnityError(f"{where}: {key} is {value!a}; it must be true or false")
        return value == "true"
    try:
        return kind(value)
    except ValueError as error:
        raise UnityError(f"{where}: {key} is {value!a}; it must be a number") from error


def seconds(text: str, where: str = "unity-opt: --budget") -> float:
    """
    Return `text`, the value of the option `--budget`, as a number of seconds. Raises `UnityError`, in a message that
    begins with `where`, unless it is a finite number above 0.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < inf:
        raise UnityError(f"{where} is {text!a}; it must be a number of seconds above 0")
    return found
