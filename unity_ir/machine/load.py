"""Presets and machine files by name: `summit:4`, `dgx-h100`, `my_cluster.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from math import isfinite, prod
from pathlib import Path
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.machine.collectives import Level
from unity_ir.machine.device import Device
from unity_ir.machine.model import Machine

MAX_DEVICES = 2**20
"""More than any cluster has; beyond it the devices cannot be listed."""


def presets() -> list[str]:
    """The names of the machines that come with the package."""
    return sorted(f.name.removesuffix(".toml") for f in files("unity_ir.machine").joinpath("presets").iterdir())


def load(name: str) -> Machine:
    """
    A machine by preset name, with `:N` for its parameter (nodes of a cluster, devices of a box), or by path of a
    `.toml`.

    Raises `UnityError` for an unknown name, an unreadable file, or figures that cannot be.
    """
    stem, _, parameter = name.partition(":")
    if name.endswith(".toml"):
        path, parameter = Path(name), ""
    elif stem in presets():
        path = files("unity_ir.machine").joinpath("presets", f"{stem}.toml")
    else:
        raise UnityError(f"machine: no machine {name!r}; presets are {', '.join(presets())}, or give a .toml file")
    try:
        described = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as e:
        raise UnityError(f"machine: {name} is not TOML: {e}") from e
    except (OSError, ValueError) as e:
        raise UnityError(f"machine: cannot read {name!a}: {getattr(e, 'strerror', None) or 'not text'}") from e
    return _machine(name, described, parameter)


def _machine(name: str, described: Mapping[str, Any], parameter: str) -> Machine:
    if parameter and not (parameter.isascii() and parameter.isdecimal() and len(parameter) <= len(str(MAX_DEVICES))):
        raise UnityError(f"machine: {name}: what follows the colon must be a number from 1 to {MAX_DEVICES}")
    if parameter and "parameter" not in described:
        raise UnityError(f"machine: {name}: this machine has no parameter; write it without :{parameter}")
    count: object = int(parameter) if parameter else described.get("parameter", 1)
    try:
        device = described["device"]
        kind = Device(
            name=str(device["name"]),
            flops={dtype: _number(name, device["flops"], dtype) for dtype in device["flops"]},
            memory_bandwidth=_number(name, device, "memory_bandwidth"),
            memory=int(_number(name, device, "memory")),
            launch=_number(name, device, "launch", zero=True),
            efficiency=_number(name, device, "efficiency"),
        )
        levels = tuple(
            Level(
                name=str(level["name"]),
                size=_size(name, {"size": count} if level["size"] == "parameter" else level),
                bandwidth=_number(name, level, "bandwidth"),
                latency=_number(name, level, "latency", zero=True),
            )
            for level in described["levels"]
        )
    except KeyError as e:
        raise UnityError(f"machine: {name}: {e.args[0]} is missing") from e
    except TypeError as e:
        raise UnityError(
            f"machine: {name}: device must be a table with a table flops, and levels a list of them"
        ) from e
    if kind.efficiency > 1:
        raise UnityError(f"machine: {name}: efficiency is {kind.efficiency}; it must be at most 1")
    if (devices := prod(level.size for level in levels)) > MAX_DEVICES:
        raise UnityError(f"machine: {name}: {devices} devices are too many; at most {MAX_DEVICES} are allowed")
    return Machine(name, kind, tuple(level for level in levels if level.size > 1))


def _number(machine: str, table: Mapping[str, Any], key: str, zero: bool = False) -> float:
    value = table[key]
    fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not fits or value < 0 or (value == 0 and not zero):
        raise UnityError(f"machine: {machine}: {key} is {value!r}; it must be a number {'from' if zero else 'above'} 0")
    return value


def _size(machine: str, table: Mapping[str, Any]) -> int:
    value = table["size"]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnityError(f"machine: {machine}: size is {value!r}; it must be a whole number from 1 on")
    return value
