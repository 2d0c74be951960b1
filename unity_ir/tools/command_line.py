"""
Share between tools how options are parsed, how errors become exit codes, and how closed standard streams are handled.
"""

from __future__ import annotations

import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EBADF
from io import TextIOBase, TextIOWrapper
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

from unity_ir import interrupts
from unity_ir.errors import UnityError, UnityReport, not_installed
from unity_ir.messages import one_line, tell

TRACEBACK = "UNITY_IR_TRACEBACK"
"""The environment variable that, if set, lets internal errors raise, to show their traceback."""


class Once(Action):
    """
    Argparse action that stores an option's value, and is an error for an option given twice (argparse itself would
    silently take the last).
    """

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        given: set[str] = vars(namespace).setdefault("options_given", set())
        if self.option_strings and self.dest in given:
            parser.error(f"{'/'.join(self.option_strings)} is given twice; leave one out")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(ArgumentParser):
    """Argument parser that raises `UnityError` for a wrong command line; no option may be given twice (`Once`)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register("action", None, Once)

    def error(self, message: str) -> NoReturn:
        """Raise `UnityError` with this message, for a wrong command line."""
        raise UnityError(f"{self.prog}: {message}; see {self.prog} --help")


def check_folder(tool: str, flag: str, file: str | Path) -> None:
    """
    Raise `UnityError`, before any work is done, if a file that `flag` has `tool` write is in a folder that is not
    there.
    """
    folder = Path(file).absolute().parent
    if not folder.is_dir():
        raise UnityError(f"{tool}: {flag} is {file}, and there is no folder {folder}; make it, or name another")


def exit_code(
    parser: Parser, work: Callable[[Namespace], int], argv: Sequence[str] | None, interrupted: str = ""
) -> int:
    """
    Parse the command line `argv` (None: that of the process), call `work` with the parsed options, and return the exit
    code: that of `work`, or 1 or 130 for an exception, as `outcome` decides.

    `interrupted` is the message for Ctrl-C, printed after the tool's name.
    """
    return outcome(parser.prog, lambda: work(parser.parse_args(argv)), interrupted)


def outcome(tool: str, work: Callable[[], int], interrupted: str = "interrupted") -> int:
    """
    Call `work` and return its exit code, or 1 or 130 for the exception that it raises, whose message is printed on
    stderr. `tool` is the name with which messages begin.

    Errors in the input (`UnityError`, `OSError`, ..) print one line: exit code 1. Ctrl-C, SIGTERM and SIGHUP print
    `interrupted`: exit code 130. Any other exception is a bug and prints `internal error` with exit code 1, or is
    raised if the environment variable `UNITY_IR_TRACEBACK` is set. Standard streams that the caller has closed are
    replaced by stand-ins, and stdout is made UTF-8, for the whole process.
    """
    try:
        _open_streams()
        with interrupts.handled():
            code = work()
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone, e.g. `| head`. Python flushes stdout once more at exit: give it somewhere to.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UnityReport as report:
        for line in str(report).splitlines():
            tell(line)
    except UnityError as error:
        tell(str(error))
    except KeyboardInterrupt:
        tell(f"{tool}: {interrupted}")
        return 130
    except UnicodeEncodeError as error:
        tell(f"{tool}: {error.object[error.start : error.end]!a} is no text that can be written; take it out")
    except OSError as error:
        tell(f"{error.filename!s}: {error.strerror}" if error.filename else f"{tool}: {error.strerror or error}")
    except ModuleNotFoundError as error:
        missing = not_installed(error)
        if missing is None:
            return _bug(tool, error)
        tell(f"{tool}: {missing}")
    except MemoryError:
        tell(f"{tool}: out of memory; give it a smaller model, or more")
    except Exception as error:
        return _bug(tool, error)
    return 1


def _bug(tool: str, error: Exception) -> int:
    """Say where an exception that is a bug was raised, and return exit code 1; or raise it, if `TRACEBACK` is set."""
    if os.environ.get(TRACEBACK):
        raise error
    tell(f"{tool}: internal error: {_described(error)}; set {TRACEBACK}=1 to see where, and please report it")
    return 1


def _described(error: Exception) -> str:
    """Return an exception as text, with where it was raised: `KeyError: 'x' at build.py:103`."""
    where = [f"{Path(f.filename).name}:{f.lineno}" for f in extract_tb(error.__traceback__)[-1:]]
    return " at ".join([f"{type(error).__name__}: {one_line(str(error))[:100]}", *where])


class _Closed(TextIOBase):
    """Stand-in for standard output or input that the caller has closed; using it raises `OSError`."""

    def __init__(self, name: str):
        self._name = name
        self.name = f"<{name}>"

    @property
    def buffer(self) -> NoReturn:
        raise self._error()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"

    def write(self, text: str, /) -> int:
        if text:
            raise self._error()
        return 0

    def _error(self) -> OSError:
        return OSError(EBADF, f"{self._name} is closed; give it a file")


class _Nowhere(TextIOBase):
    """Stand-in for closed stderr; drops what is written."""

    def write(self, text: str, /) -> int:
        return len(text)


def _open_streams() -> None:
    """
    Replace closed standard streams by stand-ins, and open their file descriptors, so that no other file gets them.
    """
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    streams: Any = sys
    for name in ("stdin", "stdout"):
        if getattr(sys, name) is None:
            setattr(streams, name, _Closed(name))
    if sys.stderr is None:
        streams.stderr = _Nowhere()
    # Programs and modules are UTF-8 whatever the terminal is.
    output: Any = sys.stdout
    if isinstance(output, TextIOWrapper) and output.encoding.lower() not in ("utf-8", "utf8"):
        output.reconfigure(encoding="utf-8")
