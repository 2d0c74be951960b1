"""
Hold the fixed part of every emitted program, a module for each subject.

`lowering.emit.printer` copies the text of each module below `MARK` into the program, after the plan, the kernels and
the step, so that a program does not import this package. The lines above the mark are only for linting and testing the
modules: `plan` has stand-ins for the names that the plan of a program defines.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
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
"""The modules, in the order in which a program has them."""

_NOT_IN_PROGRAMS = ("__future__", "typing", "unity_ir")


def text(parts: Sequence[str] = PARTS, step: str | None = None) -> str:
    """
    Return the text of some modules as it is copied into a program.

    Given the text of the program's `step`, functions and classes are left out that neither it nor `main` uses.
    """
    bodies = {part: _file(part).split(MARK, 1)[1].strip("\n") for part in parts}
    if step is not None:
        bodies = _reached(bodies, step)
    return "\n\n".join(body.rstrip("\n") + "\n" for body in bodies.values())


def _reached(bodies: Mapping[str, str], step: str) -> dict[str, str]:
    """
    Return the modules' texts without the functions and classes that nothing uses, neither `step` nor the statements of
    the modules; modules are left out of which no function is used.
    """
    defined: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    todo = _names(ast.parse(step))
    for body in bodies.values():
        for statement in ast.parse(body).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                defined[statement.name] = statement
            else:
                todo |= _names(statement)
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        reached.add(name)
        if name in defined:
            todo |= _names(defined[name]) - reached
    out: dict[str, str] = {}
    for part, body in bodies.items():
        lines = body.splitlines(keepends=True)
        own = [s for s in ast.parse(body).body if isinstance(s, ast.FunctionDef | ast.ClassDef)]
        for statement in reversed(own):
            first = min(s.lineno for s in (statement, *statement.decorator_list)) - 1
            end = statement.end_lineno or len(lines)
            while end < len(lines) and not lines[end].strip():
                end += 1
            if statement.name not in reached:
                del lines[first:end]
        if not own or any(s.name in reached for s in own):
            out[part] = "".join(lines)
    return out


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def imports(parts: Sequence[str] = PARTS) -> str:
    """Return the import statements that `parts` of the runtime need, without those of each other."""
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
    """
    Run the text of some modules and return their functions and classes, as measurements and tests call them.

    `plan` has the names of `runtime.plan` that these modules use, such as `MESH` and `WORLD`.
    """
    scope: dict[str, Any] = dict(plan)
    exec(imports(parts) + text(parts), scope)
    return SimpleNamespace(**scope)


def _file(part: str) -> str:
    return files(__name__).joinpath(f"{part}.py").read_text()
