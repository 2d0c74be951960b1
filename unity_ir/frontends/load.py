"""Call the function that `--from-torch=package.module:function`, or `--from-jax`, names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from unity_ir.errors import UnityError
from unity_ir.frontends.report import one_line

T = TypeVar("T")


@dataclass(frozen=True)
class NamedFunction:
    """A function without arguments that a command line names, and that returns a model."""

    option: str
    """The option that names it: `--from-torch`."""
    text: str
    """`package.module:function`, as it is given."""

    def imported(self, convert: Callable[[tuple[Any, ...], str], T]) -> T:
        """
        Call the function, and return what `convert` makes of the tuple that it returns (a lone value is a tuple of one)
        and its name. The current directory is added to `sys.path`, and what the function prints goes to stderr.

        Raises `UnityError` if the function does not exist or fails, and as `convert` does.
        """
        path, colon, name = self.text.partition(":")
        if not colon or not all(part.isidentifier() for part in (*path.split("."), *name.split("."))):
            raise self.refuse(f"{self.text!a} is not package.module:function")
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        # The graph goes to stdout; what the model prints must not get into it.
        with redirect_stdout(sys.stderr), self._ends_nothing():
            result: Any = self._result(path, name)
            parts = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)
            return convert(parts, name.replace(".", "_"))

    def refuse(self, message: str) -> UnityError:
        """Return (not raise) a `UnityError` whose message begins with the option."""
        return UnityError(f"{self.option}: {message}")

    @contextmanager
    def _ends_nothing(self) -> Generator[None]:
        """
        Refuse, in the `with` statement, exceptions beyond `Exception`, except Ctrl-C: a model's `sys.exit` must not end
        the tool as if the tool had done its work.
        """
        try:
            yield
        except SystemExit as error:
            raise self.refuse(f"{self.text} called sys.exit({error.code!a}); it must return the model") from error
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self.refuse(f"{self.text} raised {type(error).__name__}: {one_line(error)}") from error

    def _result(self, path: str, name: str) -> object:
        try:
            found: Any = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                raise self.refuse(f"importing {path} failed: {one_line(error)}") from error
            raise self.refuse(f"there is no module {path} here or among those installed") from error
        except Exception as error:
            raise self.refuse(f"importing {path} failed: {type(error).__name__}: {one_line(error)}") from error
        for part in name.split("."):
            if not hasattr(found, part):
                raise self.refuse(f"{path} has no function {name}")
            found = getattr(found, part)
        if not callable(found):
            raise self.refuse(f"{self.text} is {type(found).__name__}; it must be a function")
        try:
            return found()
        except UnityError:
            raise
        except Exception as error:
            raise self.refuse(f"{self.text}() failed: {type(error).__name__}: {one_line(error)}") from error
