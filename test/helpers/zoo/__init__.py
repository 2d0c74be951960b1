"""Small instances of the zoo's models, and the same models written by hand in PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module

from torch import Tensor

from zoo import recommenders, recurrent, transformers, vision

SMALL: dict[str, dict[str, int]] = {
    **transformers.SMALL,
    **vision.SMALL,
    **recommenders.SMALL,
    **recurrent.SMALL,
}

BY_HAND: dict[str, Callable[..., Tensor]] = {
    **transformers.BY_HAND,
    **vision.BY_HAND,
    **recommenders.BY_HAND,
    **recurrent.BY_HAND,
}
"""From weights by name, all the model's keys, and inputs by name, to the loss."""


def small(text: str) -> tuple[str, dict[str, int | str]]:
    """Given `moe,dispatch=sparse` returns `moe`, and the keys of its small instance with that one set."""
    name, *settings = text.split(",")
    pairs = (setting.split("=") for setting in settings)
    return name, SMALL[name] | {key: int(value) if value.isdecimal() else value for key, value in pairs}


def by_hand(
    name: str, keys: Mapping[str, int | str], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Tensor:
    """The loss of a model of the zoo with some of its keys set, from the model written by hand."""
    build = import_module(f"unity_ir.models.{name}").build
    defaults = {key: p.default for key, p in inspect.signature(build).parameters.items()}
    return BY_HAND[name](weights, {**defaults, **keys}, **inputs)
