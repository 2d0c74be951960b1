"""
Hold the fixed part of every emitted program, a module for each subject.

`lowering.emit.printer` copies the text of each module below `MARK` into the program, after the plan, the kernels and
the step, so that a program does not import this package. The lines above the mark are only for linting and testing the
modules: `plan` has stand-ins for the names that the plan of a program defines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    "pipeline",
    "flight",
    "files",
    "tokens",
    "data",
    "weights",
    "recipe",
    "tables",
    "host",
    "evaluation",
    "checkpoints",
    "watch",
    "profile",
    "check",
    "graph",
    "command",
)
"""The modules, in the order in which a program has them."""

BEFORE_KERNELS = ("launches",)
"""Modules that a program with Triton's kernels has before these."""

PUBLIC = frozenset({"captured"})
"""Functions that are only for scripts that import a program."""

_EMPTY = re.compile(r"^# --- [^\n]*\n+(?=# --- |\Z)", re.MULTILINE)
"""A heading of which nothing is left, in a module's text."""

_NOT_IN_PROGRAMS = ("__future__", "typing", "unity_ir")


def text(parts: Sequence[str] = PARTS, step: str | None = None, on_host: bool = False, has_average: bool = True) -> str:
    """
    Return the text of the runtime modules named in `parts`, in order, as it is copied into an emitted program.

    `step` is the text of the program's own functions, such as `forward_backward` and `update`. If it is given,
    functions and classes are left out that neither `step` nor a top-level statement of the modules uses, directly or
    through others (those of `PUBLIC`, for scripts that import the program, stay), and so are modules of which none is
    used. If it does not use the class `Flight`, its steps do not overlap, and the statements `if ctx.flight ..` are
    left out, and without `state_windows` the statements `if STATE_WINDOW ..`. With `on_host`, for programs whose steps
    are never a CUDA graph, statements `if ON_HOST is None ..` are left out, and unused functions of `PUBLIC`, too;
    without `has_average`, for optimizers that keep no average of weights, statements `if "average" in STATE ..`.
    """
    overlaps = step is None or "Flight" in _names(ast.parse(step))
    at_host = step is None or "state_windows" in _names(ast.parse(step))
    modules = {part: _module(part, overlaps, not on_host, at_host, has_average) for part in parts}
    bodies = {part: module.text for part, module in modules.items()}
    if step is not None:
        bodies = _reached(modules, _names(ast.parse(step)) | (frozenset[str]() if on_host else PUBLIC))
    return "\n\n".join(body.rstrip("\n") + "\n" for body in bodies.values())


@dataclass(frozen=True, slots=True)
class _Function:
    """A function or class of a module: the lines it takes, with the empty ones after it, and the names it has."""

    name: str
    first: int
    end: int
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Module:
    """A module's text as programs have it, its functions and classes, and the names that its other statements have."""

    text: str
    functions: tuple[_Function, ...]
    names: frozenset[str]


@cache
def _module(part: str, overlaps: bool, graphs: bool, at_host: bool, has_average: bool) -> _Module:
    body = _file(part).split(MARK, 1)[1].strip("\n")
    body = body if overlaps else _without(body, _is_flight)
    body = body if at_host else _without(body, _is_at_host)
    body = body if has_average else _without(body, _is_of_average)
    body = _with_short_docstrings(body if graphs else _without(body, _is_graph))
    lines = body.splitlines()
    functions: list[_Function] = []
    others = frozenset[str]()
    for statement in ast.parse(body).body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            others |= _names(statement)
            continue
        first = min(s.lineno for s in (statement, *statement.decorator_list)) - 1
        end = statement.end_lineno or len(lines)
        while end < len(lines) and not lines[end].strip():
            end += 1
        functions.append(_Function(statement.name, first, end, _names(statement)))
    return _Module(body, tuple(functions), others)


def _without(body: str, is_false: Callable[[ast.expr], bool]) -> str:
    """Return a module's text without the statements `if ..` whose condition `is_false`."""
    found = [s for s in ast.walk(ast.parse(body)) if isinstance(s, ast.If) and not s.orelse and is_false(s.test)]
    left_out = {number for s in found for number in range(s.lineno, (s.end_lineno or s.lineno) + 1)}
    return "".join(line for at, line in enumerate(body.splitlines(keepends=True), 1) if at not in left_out)


