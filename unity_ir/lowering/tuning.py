"""
Which implementation of an operator is faster on a device, as it was measured there: what emission freezes.

A table is JSON: what it says about itself, and seconds by key and implementation. A key says the operator, its line,
the local shapes and the element types, so a table serves every program that has the same pieces.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, cast

from unity_ir.errors import UnityError
from unity_ir.lowering.kernels.launcher import launcher
from unity_ir.lowering.spmd import Compute, Program
from unity_ir.lowering.windows import needs_start
from unity_ir.tdl.syntax import Bound

IMPLEMENTATIONS = ("triton", "torch")


@dataclass(frozen=True)
class Piece:
    """A compute instruction on one rank."""

    line: Bound
    dtypes: tuple[str, ...]
    divided: tuple[str, ...]
    """Variables whose piece may start elsewhere than at 0, and whose line must know where."""

    @property
    def key(self) -> str:
        """The same for equal lines over pieces of equal shapes and element types."""
        name = launcher(self.line, self.dtypes, "torch", self.divided).name.removesuffix("_torch")
        return f"{name} {' '.join(self.dtypes)}"


def piece_of(program: Program, instruction: Compute) -> Piece:
    """What a rank computes for an instruction."""
    local = program.local_line(instruction)
    dtypes = tuple(program.tensors[r].dtype for r in instruction.operands)
    divided = tuple(v for v in dict.fromkeys(instruction.assignment) if isinstance(v, str) and needs_start(local, v))
    return Piece(local, dtypes, divided)


@dataclass
class Table:
    """Seconds of every implementation by key."""

    about: dict[str, str] = field(default_factory=dict[str, str])
    seconds: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def choice(self, key: str) -> str | None:
        """The faster implementation; None where nothing was measured."""
        found = self.seconds.get(key)
        return min(found, key=lambda name: found[name]) if found else None

    def write(self, path: Path) -> None:
        """Replace a file as a whole."""
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps({"about": self.about, "seconds": self.seconds}, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)


def read_table(path: Path) -> Table:
    """A table that `unity-tune` has written. Raises `UnityError` where it cannot be read, or is none."""
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnityError(f"tune: {path}: {error.strerror}; make it with unity-tune") from error
    except ValueError as error:
        raise UnityError(f"tune: {path} is not JSON; make it with unity-tune") from error
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
    return Table({name: str(v) for name, v in about.items()}, seconds)


def _mapping(found: Any) -> dict[str, Any] | None:
    """What was an object in JSON, whose keys are all text."""
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _is_time(found: Any) -> bool:
    return isinstance(found, float | int) and not isinstance(found, bool) and 0 < found < inf
