"""
One input given to a tool in this process, and what must hold of how it ends.

Exit code 0, or 1 with one line of at most `LENGTH` characters on stderr; no exception, no more than `LIMIT` seconds of
processor time (of which a busy machine takes no more than an idle one). What verifies is printed, and reads again as
the same text.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from unittest.mock import patch

from unity_ir.messages import LENGTH
from unity_ir.tools.command_line import TRACEBACK

LIMIT = 60.0
"""Seconds of processor time an input may take."""


class Fault(Exception):
    """A tool ended as none may. The message says how."""


class Hang(BaseException):
    """The time is up. No tool catches it."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a tool ended."""

    code: int
    out: str
    err: str


Main = Callable[[list[str]], int]


@contextmanager
def limited(seconds: float) -> Generator[None]:
    """Raise `Hang` after so many seconds of this process's processor time."""

    def up(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, up)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def call(main: Main, argv: Sequence[str], data: bytes = b"") -> Result:
    """Run a tool on arguments and what it reads from stdin. Raises `Fault` for an exception or no end."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"),
        "stdout": io.TextIOWrapper(out, encoding="utf-8", write_through=True),
        "stderr": io.TextIOWrapper(err, encoding="utf-8", errors="backslashreplace", write_through=True),
    }
    with patch.multiple(sys, argv=["tool", *argv], **streams), patch.dict(os.environ, {TRACEBACK: "1"}):
        try:
            with limited(LIMIT):
                code = main(list(argv))
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
        except Hang:
            raise Fault(f"no end in {LIMIT:g} s") from None
        except Exception as error:
            raise Fault("".join(traceback.format_exception(error)[-12:])) from error
    return Result(code, out.getvalue().decode("utf-8"), err.getvalue().decode("utf-8"))


def check(result: Result, silent: bool = False, reports: bool = False) -> None:
    """
    Raises `Fault` for a wrong exit code, and a message that is none.

    `silent` tools may end with 1 and no message; what `reports` on stderr does so before the message.
    """
    if result.code not in (0, 1):
        raise Fault(f"exit code {result.code}")
    if result.code == 0:
        return
    if result.err == "" and silent:
        return
    lines = result.err.split("\n")
    if reports:
        # What a tool reports on stderr may come before.
        lines = lines[-2:]
    if len(lines) != 2 or lines[1] or not lines[0].strip():
        raise Fault(f"{len(lines) - 1} lines on stderr: {result.err[:600]!r}")
    if len(lines[0]) > LENGTH:
        raise Fault(f"a message of {len(lines[0])} characters: {lines[0][:600]!r}")
    if not lines[0].isprintable():
        raise Fault(f"a message that steers the terminal: {lines[0]!r}")
    if "internal error" in lines[0]:
        raise Fault(lines[0])
