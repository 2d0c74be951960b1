"""
Read and write tables of measured implementations: seconds of each operator by Triton and by PyTorch (`unity-tune`).

A table is a JSON file: a description of itself, seconds by key and implementation, and the cost model's kernel for each
key (keys are made by `plan.local_operator`). Emission takes the faster implementation, and a machine with the
table as its profile (`dgx-h200,profile=h200.json`) is priced with the same seconds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from unity_ir.errors import UnityError
from unity_ir.machine.profile import MAX_SECONDS, Profile

IMPLEMENTATIONS = ("triton", "torch")

Sized: TypeAlias = tuple[str, tuple[int, ...]]
"""Operator and sizes of a kernel of the cost model; see `cost.time.Kernel`."""


@dataclass
class TuningTable:
    """
    Measured seconds of operators, by key and implementation (`triton` or `torch`), and the cost model's kernel
    (operator, sizes) of each key. `about` describes the table: the machine's device and so on.
    """

    about: dict[str, str] = field(default_factory=dict[str, str])
    seconds: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    kernels: dict[str, Sized] = field(default_factory=dict[str, Sized])

    def fastest(self, key: str) -> str | None:
        """
        Return the fastest implementation of an operator, `triton` or `torch`; None if it was not measured. `key` is the
        operator's key in the table (`plan.local_operator`), made of its TDL line, local shapes and element types.
        """
        found = self.seconds.get(key)
        return min(found, key=lambda name: found[name]) if found else None

    def profile(self) -> Profile:
        """
        Return the table as a profile for the cost model: for each kernel, the seconds of its fastest implementation; no
        collectives. Its `device` is "" if the table does not say which it is.
        """
        found: dict[str, dict[tuple[int, ...], float]] = {}
        for key, (operator, sizes) in self.kernels.items():
            if key in self.seconds:
                found.setdefault(operator, {})[sizes] = min(self.seconds[key].values())
        return Profile(self.about.get("machine's device", ""), found, {}, self.about)

    def write(self, path: Path) -> None:
        """Write the table as JSON to the file at `path`, replacing it atomically."""
        new = path.with_name(f".{path.name}.new")
        kernels = {key: {"operator": operator, "sizes": sizes} for key, (operator, sizes) in self.kernels.items()}
        rows = {"about": self.about, "seconds": self.seconds, "kernels": kernels}
        new.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)


def read_table(path: Path) -> TuningTable:
    """Read the JSON table of `unity-tune` at `path`. Raises `UnityError` if it cannot be read or is no such table."""
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise UnityError(f"tune: {path}: {error.strerror}; make it with unity-tune") from error
    except (ValueError, RecursionError) as error:
        raise UnityError(f"tune: {path} is not JSON: {error}; make it with unity-tune") from error
    fields = _mapping(read) or {}
    about, rows = _mapping(fields.get("about")), _mapping(fields.get("seconds"))
    if about is None or rows is None or not all(isinstance(v, str) for v in about.values()):
        raise UnityError(f"tune: {path} is no table; make it with unity-tune")
    seconds: dict[str, dict[str, float]] = {}
    for key, row in rows.items():
        found = _mapping(row)
        if not found or not all(n in IMPLEMENTATIONS and _is_time(s) for n, s in found.items()):
            raise UnityError(f"tune: {path}: {key!a} has no seconds of {' or '.join(IMPLEMENTATIONS)}")
        seconds[key] = {name: float(s) for name, s in found.items()}
    kernels = {key: _sized(path, key, row) for key, row in (_mapping(fields.get("kernels", {})) or {}).items()}
    return TuningTable({name: str(v) for name, v in about.items()}, seconds, kernels)


def read_tuned(path: Path, device: str) -> Profile:
    """
    Read the JSON table of `unity-tune` at `path` as a profile of the device called `device`. Raises `UnityError` if the
    file cannot be read, is no such table, or is of another device.
    """
    profile = read_table(path).profile()
    if profile.device != device:
        raise UnityError(
            f"profile: {path} is of {profile.device or 'no machine'}, but the machine has {device}; "
            "measure with unity-tune --machine of that device"
        )
    return profile


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises `ValueError` if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _sized(path: Path, key: str, found: Any) -> Sized:
    row = _mapping(found) or {}
    operator, sizes = row.get("operator"), row.get("sizes")
    if not isinstance(operator, str) or not isinstance(sizes, list):
        raise UnityError(f"tune: {path}: {key!a} has no operator and sizes; measure again with unity-tune")
    numbers = cast("list[Any]", sizes)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise UnityError(f"tune: {path}: the sizes of {key!a} are no integers; measure again with unity-tune")
    return operator, tuple(numbers)


def _mapping(found: Any) -> dict[str, Any] | None:
    """Return a JSON object as a dict with text keys; None for other values."""
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _is_time(found: Any) -> bool:
    return isinstance(found, float | int) and not isinstance(found, bool) and 0 < found <= MAX_SECONDS
