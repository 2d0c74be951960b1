"""
The fixed part of every emitted program, a file for each subject.

`lowering.emit.printer` copies what is below the mark of each into the program, after the plan, the kernels and the
step; so a program needs nothing of this package. What is above the mark is for reading, linting and testing the files:
`plan` has stand-ins for what the plan defines.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

MARK = "# --- copied into the program from here on ---\n"

PARTS = (
    "watchdog",
    "ranks",
    "collectives",
    "halos",
    "pieces",
    "files",
    "data",
    "weights",
    "checkpoints",
    "watch",
    "profile",
    "check",
    "command",
)
"""In the order in which they come in a program."""

_NOT_IN_PROGRAMS = ("__future__", "typing", "unity_ir")


def parts_for(step: str) -> tuple[str, ...]:
    """The parts that a program of this step needs: `halos` is left out where no halo is exchanged."""
    return tuple(p for p in PARTS if p != "halos" or "halo" in step)


def text(parts: Sequence[str] = PARTS) -> str:
    """What of the parts comes into a program."""
    return "\n\n".join(_file(part).split(MARK, 1)[1].strip("\n") + "\n" for part in parts)


def imports(parts: Sequence[str] = PARTS) -> str:
    """The imports the parts need, beside those of each other."""
    found: set[str] = set()
    for part in parts:
        for statement in ast.parse(_file(part).split(MARK, 1)[0]).body:
            match statement:
                case ast.Import():
                    found.add(ast.unparse(statement))
                case ast.ImportFrom(module) if str(module).partition(".")[0] not in _NOT_IN_PROGRAMS:
                    found.add(ast.unparse(statement))
                case _:
                    pass
    standard = sorted(found, key=lambda line: ("torch" in line, line.startswith("from"), line))
    first = next(i for i, line in enumerate(standard) if "torch" in line)
    return "\n".join([*standard[:first], "", *standard[first:]]) + "\n"


def load(parts: Sequence[str], **plan: Any) -> SimpleNamespace:
    """The functions of some parts, for a plan that has so much of a real one."""
    scope: dict[str, Any] = dict(plan)
    exec(imports(parts) + text(parts), scope)
    return SimpleNamespace(**scope)


def _file(part: str) -> str:
    return files(__name__).joinpath(f"{part}.py").read_text()
