"""
The zoo: models as serial graphs, one builder each.

Every module of this package that has a function `build(**keys) -> Graph` is a model; the arguments of
`build` are the model's keys.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph

_HELPERS = {"builder", "experts", "recurrent", "vision"}

_OF = {
    "llama3_70b": ("llama3_8b", {"layers": 80, "hidden": 8192, "heads": 64, "intermediate": 28672}),
    "mixtral_8x7b": ("moe", {"dispatch": "sparse"}),
    "llama3_405b": ("llama3_8b", {"layers": 126, "hidden": 16384, "heads": 128, "intermediate": 53248}),
}
"""
Further sizes of models: the model, and its keys that are not its own defaults. The Llamas are of "The Llama 3 Herd of
Models" (Meta, 2024), table 3.
"""

_MAY_BE_NONE = {"dense_layers"}
"""Keys that may be 0, though by default they are 1 or more."""


def names() -> list[str]:
    """
    Return the names of all models that have a module here, sorted. Larger variants that `build` also knows by name,
    such as `llama3_70b`, are left out.
    """
    return sorted(m.name for m in iter_modules(__path__) if m.name not in _HELPERS)


def build(name: str, **keys: int | str) -> Graph:
    """
    Build the model called `name`: its serial forward graph up to the loss. `keys` are arguments of the model's own
    `build`, such as `layers=2`, in place of its defaults. A variant, such as `llama3_70b`, is its model with other
    defaults.

    Raises `UnityError` for an unknown model or key, and for sizes that do not fit one another.
    """
    if name in _OF:
        model, own = _OF[name]
        return replace(build(model, **own | keys), name=name)
    if name not in names():
        raise UnityError(f"--model: no model {name!a}; known are {', '.join(sorted([*names(), *_OF]))}")
    function = import_module(f"{__name__}.{name}").build
    known = inspect.signature(function).parameters
    for key, value in keys.items():
        if key not in known:
            raise UnityError(f"--model: {name} has no key {key!a}; it has {', '.join(known)}")
        if isinstance(value, str):
            if not isinstance(known[key].default, str):
                raise UnityError(f"--model: {name}: {key} is {value!a}; it must be a number")
        elif value < (least := 0 if key in _MAY_BE_NONE else _least(known[key].default)):
            raise UnityError(f"--model: {name}: {key} is {value}; it must be {least} or more")
    try:
        return function(**keys)
    except UnityError as error:
        if not keys or str(error).startswith("--model"):
            raise
        # An operator that does not know which sizes were asked for.
        said = ", ".join(f"{key}={value}" for key, value in keys.items())
        raise UnityError(f"--model: {name} with {said}: {error}") from error


def _least(default: object) -> int:
    """Return the least number that a key may have, of which a model has this default: 1, or the default if less."""
    return min(1, default) if isinstance(default, int) else 1


def from_text(text: str) -> Graph:
    """
    Build a model from text, as `--model` takes it: its name, then arguments of its `build`, such as
    `gpt2,layers=2,batch=4` or `moe,dispatch=sparse`. Return its serial forward graph up to the loss.

    Raises `UnityError` for other syntax, an unknown model or argument, and sizes that do not fit one another.
    """
    name, *settings = text.split(",")
    keys: dict[str, int | str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        is_number = value.removeprefix("-").isdecimal()
        if not equals or not (is_number or value.isidentifier()) or len(value) > 12:
            raise UnityError(f"--model: {setting!a} is not key=number")
        if key in keys:
            raise UnityError(f"--model: {key} is given twice; leave one out")
        keys[key] = int(value) if is_number else value
    return build(name, **keys)
