"""Execute the text of an emitted program as a module, whose functions raise errors where the program would end."""

from __future__ import annotations

import linecache
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any, NoReturn

from unity_ir.errors import UnityError

_NUMBER = count(1)


class Ended(SystemExit):
    """
    Raised instead of ending the process, where an emitted program calls `fail`; its argument is the message.

    It is a `SystemExit` and no `Exception`, like what `fail` raises in a script, so that handlers in the program let it
    through.
    """


def executed(text: str, name: str) -> Any:
    """
    Execute the text of an emitted program, but not its `main`, and return it as a Python module (`ModuleType`), called
    `name` in tracebacks. Its functions `fail` and `fail_alike`, which would end the process, raise `Ended` instead; see
    `as_errors`.

    The text is kept in Python's `linecache` until `forget`.
    """
    file = f"<unity-ir {next(_NUMBER)}: {name}>"
    # Triton reads the source of its kernels, and tracebacks show lines.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module: Any = ModuleType(file.strip("<>"))
    module.__file__ = file
    exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
    module.fail = module.fail_alike = _fail
    return module


def forget(program: Any) -> None:
    """Remove the text of a program that `executed` returned from Python's `linecache`."""
    linecache.cache.pop(program.__file__, None)


def _fail(message: object) -> NoReturn:
    raise Ended(" ".join(str(message).split()))


@contextmanager
def as_errors(name: str) -> Generator[None]:
    """
    Turn `Ended`, which a program's functions raise in the `with` statement, into a `UnityError` whose message begins
    with `name`.
    """
    try:
        yield
    except Ended as error:
        raise UnityError(f"{name}: {error}") from None
