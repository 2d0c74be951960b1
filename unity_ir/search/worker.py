"""
Run a function in a forked process if a processor is free, else in turn. The answers are the same.

The process is a fork, so it has all tables computed by then (threads would not do: most of the work is Python's). It
ends with the `with` statement, whatever happens there; Ctrl-C is for the first process only.

No `ProcessPoolExecutor`: its threads would forbid further forks (`_processor_left`), and its shutdown waits.
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

from unity_ir.budget import spend, work_done
from unity_ir.machine.model import Machine
from unity_ir.search.layouts.limits import limits

Q = TypeVar("Q")
A = TypeVar("A")


def is_large_machine(machine: Machine) -> bool:
    """Return whether searches for a machine take long enough to use further processes."""
    return len(machine.mesh.sizes) > limits().exact_axes


@dataclass(frozen=True)
class _Process:
    number: int
    connection: Connection
    """Carries questions there, and back the place of each answer."""
    answers: int
    """A memory file, so that the worker never waits for an answer to be read."""


class ForkedWorker(Generic[Q, A]):
    """
    Runs a function on questions, in a forked process if a processor is free, and returns the answers later.

    A context manager. Questions and answers are pickled. Until the first question, the process iterates `ahead`, which
    may compute tables that the function needs. With `beside=False`, or without a free processor, each question is
    answered in this process, when its answer is requested. Work that the function counts (`budget.spend`) is counted
    here when its answer is read, so that it is the same in one process.
    """

    def __init__(self, function: Callable[[Q], A], ahead: Iterable[object] = (), beside: bool = True):
        self._function = function
        self._ahead = ahead
        self._beside = beside
        self._process: _Process | None = None
        self._asked = 0
        self._places: list[tuple[int, int]] = []
        """(offset, size) of each answer, in the order asked."""

    def __enter__(self) -> Self:
        if self._beside and _processor_left():
            try:
                # Ctrl-C between the fork and the child's first line would be raised in the child.
                with _defer_interrupts():
                    self._fork()
            except OSError:
                # No process or file can be made: answer here.
                pass
            except KeyboardInterrupt:
                self._end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def is_forked(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def ask(self, question: Q) -> Callable[[], A]:
        """
        Send a question to the worker process, if there is one; return a function that waits for the answer and returns
        it, or raises what the worker's function raised. Without a process, that function computes the answer when
        called, anew at each call.
        """
        uncounted = self.ask_uncounted(question)

        def answer() -> A:
            found, work = uncounted()
            spend(work)
            return found

        return answer

    def ask_uncounted(self, question: Q) -> Callable[[], tuple[A, float]]:
        """
        Do as `ask`, but return with each answer the work of the process, for the caller to count: 0 if it was done in
        this process, where it is counted as it is done.
        """
        if self._process is None:
            return lambda: (self._function(question), 0.0)
        number, here = self._asked, os.getpid()
        self._asked += 1
        try:
            self._process.connection.send(question)
        except OSError:
            self._end()

        def answer() -> tuple[A, float]:
            if os.getpid() != here:
                return self._function(question), 0.0  # a fork must not read what is for the process that asked
            try:
                return self._answer(number)
            except (EOFError, OSError):
                # The process ends if the function raises, and may have been killed: answer here.
                self._end()
                return self._function(question), 0.0

        return answer

    def _answer(self, number: int) -> tuple[A, float]:
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
                # It is gone already if SIGCHLD is ignored, or if other code waited for it.
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(process.number, signal.SIGKILL)
                    os.waitpid(process.number, 0)

    def _fork(self) -> None:
        with ExitStack() as stack:
            here, there = map(stack.enter_context, Pipe())
            answers = os.memfd_create("answers")
            stack.callback(os.close, answers)
            with warnings.catch_warnings():
                # The warnings are of threads: numpy's, which are idle, and JAX's; the child uses neither.
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
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
        """Answer questions until the connection closes."""
        for _ in self._ahead:
            if connection.poll():
                break
        end = 0
        while True:
            question, before = connection.recv(), work_done()
            found = self._function(question)
            answer = pickle.dumps((found, work_done() - before), pickle.HIGHEST_PROTOCOL)
            written = 0
            while written < len(answer):
                written += os.pwrite(answers, answer[written:], end + written)
            connection.send((end, len(answer)))
            end += len(answer)


@contextmanager
def _defer_interrupts() -> Generator[None]:
    """
    Defer Ctrl-C to the end of the `with` statement. (Blocked signals would go to another thread, such as numpy's.)
    """
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
    """
    Return whether a processor is free and forking is safe: another thread might hold a lock that the fork waits for.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1
