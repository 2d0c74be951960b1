"""Presets and machine files by name: `summit:4`, `dgx-h100`, `my_cluster.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.machine.describe import MAX_DEVICES, machine_from
from unity_ir.machine.model import Machine

PROFILE = ",profile="
"""Separator between a machine and its profile in `--machine`."""


def presets() -> list[str]:
    """The names of the machines that come with the package."""
    return sorted(f.name.removesuffix(".toml") for f in files("unity_ir.machine").joinpath("presets").iterdir())


def load(name: str) -> Machine:
    """
    A machine by preset name, with `:N` for its parameter (nodes of a cluster, devices of a box), or by path of a
    `.toml`; `,profile=FILE` after it has the cost model read that profile rather than the one of the package.

    Raises `UnityError` for an unknown name, an unreadable file, or figures that cannot be.
    """
    described, _, profile = name.partition(PROFILE)
    if PROFILE in profile:
        raise UnityError(f"machine: {described} has two profiles; leave one out")
    machine = _load(described, profile)
    return machine if machine.name == name else replace(machine, name=name)


def _load(name: str, profile: str) -> Machine:
    stem, _, parameter = name.partition(":")
    if name.endswith(".toml"):
        path, parameter = Path(name), ""
    elif stem in presets():
        path = files("unity_ir.machine").joinpath("presets", f"{stem}.toml")
    else:
        raise UnityError(f"machine: no machine {name!r}; presets are {', '.join(presets())}, or give a .toml file")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise UnityError(f"machine: {name} is not TOML: {e}") from e
    except RecursionError as e:
        raise UnityError(f"machine: {name} is nested too deeply") from e
    except (OSError, ValueError) as e:
        raise UnityError(f"machine: cannot read {name!a}: {getattr(e, 'strerror', None) or 'not text'}") from e
    if not name.isprintable():
        raise UnityError(f"machine: {name!a}: the name of the file has characters that cannot be printed; rename it")
    if not parameter:
        return machine_from(name, tables, profile=profile)
    if not (parameter.isascii() and parameter.isdecimal() and len(parameter) <= len(str(MAX_DEVICES))):
        raise UnityError(f"machine: {name}: what follows the colon must be a number from 1 to {MAX_DEVICES}")
    if "parameter" not in tables:
        raise UnityError(f"machine: {name}: this machine has no parameter; write it without :{parameter}")
    return machine_from(name, tables, int(parameter), profile)
