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
    Raised in place of the end of the run that a program's `fail` is; the argument is the message.

    It is no `Exception`, as what `fail` raises in a program is none, so that the program's handlers let it through.
    """


def executed(text: str, name: str) -> Any:
    """
    Return the program in `text` as a module, called `name` in tracebacks. Its `fail` and `fail_alike` raise `Ended`,
    and so its functions end no process; see `as_errors`. `forget` it when it is done with.
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
    """Drop what `executed` holds of a program beside its module."""
    linecache.cache.pop(program.__file__, None)


def _fail(message: object) -> NoReturn:
    raise Ended(" ".join(str(message).split()))


@contextmanager
def as_errors(name: str) -> Generator[None]:
    """
    Raise a `UnityError`, whose message begins with `name`, where a program's function in the `with` statement ends.
    """
    try:
        yield
    except Ended as error:
        raise UnityError(f"{name}: {error}") from None
