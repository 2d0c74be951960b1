"""Presets and machine files by name: `summit:4`, `dgx-h100`, `my_cluster.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.machine.model import Device, Level, Machine


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
    except (OSError, UnicodeDecodeError) as e:
        raise UnityError(f"machine: cannot read {name}: {getattr(e, 'strerror', None) or 'not text'}") from e
    except tomllib.TOMLDecodeError as e:
        raise UnityError(f"machine: {name} is not TOML: {e}") from e
    return _machine(name, described, parameter)


def _machine(name: str, described: Mapping[str, Any], parameter: str) -> Machine:
    if parameter and not (parameter.isdigit() and 1 <= int(parameter) <= 1_000_000):
        raise UnityError(f"machine: {name}: what follows the colon must be a number from 1 on")
    if parameter and "parameter" not in described:
        raise UnityError(f"machine: {name}: this machine has no parameter; write it without :{parameter}")
    count = int(parameter) if parameter else described.get("parameter", 1)
    try:
        device = described["device"]
        kind = Device(
            name=str(device["name"]),
            flops={k: float(v) for k, v in device["flops"].items()},
            memory_bandwidth=_positive(name, device, "memory_bandwidth"),
            memory=int(_positive(name, device, "memory")),
            launch=float(device["launch"]),
            efficiency=_positive(name, device, "efficiency"),
        )
        levels = tuple(
            Level(
                name=str(level["name"]),
                size=count if level["size"] == "parameter" else int(_positive(name, level, "size")),
                bandwidth=_positive(name, level, "bandwidth"),
                latency=float(level["latency"]),
            )
            for level in described["levels"]
        )
    except KeyError as e:
        raise UnityError(f"machine: {name}: {e.args[0]} is missing") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise UnityError(f"machine: {name}: {e}") from e
    return Machine(name, kind, tuple(level for level in levels if level.size > 1))


def _positive(machine: str, table: Mapping[str, Any], key: str) -> float:
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UnityError(f"machine: {machine}: {key} is {value!r}; it must be a number above 0")
    return value
