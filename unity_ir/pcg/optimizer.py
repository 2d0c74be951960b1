"""The optimizer of a training step: its hyperparameters, those of groups of weights, and the limit of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.ops.optimizers import OPTIMIZERS, OptimizerLine, with_average


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """
    Weights with hyperparameters of their own. `pattern` says which: those whose full names it matches (as in
    `fnmatch`), or `@vectors` for all of at most one dim, or `@embeddings` for the tables that an `embedding` reads.
    """

    pattern: str
    settings: tuple[tuple[str, float], ...]
    """The (name, value) pairs of their hyperparameters; those left out are the optimizer's."""

    def __str__(self) -> str:
        """Return the group as text has it: `@vectors weight_decay=0.0`."""
        return f"{self.pattern} {', '.join(f'{name}={value!r}' for name, value in self.settings)}"


@dataclass(frozen=True)
class Optimizer:
    """
    An optimizer, by `name` (a key of `ops.optimizers.OPTIMIZERS`), and its hyperparameters. Those left out (nan) get
    their defaults, and those that this optimizer does not take are set to 0. Values are not checked; `optimizer_of`
    checks them.
    """

    name: str = "sgd"
    lr: float = nan
    beta1: float = nan
    beta2: float = nan
    eps: float = nan
    weight_decay: float = nan
    momentum: float = nan
    clip: float = 0.0
    """Largest norm of the gradient of all weights together; a larger gradient is scaled down to it. 0 for no limit."""
    ema: float = 0.0
    """
    The part of an exponential moving average of the trained weights that stays in each step, such as 0.999; with it the
    average is kept beside the optimizer's state. 0 for none.
    """
    groups: tuple[ParameterGroup, ...] = ()
    """Weights with hyperparameters of their own; the first group that a weight is in counts."""
    at_host: bool = field(default=False, kw_only=True)
    """
    Whether its state rests in the memory of the host, as prices and counts of memory see it; the text says that of the
    graph (`Graph.offload`).
    """

    def __post_init__(self) -> None:
        if self.name in OPTIMIZERS:
            defaults = OPTIMIZERS[self.name].defaults
            for name in SETTINGS:
                given = getattr(self, name)
                object.__setattr__(
                    self, name, defaults.get(name, 0.0) if given != given or name not in defaults else given
                )

    @property
    def line(self) -> OptimizerLine:
        """The TDL line of a step, with that of the average if one is kept. Raises `KeyError` for an unknown `name`."""
        own = OPTIMIZERS[self.name]
        return with_average(own) if self.ema else own

    @property
    def states(self) -> int:
        """The number of state tensors that are kept per weight, each of the weight's size (2 for Adam)."""
        return len(self.line.state)

    @property
    def held_states(self) -> int:
        """The number of state tensors per weight that devices hold throughout a step; 0 if they rest at the host."""
        return 0 if self.at_host else self.states

    @property
    def offloaded(self) -> Optimizer:
        """The same optimizer with its state at the host. Raises `UnityError` if it keeps none."""
        if not self.states:
            raise UnityError(f"offload: {self.name} keeps no state that could rest at the host; leave offload out")
        return replace(self, at_host=True)

    @property
    def settings(self) -> Mapping[str, float]:
        """
        The hyperparameters that this optimizer takes, by name, with `ema` if an average is kept, and without `clip` and
        `groups`.
        """
        return {name: getattr(self, name) for name in self.line.defaults}

    @property
    def given(self) -> dict[str, float | str]:
        """
        All settings: the hyperparameters, `clip`, and `groups` as text. `optimizer_of` makes an equal optimizer of
        them.
        """
        return {**self.settings, "clip": self.clip, "groups": groups_text(self.groups)}


SETTINGS = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum")
"""The hyperparameters of the optimizers' lines."""


def optimizer_of(where: str, name: str, settings: Mapping[str, object]) -> Optimizer:
    """
    Return the optimizer called `name` with these settings: hyperparameters, `clip`, `ema`, and `groups` as text, such
    as `@vectors weight_decay=0; head.* lr=1e-4`. Those that are not in `settings` have their defaults.

    Raises `UnityError`, which begins with `where`, for an unknown optimizer, a hyperparameter that it does not take, a
    number out of range, and a text that is not such groups.
    """
    if name not in OPTIMIZERS:
        raise UnityError(f"{where}: unknown optimizer {name!a}; known are {', '.join(OPTIMIZERS)}")
    numbers: dict[str, Any] = {
        key: _setting(where, name, key, value) for key, value in settings.items() if key != "groups"
    }
    return Optimizer(name, **numbers, groups=_groups(where, name, settings.get("groups", "")))


def _setting(where: str, optimizer: str, key: str, value: object) -> float:
    """Return the value of a hyperparameter; raise `UnityError` if the optimizer takes no such one, or no such value."""
    takes = (*OPTIMIZERS[optimizer].defaults, "clip", "ema")
    if key not in takes:
        raise UnityError(f"{where}: {optimizer} has no {key}; it takes {', '.join(takes)}, groups")
    below = 1 if key.startswith("beta") or key in ("momentum", "ema") else inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise UnityError(f"{where}: {key} is {value!r}; it must be a number from 0" + ", below 1" * (below == 1))
    return float(value)


def groups_text(groups: Iterable[ParameterGroup]) -> str:
    """Return groups of weights as text, as `optimizer_of` reads it: `@vectors weight_decay=0.0; head.* lr=0.0001`."""
    return "; ".join(map(str, groups))


def _groups(where: str, optimizer: str, text: object) -> tuple[ParameterGroup, ...]:
    """Return the groups of a text such as `@vectors weight_decay=0; head.* lr=1e-4, weight_decay=0`."""
    if not isinstance(text, str):
        raise UnityError(f'{where}: groups is {text!r}; it must be text, such as "@vectors weight_decay=0"')
    found: list[ParameterGroup] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        pattern, _, given = part.partition(" ")
        settings: list[tuple[str, float]] = []
        for each in given.split(","):
            key, is_given, value = (piece.strip() for piece in each.partition("="))
            try:
                number = float(value) if is_given else nan
            except ValueError:
                number = nan
            if number != number:
                raise UnityError(f'{where}: groups has {part!a}; write a pattern and settings: "*.bias weight_decay=0"')
            if key == "clip":
                raise UnityError(f"{where}: groups has clip, but the norm is that of all gradients together")
            if key == "ema":
                raise UnityError(f"{where}: groups has ema, but the average is of all trained weights alike")
            settings.append((key, _setting(where, optimizer, key, number)))
        if pattern.startswith("@") and pattern not in GROUP_WORDS:
            raise UnityError(
                f"{where}: groups has {pattern!a}; known are {', '.join(GROUP_WORDS)}, and patterns of names"
            )
        if len(dict(settings)) < len(settings):
            raise UnityError(f"{where}: groups gives a setting of {pattern!a} twice")
        found.append(ParameterGroup(pattern, tuple(settings)))
    return tuple(found)


GROUP_WORDS = ("@vectors", "@embeddings")
"""Groups of weights that have a name of their own."""
