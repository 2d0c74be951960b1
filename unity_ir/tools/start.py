"""
The commands, before anything slow is imported: Ctrl-C, SIGTERM and SIGHUP during imports end in one line, too.

Imports can be interrupted anywhere, and what is raised there comes out as all sorts of errors. Nothing has been begun
by then, so the process ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The exit code of what was interrupted."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def unity_opt() -> int:
    """`unity-opt`"""
    return _run("unity-opt")


def unity_profile() -> int:
    """`unity-profile`"""
    return _run("unity-profile")


def unity_tune() -> int:
    """`unity-tune`"""
    return _run("unity-tune")


def unity_aot() -> int:
    """`unity-aot`"""
    return _run("unity-aot")


def unity_rules() -> int:
    """`unity-rules`"""
    return _run("unity-rules")


def _run(tool: str) -> int:
    """Import a tool and run it. While it works, signals are its own (`interrupts.handled`)."""

    def end(number: int, frame: FrameType | None) -> None:
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"{tool}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    _on_signals(end)
    code = import_module(f"unity_ir.tools.{tool.replace('-', '_')}").main()
    # What has been written is said to have been, whatever comes now.
    _on_signals(signal.SIG_IGN)
    return code


def _on_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
