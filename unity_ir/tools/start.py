"""
Define the entry points of the commands: Ctrl-C, SIGTERM and SIGHUP end them in one line even during imports.

An interrupted import raises all sorts of errors. No work has begun by then, so the process exits at once. This
module imports nothing slow.
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
"""The exit code of an interrupted tool."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def unity_opt() -> int:
    """Run `unity-opt` on the process's command line; return its exit code."""
    return _run("unity-opt")


def unity_profile() -> int:
    """Run `unity-profile` on the process's command line; return its exit code."""
    return _run("unity-profile")


def unity_sweep() -> int:
    """Run `unity-sweep` on the process's command line; return its exit code."""
    return _run("unity-sweep")


def unity_tune() -> int:
    """Run `unity-tune` on the process's command line; return its exit code."""
    return _run("unity-tune")


def unity_aot() -> int:
    """Run `unity-aot` on the process's command line; return its exit code."""
    return _run("unity-aot")


def unity_rules() -> int:
    """Run `unity-rules` on the process's command line; return its exit code."""
    return _run("unity-rules")


def _run(tool: str) -> int:
    """Import a tool and run it; return its exit code. The tool handles signals itself (`interrupts.handled`)."""

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
