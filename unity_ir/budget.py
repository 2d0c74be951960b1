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

WORK = 100_000_000_000
"""Default limit on the work of a search, in units: twice that of the longest search measured (docs/search.md)."""

PART = 4
"""Bounds and baselines, found beside a search, may each take 1 / PART of its work."""


class OutOfBudget(KeyboardInterrupt):
    """Raised when the budget of a search is used up; ends the search as Ctrl-C does, with the best plan so far."""


@dataclass
class Budget:
    """
    A limit on the work of a search and, with a `deadline`, on its time; `done` is the work counted so far.

    `work` and `done` are in units of about a nanosecond, `deadline` is in seconds of `perf_counter`.
    """

    work: float = WORK
    deadline: float | None = None
    done: float = 0.0
    ended: bool = False
    """Whether `spend` has raised `OutOfBudget`."""

    @staticmethod
    def of(seconds: float | None = None, work: float = WORK) -> Budget:
        """
        Return a budget of `work` units (about a nanosecond each) that also ends `seconds` from now, unless that is
        None.
        """
        return Budget(work, None if seconds is None else perf_counter() + seconds)

    @property
    def is_late(self) -> bool:
        """Whether the deadline, if there is one, has passed."""
        return self.deadline is not None and perf_counter() >= self.deadline

    def spend(self, work: float) -> None:
        """
        Add `work` (about to be done, in units of about a nanosecond) to `done`. Raises `OutOfBudget` if that exceeds
        the limit or the deadline passed.
        """
        self.done += work
        if self.done > self.work or self.is_late:
            self.ended = True
            raise OutOfBudget

    def part(self) -> Budget:
        """
        Return a new budget of a quarter of this one's whole work limit, none of it used, with the same deadline: the
        limit for bounds and baselines that are computed beside a search.
        """
        return Budget(self.work / PART, self.deadline)


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


def spend(work: float) -> None:
    """
    Count work (units of about a nanosecond) against the budget of the enclosing `within`, if any. Raises `OutOfBudget`
    where that is used up.
    """
    budget = _CURRENT.get()
    if budget is not None:
        budget.spend(work)


def work_done() -> float:
    """Return the work counted so far against the budget of the enclosing `within`; 0 without one."""
    budget = _CURRENT.get()
    return 0.0 if budget is None else budget.done


@contextmanager
def within(budget: Budget | None) -> Generator[None]:
    """
    Count all work done in the `with` statement against `budget`, in place of the current one; with None, count nothing,
    so that it always completes. Then the current one counts again.
    """
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def own_budget() -> Generator[None]:
    """
    Count work done in the `with` statement against a new `Budget.part` of the current budget, and nothing against the
    current budget itself; count nothing if there is none.

    So a bound or a baseline has the same limit wherever and whenever it is computed, and leaves the search what it has.
    """
    budget = _CURRENT.get()
    with within(None if budget is None else budget.part()):
        yield
