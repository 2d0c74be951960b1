"""
What a search may take.

Work is counted where it is done (`spend`), so that the same search ends in the same plan on any computer, however busy;
seconds are a limit beside that, for those who ask for one. When either is used up, `OutOfBudget` is raised: it is taken
where Ctrl-C is, by whoever has something to give.

A unit of work is about a nanosecond of a processor: an entry of a table that is looked at, or as many of them as
Python takes the time of for what is no table.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter

WORK = 100_000_000_000
"""What a search may do by default: twice what the longest of those measured in docs/search.md does."""

PART = 4
"""What is found beside a search, such as a bound, may take one part in so many of its work."""


class OutOfBudget(KeyboardInterrupt):
    """A search has used up its budget, and ends as if by Ctrl-C: with the best so far."""


@dataclass
class Budget:
    """Work that may be done, and maybe the time (of `perf_counter`) from which on none may; and what has been done."""

    work: float = WORK
    deadline: float | None = None
    done: float = 0.0
    ended: bool = False
    """Whether it was used up, and somebody had to stop."""

    @staticmethod
    def of(seconds: float | None = None, work: float = WORK) -> Budget:
        """A budget of so many seconds from now, if any, and of so much work."""
        return Budget(work, None if seconds is None else perf_counter() + seconds)

    @property
    def is_late(self) -> bool:
        """Whether its time is up."""
        return self.deadline is not None and perf_counter() >= self.deadline

    def spend(self, work: float) -> None:
        """Count work (see `WORK`) that is about to be done. Raises `OutOfBudget` where there is none left."""
        self.done += work
        if self.done > self.work or self.is_late:
            self.ended = True
            raise OutOfBudget

    def part(self) -> Budget:
        """What something beside the search may take, wherever and whenever it is done."""
        return Budget(self.work / PART, self.deadline)


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


def spend(work: float) -> None:
    """Count work of the search under way, if there is one. Raises `OutOfBudget` where its budget is used up."""
    budget = _CURRENT.get()
    if budget is not None:
        budget.spend(work)


@contextmanager
def within(budget: Budget | None) -> Generator[None]:
    """Work is counted in a budget; None counts nothing, for what has to be done however little is left."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def beside() -> Generator[None]:
    """
    Work is counted in a part of the budget of the search under way: the same whether it is done in this process or in
    another, before what the search does itself or after.
    """
    budget = _CURRENT.get()
    with within(None if budget is None else budget.part()):
        yield
