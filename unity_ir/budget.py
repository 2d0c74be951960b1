"""
Limit the work and the time of a search.

Work is counted where it is done (`spend`), so that the same search ends with the same plan on any computer, however
busy; a limit in seconds may be set as well. When either is used up, `OutOfBudget` is raised. It is a
`KeyboardInterrupt`, so whatever handles Ctrl-C by returning the best result so far handles it, too.

A unit of work is about a nanosecond of a processor: one table entry that is looked at, or as many entries as take as
long as a step in plain Python.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter

WORK = 200_000_000_000
"""Default limit on the work of a search, in units: twice that of the longest search measured (docs/search.md)."""

PART = 4
"""Bounds and baselines, found beside a search, may each take 1 / PART of its work."""


class OutOfBudget(KeyboardInterrupt):
    """Raised when the budget of a search is used up. It ends the search as Ctrl-C does, with the best plan so far."""


@dataclass
class Budget:
    """
    A limit on the work of a search and, with a `deadline`, on its time; `done` is the work counted so far.

    `work` and `done` are in units of about a nanosecond, `deadline` is in seconds of `time.perf_counter`.
    """

    work: float = WORK
    deadline: float | None = None
    done: float = 0.0
    ended: bool = False
    """Whether `spend` has raised `OutOfBudget`."""

    @staticmethod
    def of(seconds: float | None = None, work: float = WORK) -> Budget:
        """
        Return a budget of `work` units (about a nanosecond each) whose deadline is `seconds` from now (None: no
        deadline).
        """
        return Budget(work, None if seconds is None else perf_counter() + seconds)

    @property
    def is_late(self) -> bool:
        """Whether the deadline, if there is one, has passed."""
        return self.deadline is not None and perf_counter() >= self.deadline

    def spend(self, work: float) -> None:
        """
        Add `work`, which is about to be done, to `done`, in units of about a nanosecond. Raises `OutOfBudget` if `done`
        then exceeds the limit, or if the deadline has passed.
        """
        self.done += work
        if self.done > self.work or self.is_late:
            self.ended = True
            raise OutOfBudget

    def part(self) -> Budget:
        """
        Return a new budget for a bound or baseline that is computed beside a search. It has a quarter of this budget's
        work limit, none of it spent, and the same deadline.
        """
        return Budget(self.work / PART, self.deadline)


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


def spend(work: float) -> None:
    """
    Count `work` (units of about a nanosecond) against the current budget, that of the enclosing `within`; do nothing if
    there is none. Raises `OutOfBudget` if that budget is used up.
    """
    budget = _CURRENT.get()
    if budget is not None:
        budget.spend(work)


def work_done() -> float:
    """
    Return the work (units of about a nanosecond) counted so far against the current budget, that of the enclosing
    `within`; 0 if there is none.
    """
    budget = _CURRENT.get()
    return 0.0 if budget is None else budget.done


@contextmanager
def within(budget: Budget | None) -> Generator[None]:
    """
    Make `budget` the current one in the `with` statement: work is counted against it, and not against the budget that
    is current outside. With None, no work is counted there, and nothing ends it early.
    """
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def own_budget() -> Generator[None]:
    """
    Make a new budget the current one in the `with` statement: `Budget.part` of the budget that is current outside,
    which has a quarter of its whole work limit, however much of that is spent, and the same deadline. Work there counts
    against the new budget only. If none is current outside, none is inside.

    A bound or baseline is computed in this, so that it has the same limit whenever it is computed, and leaves the
    search its own budget.
    """
    budget = _CURRENT.get()
    with within(None if budget is None else budget.part()):
        yield
