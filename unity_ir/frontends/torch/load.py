"""Import the model that `--from-torch=package.module:function` names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from typing import Any, cast

from torch import nn

from unity_ir.errors import UnityError
from unity_ir.frontends.torch.imported import Imported, from_torch
from unity_ir.frontends.torch.report import one_line, refuse


def from_text(text: str) -> Imported:
    """
    Call the function that `text` names as `package.module:function`, and import the PyTorch model that it returns.

    The function is called without arguments, and must return `(module, example inputs)` or `(module, example inputs,
    loss)`. The graph gets the function's name. The current directory is added to `sys.path`, and what the function
    prints goes to stderr. Raises `UnityError` if the function does not exist, fails, or returns anything else, and as
    `from_torch` does.
    """
    path, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*path.split("."), *name.split("."))):
        raise refuse(f"{text!a} is not package.module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    # The graph goes to stdout; what the model prints must not get into it.
    with redirect_stdout(sys.stderr):
        with _ends_nothing(text):
            module, example_inputs, loss = _called(text, path, name)
            return from_torch(module, example_inputs, loss, name=name.replace(".", "_"))


@contextmanager
def _ends_nothing(text: str) -> Generator[None]:
    """
    Refuse, in the `with` statement, exceptions beyond `Exception`, except Ctrl-C: a model's `sys.exit` must not end the
    tool as if the tool had done its work.
    """
    try:
        yield
    except SystemExit as error:
        raise refuse(f"{text} called sys.exit({error.code!a}); it must return the module") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise refuse(f"{text} raised {type(error).__name__}: {one_line(error)}") from error


def _called(text: str, path: str, name: str) -> tuple[nn.Module, Any, Any]:
    try:
        found: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise refuse(f"importing {path} failed: {one_line(error)}") from error
        raise refuse(f"there is no module {path} here or among those installed") from error
    except Exception as error:
        raise refuse(f"importing {path} failed: {type(error).__name__}: {one_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise refuse(f"{path} has no function {name}")
        found = getattr(found, part)
    if not callable(found):
        raise refuse(f"{text} is {type(found).__name__}; it must be a function")
    try:
        result: Any = found()
    except UnityError:
        raise
    except Exception as error:
        raise refuse(f"{text}() failed: {type(error).__name__}: {one_line(error)}") from error
    wanted = "it must return (module, example inputs) or (module, example inputs, loss)"
    parts: list[Any] = [*cast(tuple[Any, ...], result)] if isinstance(result, tuple) else []
    if len(parts) not in (2, 3):
        raise refuse(f"{text}() returned {_kind(cast(object, result))}; {wanted}")
    if not isinstance(parts[0], nn.Module):
        raise refuse(f"{text}() returned {_kind(parts[0])} first, which is no torch.nn.Module; {wanted}")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


def _kind(value: object) -> str:
    return type(value).__name__
