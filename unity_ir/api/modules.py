"""Read modules from text, and give every fault of a module as a `UnityError` that names its input."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects import get_all_dialects
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.exceptions import DiagnosticException, ParseError, VerifyException

from unity_ir.api.read_text import as_xdsl, check_structure, read_module
from unity_ir.api.text_errors import name_operation, parse_error
from unity_ir.errors import UnityError
from unity_ir.universe import UNITY_UNIVERSE


def new_context() -> Context:
    """Return an xDSL context that knows this package's dialects, and xDSL's own."""
    context = Context()
    for dialect, factory in {**get_all_dialects(), **UNITY_UNIVERSE.all_dialects}.items():
        context.register_dialect(dialect, factory)
    return context


def read_file(path: str | Path) -> ModuleOp:
    """
    Return the module in a file (`.pcg`, `.mlir`), verified. Raises `UnityError` for wrong text, `OSError` if the file
    cannot be read.
    """
    return parsed(Path(path).read_bytes(), str(path))


def parsed(data: bytes, name: str) -> ModuleOp:
    """
    Return the module that the UTF-8 text `data` holds, verified; messages call the text `name`. Raises `UnityError` for
    wrong text.
    """
    context = new_context()
    try:
        with as_unity_errors(name, ModuleOp([])):
            module = read_module(context, data, name)
    except ParseError as error:
        raise UnityError(parse_error(error, [op.name for op in context.loaded_ops])) from error
    with as_unity_errors(name, module):
        verify(module)
    return module


def verify(module: ModuleOp) -> None:
    """
    Raise `VerifyException` or `DiagnosticException` unless the module's structure and all of its operations are valid.
    """
    check_structure(module)
    with as_xdsl("verified"):
        module.verify()


@contextmanager
def as_unity_errors(name: str, module: ModuleOp) -> Generator[None]:
    """
    Turn exceptions that xDSL and passes raise in the `with` statement, about `module`, into `UnityError`s. Their
    message begins with `name`, what the module was read from.
    """
    try:
        yield
    except VerifyException as error:
        raise UnityError(f"{name}: {name_operation(module, error)}") from error
    except DiagnosticException as error:
        raise UnityError(f"{name}: {error}") from error
