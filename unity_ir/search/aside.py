"""
Work beside other work: in a second process where there is a processor for it, else in turn. The answers are the same.

The process is a fork of this one, so that it has all that has been found by then (threads would not do: most of the
work is Python's). It ends with the `with` statement, whatever happens there; Ctrl-C is for the first process only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Self, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Aside(Generic[Q, A]):
    """
    A function that is asked now and answers later, in the order asked. A context manager.

    In a process of its own, questions and answers are pickled; until something is asked, it goes through `ahead`, which
    may make ready what the function will need. What the function raises, `answer` raises. Not `beside`, all is in turn.
    """

    def __init__(self, function: Callable[[Q], A], ahead: Iterable[object] = (), beside: bool = True):
        self._function = function
        self._beside = beside
        self._ahead = ahead
        self._asked: deque[Q] = deque()
        """Without an answer yet."""
        self._process: tuple[int, Connection] | None = None

    def __enter__(self) -> Self:
        if self._beside and _processor_left():
            self._fork()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, question: Q) -> None:
        """Ask for an answer."""
        self._asked.append(question)
        if self._process is not None:
            try:
                self._process[1].send(question)
            except OSError:
                self._end()

    def answer(self) -> A:
        """The answer to the first question that has none yet."""
        question = self._asked.popleft()
        if self._process is not None:
            try:
                return self._process[1].recv()
            except (EOFError, OSError):
                # It ends where the function raises, and may have been ended by others: the same is done here.
                self._end()
        return self._function(question)

    def _end(self) -> None:
        if self._process is not None:
            (number, connection), self._process = self._process, None
            connection.close()
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)

    def _fork(self) -> None:
        here, there = Pipe()
        # Ctrl-C between the fork and its first line would end up there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                # Of threads, that is: numpy's, which wait, and are not asked for anything there.
                warnings.simplefilter("ignore", DeprecationWarning)
                number = os.fork()
            if number == 0:
                try:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    here.close()
                    self._serve(there)
                finally:
                    os._exit(0)
            self._process = number, here
            there.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _serve(self, connection: Connection) -> None:
        """Answer until nobody asks any more."""
        for _ in self._ahead:
            if connection.poll():
                break
        while True:
            connection.send(self._function(connection.recv()))


def _processor_left() -> bool:
    """Whether another process would have a processor, and may be forked: other threads might hold what it waits for."""
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1
