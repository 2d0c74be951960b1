"""
Imports emitted programs as Python would, and compiles only once what they have in common.

Most of a program is the same in every other one. Compiling all of it takes longer than running three small steps.
"""

from __future__ import annotations
import __future__

import importlib.util
import marshal
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType

BETWEEN = "\n\n\n"
"""Between top-level definitions."""


def compiled(text: str, path: Path) -> bytes:
    """The code of a program's text, part by part, for `module`."""
    parts = text.split(BETWEEN)
    try:
        found: list[CodeType] = []
        line = 0
        for part in parts:
            code = _part(part, "from __future__ import annotations" in parts[0])
            # A part may begin with text, which only in the first is the module's docstring.
            if found and "__doc__" in code.co_names:
                raise SyntaxError
            found.append(_moved(code, str(path), line))
            line += part.count("\n") + len(BETWEEN)
    except SyntaxError:
        # `BETWEEN` is within a definition, or the program is wrong, which Python says best of the whole.
        found = [compile(text, str(path), "exec", dont_inherit=True)]
    return marshal.dumps(found)


@lru_cache(maxsize=4096)
def _part(text: str, annotations: bool) -> CodeType:
    flags = __future__.annotations.compiler_flag if annotations else 0
    return compile(text, "program.py", "exec", flags, dont_inherit=True)


def _moved(code: CodeType, path: str, lines: int) -> CodeType:
    """The same code as if it were in the file `path`, so many lines further down."""
    inner = tuple(_moved(c, path, lines) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=path, co_firstlineno=code.co_firstlineno + lines, co_consts=inner)


def module(path: Path, code: bytes) -> ModuleType:
    """The program in a file, whose code is `code`, imported under a name that no other has."""
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    for part in marshal.loads(code):
        exec(part, found.__dict__)
    return found
