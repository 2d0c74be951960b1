"""
A lower bound by passing messages (sequential tree-reweighted message passing, Kolmogorov 2006).

The costs are moved about without changing the sum of any choice: along each link a function of the layout is taken from
one side and given to the other. What is then least at every variable alone adds up to a bound on all choices. On a tree
two passes make it exact. What a row costs above the least at its variable, when all around has been passed to it, is
how much worse than the bound any choice with this row must be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unity_ir.budget import spend
from unity_ir.search.exact.factor_graph import Problem
from unity_ir.search.exact.two_way import GRAIN, ROUNDED
from unity_ir.search.layouts.axes import Floats

MESSAGE = 20_000
"""Work of a message beside its sums: of Python, and of starting numpy's functions."""


class Messages:
    """Messages over the links of a problem, to the user (`there`, by layout needed) and back (by layout made)."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.there: list[Floats] = [np.zeros(len(link.needs.layouts)) for link in problem.links]
        self.back: list[Floats] = [np.zeros(len(link.made.layouts)) for link in problem.links]
        self.slack: list[Floats] = [np.zeros(len(s)) for s in problem.seconds]
        """How much worse than the bound before the last pass a choice with each row must be."""
        self.bound = -np.inf
        self.last = -np.inf
        """The bound after the last pass: rounded, it may be a little less than the one before."""

    @property
    def rows(self) -> int:
        """Rows that are left."""
        return sum(map(len, self.problem.rows))

    def forward(self, known: float = np.inf) -> float:
        """
        A pass from the first variable to the last; returns the bound after it. Rows that only choices worse than
        `known` have are dropped on the way.
        """
        bound, limit = 0.0, self._limit(known)
        for variable in range(len(self.problem.rows)):
            self._spend(self.problem.out[variable])
            left, share = self._gather(variable, limit)
            for number in self.problem.out[variable]:
                link = self.problem.links[number]
                least = link.made.least(share)
                self.there[number] = link.between.there(least - self.back[number])
                left = left - least[link.made.at]
            bound += float(left.min())
        self.last, self.bound = bound, max(self.bound, bound)
        return bound

    def backward(self, known: float = np.inf) -> float:
        """Likewise from the last variable to the first."""
        bound, limit = 0.0, self._limit(known)
        for variable in reversed(range(len(self.problem.rows))):
            self._spend(self.problem.into[variable])
            left, share = self._gather(variable, limit)
            for number in self.problem.into[variable]:
                link = self.problem.links[number]
                least = link.needs.least(share)
                self.back[number] = link.between.back(least - self.there[number])
                left = left - least[link.needs.at]
            bound += float(left.min())
        self.last, self.bound = bound, max(self.bound, bound)
        return bound

    def _spend(self, links: Sequence[int]) -> None:
        """Count the work of passing on along some links."""
        ports = [(self.problem.links[n].made.layouts, self.problem.links[n].needs.layouts) for n in links]
        spend(MESSAGE * (1 + len(links)) + sum(len(made) * len(needs) for made, needs in ports))

    def _gather(self, variable: int, limit: float) -> tuple[Floats, Floats]:
        """What each row costs with all messages to it, and the part of that for each chain through the variable."""
        problem = self.problem
        total = problem.seconds[variable]
        for number in problem.into[variable]:
            total = total + self.there[number][problem.links[number].needs.at]
        for number in problem.out[variable]:
            total = total + self.back[number][problem.links[number].made.at]
        self.slack[variable] = total - total.min()
        rows = self.slack[variable] <= limit
        if not rows.all():
            self._keep(variable, rows)
            total = total[rows]
        chains = max(len(problem.into[variable]), len(problem.out[variable]), 1)
        return total, total / chains

    def _limit(self, known: float) -> float:
        """The slack in the next pass from which on a choice must be worse than what is known, sums being rounded."""
        links = len(self.problem.links)
        return (known - self.last) * (1 + 2 * links * ROUNDED) + 2 * links * GRAIN

    def prune(self, limit: float) -> int:
        """Drop the rows with more slack than `limit`; returns how many rows are left in all."""
        for variable, slack in enumerate(self.slack):
            rows = slack <= limit
            if not rows.all():
                self._keep(variable, rows)
        return sum(len(s) for s in self.slack)

    def _keep(self, variable: int, rows: npt.NDArray[np.bool_]) -> None:
        before = [(n, self.problem.links[n]) for n in self.problem.into[variable] + self.problem.out[variable]]
        self.problem.keep(variable, rows)
        self.slack[variable] = self.slack[variable][rows]
        for number, old in before:
            new = self.problem.links[number]
            self.there[number] = self.there[number][np.searchsorted(old.needs.layouts, new.needs.layouts)]
            self.back[number] = self.back[number][np.searchsorted(old.made.layouts, new.made.layouts)]
