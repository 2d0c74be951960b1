"""
Ctrl-C, SIGTERM and SIGHUP: each ends a tool as `KeyboardInterrupt` does, and none loses a plan that a search has found.

    with interrupts.handled():      # by a tool, around its work
        with interrupts.searching():    # by whatever leaves something worth keeping when it is interrupted
            ...

In `searching` the first signal raises `KeyboardInterrupt`, which the search answers with the best plan so far. From
then on, and once a search has ended by itself, signals are told and ignored, so that the plan is printed; SIGQUIT
(Ctrl-\\) ends the tool at once. Another search can be interrupted again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from unity_ir.messages import tell

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class _State:
    searching = False
    keep = False
    """There is a plan, or will be at once: signals raise nothing."""
    told = False
    """It has been said that signals are ignored."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _State.keep:
        if not _State.told:
            _State.told = True
            tell("interrupted: writing the plan found so far; Ctrl-\\ ends it at once, without")
        return
    _State.keep = _State.searching
    raise KeyboardInterrupt


def _forward(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does, which may be to wait until a process has been started or ended."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:
        _interrupt(number, frame)


@contextmanager
def handled() -> Generator[None]:
    """
    Raise `KeyboardInterrupt` for SIGINT, SIGTERM and SIGHUP within the `with` statement; afterwards their handlers are
    as before. A tool wraps all its work in this.

    Signals that the process ignores already (under `nohup`, in a shell's background) stay ignored. Does nothing outside
    the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _State.keep = _State.told = _State.searching = False
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _interrupt if number == signal.SIGINT else _forward)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def searching() -> Generator[None]:
    """
    Wrap a search that answers `KeyboardInterrupt` with its best result: of the signals that come within the `with`
    statement, only the first raises it. Has an effect only within `handled`.

    Later signals are ignored, which is reported once, so that the result is still printed. So are those that come after
    the statement, unless it ended by an exception.
    """
    before = _State.keep
    _State.keep, _State.searching = False, True
    try:
        yield
    except BaseException:
        _State.keep = before
        raise
    else:
        _State.keep = True
    finally:
        _State.searching = False


def _in_child() -> None:
    """A process that is forked ends as its parent wants, and has no plan."""
    for number in SIGNALS:
        if signal.getsignal(number) in (_interrupt, _forward):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
