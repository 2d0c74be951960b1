"""
Work beside other work: in a second process where there is a processor for it, else in turn. The answers are the same.

The process is a fork of this one, so that it has all that has been found by then (threads would not do: most of the
work is Python's). It ends with the `with` statement, whatever happens there; Ctrl-C is for the first process only.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Generic, Self, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True)
class _Process:
    number: int
    connection: Connection
    """Questions go there, and of answers where they are."""
    answers: int
    """A file, so that nobody waits until an answer is read."""


class ForkedWorker(Generic[Q, A]):
    """
    A function that is asked now and answers later. A context manager.

    In a process of its own, questions and answers are pickled; until something is asked, it goes through `ahead`, which
    may make ready what the function will need. Not `beside`, a question is looked at when its answer is wanted.
    """

    def __init__(self, function: Callable[[Q], A], ahead: Iterable[object] = (), beside: bool = True):
        self._function = function
        self._ahead = ahead
        self._beside = beside
        self._process: _Process | None = None
        self._asked = 0
        self._places: list[tuple[int, int]] = []
        """Where answers are, in the order asked."""

    def __enter__(self) -> Self:
        if self._beside and _processor_left():
            try:
                # Ctrl-C between the fork and its first line would end up there.
                with _defer_interrupts():
                    self._fork()
            except OSError:
                # No process is to be had, or no file: it is done in turn.
                pass
            except KeyboardInterrupt:
                self._end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, question: Q) -> Callable[[], A]:
        """Ask; what is returned gives the answer, or raises what the function raises."""
        if self._process is None:
            return lambda: self._function(question)
        number = self._asked
        self._asked += 1
        try:
            self._process.connection.send(question)
        except OSError:
            self._end()

        def answer() -> A:
            try:
                return self._answer(number)
            except (EOFError, OSError):
                # It ends where the function raises, and may have been ended by others: the same is done here.
                self._end()
                return self._function(question)

        return answer

    def _answer(self, number: int) -> A:
        if self._process is None:
            raise EOFError
        while len(self._places) <= number:
            self._places.append(self._process.connection.recv())
        start, size = self._places[number]
        return pickle.loads(os.pread(self._process.answers, size, start))

    def _end(self) -> None:
        with _defer_interrupts():
            if self._process is not None:
                process, self._process = self._process, None
                process.connection.close()
                os.close(process.answers)
                # Where nobody is told of ended processes (SIGCHLD is ignored), or others waited for it, it is gone.
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process.number, signal.SIGKILL)
                    os.waitpid(process.number, 0)

    def _fork(self) -> None:
        with ExitStack() as stack:
            here, there = map(stack.enter_context, Pipe())
            answers = os.memfd_create("answers")
            stack.callback(os.close, answers)
            with warnings.catch_warnings():
                # Of threads, that is: numpy's, which wait, and are not asked for anything there.
                warnings.simplefilter("ignore", DeprecationWarning)
                number = os.fork()
            if number == 0:
                try:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    here.close()
                    self._serve(there, answers)
                finally:
                    os._exit(0)
            self._process = _Process(number, here, answers)
            stack.pop_all()
            there.close()

    def _serve(self, connection: Connection, answers: int) -> None:
        """Answer until nobody asks any more."""
        for _ in self._ahead:
            if connection.poll():
                break
        end = 0
        while True:
            answer = pickle.dumps(self._function(connection.recv()), pickle.HIGHEST_PROTOCOL)
            written = 0
            while written < len(answer):
                written += os.pwrite(answers, answer[written:], end + written)
            connection.send((end, len(answer)))
            end += len(answer)


@contextmanager
def _defer_interrupts() -> Generator[None]:
    """Ctrl-C waits until this is done. (Blocked signals would go to another thread, such as those of numpy.)"""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(signal.SIGINT, came[0])


def _processor_left() -> bool:
    """Whether another process would have a processor, and may be forked: other threads might hold what it waits for."""
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1