def _with_short_docstrings(body: str) -> str:
    """Return a module's text with the quotes of docstrings on the lines of their text, so that programs are shorter."""
    lines = body.splitlines(keepends=True)
    for node in ast.walk(ast.parse(body)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
            continue
        text = node.body[0]
        first, last = text.lineno - 1, (text.end_lineno or text.lineno) - 1
        is_apart = first < last and lines[first].strip() == lines[last].strip() == '"""'
        if is_apart and not lines[last - 1].rstrip().endswith(('"', "\\")):
            indent = " " * text.col_offset
            lines[first + 1] = f'{indent}"""{lines[first + 1].lstrip()}'
            lines[last - 1] = f'{lines[last - 1].rstrip()}"""\n'
            lines[first] = lines[last] = ""
    return "".join(lines)


def _is_flight(test: ast.expr) -> bool:
    """Return whether a condition is false where steps do not overlap: it asks for what is under way, and maybe more."""
    match test:
        case ast.BoolOp(ast.And(), [first, *_]):
            return _is_flight(first)
        case ast.Attribute(ast.Name("ctx"), "flight") | ast.Compare(
            ast.Name("flight"), [ast.IsNot()], [ast.Constant(None)]
        ):
            return True
        case _:
            return False


def _is_at_host(test: ast.expr) -> bool:
    """Return whether a condition is false where state rests on devices: it is `STATE_WINDOW`, and maybe more."""
    match test:
        case ast.BoolOp(ast.And(), [first, *_]):
            return _is_at_host(first)
        case _:
            return isinstance(test, ast.Name) and test.id == "STATE_WINDOW"


def _is_of_average(test: ast.expr) -> bool:
    """Return whether a condition is false without averages of weights: it is `"average" in STATE`, and maybe more."""
    match test:
        case ast.BoolOp(ast.And(), [first, *_]):
            return _is_of_average(first)
        case ast.Compare(ast.Constant("average"), [ast.In()], [ast.Name("STATE")]):
            return True
        case _:
            return False


def _is_graph(test: ast.expr) -> bool:
    """Return whether a condition is false where the host does steps: it is `ON_HOST is None`, and maybe more."""
    match test:
        case ast.BoolOp(ast.And(), [first, *_]):
            return _is_graph(first)
        case ast.Compare(ast.Name("ON_HOST"), [ast.Is()], [ast.Constant(None)]):
            return True
        case _:
            return False


def _reached(modules: Mapping[str, _Module], used: frozenset[str]) -> dict[str, str]:
    """
    Return the modules' texts without the functions and classes that nothing uses, neither is one of the names `used`
    nor do the statements of the modules have it; modules are left out of which no function is used.
    """
    defined = {f.name: f for module in modules.values() for f in module.functions}
    todo = {*used, *(name for module in modules.values() for name in module.names)}
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        reached.add(name)
        if name in defined:
            todo |= defined[name].names - reached
    out: dict[str, str] = {}
    for part, module in modules.items():
        lines = module.text.splitlines(keepends=True)
        for function in reversed(module.functions):
            if function.name not in reached:
                del lines[function.first : function.end]
        if not module.functions or any(f.name in reached for f in module.functions):
            out[part] = _EMPTY.sub("", "".join(lines))
    return out


def _names(tree: ast.AST) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def defined_names(text: str) -> frozenset[str]:
    """
    Return the names of the functions, classes and imports that a program's text defines at top level; variables are not
    among them.
    """
    names: set[str] = set()
    for statement in ast.parse(text).body:
        match statement:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case _:
                pass
    return frozenset(names)


@cache
def runtime_names() -> frozenset[str]:
    """
    Return the names of the functions and classes that all runtime modules together define at top level, which no local
    variable of an emitted program may hide.
    """
    return defined_names(text((*BEFORE_KERNELS, *PARTS)))


@cache
def imports(parts: tuple[str, ...] = PARTS) -> str:
    """
    Return the text of the import statements that the runtime modules named in `parts` need, without imports of this
    package: those of the standard library first, then, after an empty line, those of torch, if there are any.
    """
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
    lines = sorted(found, key=lambda line: (line.startswith("from"), line))
    of_torch = [line for line in lines if "torch" in line]
    standard = [line for line in lines if line not in of_torch]
    return "\n".join([*standard, *(["", *of_torch] if of_torch else [])]) + "\n"


def load(parts: tuple[str, ...], **plan: Any) -> SimpleNamespace:
    """
    Execute the runtime modules named in `parts`, such as "collectives", and return the names they define as attributes
    of one object, for measurements to call.

    List the modules that these use, too, as their imports from this package are left out. `plan` has values for the
    constants of an emitted program's plan that they use, such as `MESH` and `WORLD`.
    """
    scope: dict[str, Any] = dict(plan)
    exec(imports(parts) + text(parts), scope)
    return SimpleNamespace(**scope)


def _file(part: str) -> str:
    return files(__name__).joinpath(f"{part}.py").read_text()
