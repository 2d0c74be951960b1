"""Find machines by name: presets such as `summit:4` and `dgx-h100`, and files such as `my_cluster.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.machine.model import Machine
from unity_ir.machine.toml import MAX_DEVICES, machine_from

PROFILE = ",profile="
"""Separator between a machine and its profile in `--machine`."""


def presets() -> list[str]:
    """Return the names of the machines that come with the package, sorted."""
    return sorted(f.name.removesuffix(".toml") for f in files("unity_ir.machine").joinpath("presets").iterdir())


def load(name: str) -> Machine:
    """
    Return the machine called `name`: a preset, or the path of a `.toml` file.

    A preset may be followed by `:N` for its parameter (nodes of a cluster, devices of a box), or by `:NxG` for the
    sizes of all levels, outermost first. `,profile=FILE` after either gives a file of measurements, by `unity-profile`
    or `unity-tune`, to price with. Given `dgx-h100:2`, returns 2 nodes of 8 GPUs; given `dgx-h100:1x1`, one GPU of one
    node.

    Raises `UnityError` for an unknown name, an unreadable file, or impossible figures.
    """
    tables, profile = read_tables(name)
    machine = machine_from(name.partition(PROFILE)[0], tables, profile=profile)
    return machine if machine.name == name else replace(machine, name=name)


def read_tables(name: str) -> tuple[dict[str, Any], str]:
    """
    Return the tables that describe the machine called `name`, with the sizes that the name gives, and the path of its
    file of measurements; "" if the name has none. `machine_from` makes the machine of them.

    Names are as for `load`. Raises `UnityError` for an unknown name, an unreadable file, and sizes that the machine
    cannot have; other figures are not checked, and the file of measurements is not read.
    """
    described, _, profile = name.partition(PROFILE)
    if PROFILE in profile:
        raise UnityError(f"machine: {described} has two profiles; leave one out")
    return _read(described), profile


def _read(name: str) -> dict[str, Any]:
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
        return tables
    if "x" in parameter:
        return _cut(name, tables, parameter)
    if not (parameter.isascii() and parameter.isdecimal() and len(parameter) <= len(str(MAX_DEVICES))):
        raise UnityError(f"machine: {name}: what follows the colon must be a number from 1 to {MAX_DEVICES}")
    if "parameter" not in tables:
        raise UnityError(f"machine: {name}: this machine has no parameter; write it without :{parameter}")
    return {**tables, "parameter": int(parameter)}


def _cut(name: str, tables: dict[str, Any], sizes: str) -> dict[str, Any]:
    """
    Return the description with its levels' sizes replaced by those of `NxG`.

    Raises `UnityError` for another number of levels, or for a size above a fixed one of the preset.
    """
    levels = tables["levels"]
    is_number = (s.isascii() and s.isdecimal() and len(s) <= len(str(MAX_DEVICES)) for s in sizes.split("x"))
    given = [int(s) for s in sizes.split("x")] if all(is_number) else []
    if len(given) != len(levels):
        wanted = " x ".join(str(level["name"]) for level in levels)
        raise UnityError(f"machine: {name}: what follows the colon must be a number, or the sizes of {wanted}")
    for level, size in zip(levels, given, strict=True):
        if level["size"] != "parameter" and size > level["size"]:
            raise UnityError(
                f"machine: {name}: {size} {level['name']}, but this machine has {level['size']}; take fewer"
            )
    return {**tables, "levels": [{**level, "size": size} for level, size in zip(levels, given, strict=True)]}
