"""
A lower bound by passing messages (sequential tree-reweighted message passing, Kolmogorov 2006).

The costs are moved about without changing the sum of any choice: along each link a function of the layout is taken from
one side and given to the other. What is then least at every variable alone adds up to a bound on all choices. On a tree
two passes make it exact. What a row costs above the least at its variable, when all around has been passed to it, is
how much worse than the bound any choice with this row must be.
"""

from __future__ import annotations

import numpy as np

from unity_ir.search.problem import Problem
from unity_ir.search.space import Floats


class Messages:
    """Messages over the links of a problem, to the user (`there`, by layout needed) and back (by layout made)."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.there: list[Floats] = [np.zeros(len(link.needs.layouts)) for link in problem.links]
        self.back: list[Floats] = [np.zeros(len(link.made.layouts)) for link in problem.links]
        self.slack: list[Floats] = [np.zeros(len(s)) for s in problem.seconds]
        """How much worse than the bound before the last pass a choice with each row must be."""
        self.bound = -np.inf

    def forward(self) -> float:
        """A pass from the first variable to the last; returns the bound after it."""
        bound = 0.0
        for variable in range(len(self.problem.rows)):
            left, share = self._gather(variable)
            for number in self.problem.out[variable]:
                link = self.problem.links[number]
                least = link.made.least(share)
                self.there[number] = link.between.there(least - self.back[number])
                left = left - least[link.made.at]
            bound += float(left.min())
        self.bound = max(self.bound, bound)
        return bound

    def backward(self) -> float:
        """A pass from the last variable to the first; returns the bound after it."""
        bound = 0.0
        for variable in reversed(range(len(self.problem.rows))):
            left, share = self._gather(variable)
            for number in self.problem.into[variable]:
                link = self.problem.links[number]
                least = link.needs.least(share)
                self.back[number] = link.between.back(least - self.there[number])
                left = left - least[link.needs.at]
            bound += float(left.min())
        self.bound = max(self.bound, bound)
        return bound

    def _gather(self, variable: int) -> tuple[Floats, Floats]:
        """What each row costs with all messages to it, and the part of that for each chain through the variable."""
        problem = self.problem
        total = problem.seconds[variable]
        for number in problem.into[variable]:
            total = total + self.there[number][problem.links[number].needs.at]
        for number in problem.out[variable]:
            total = total + self.back[number][problem.links[number].made.at]
        self.slack[variable] = total - total.min()
        chains = max(len(problem.into[variable]), len(problem.out[variable]), 1)
        return total, total / chains

    def prune(self, limit: float) -> int:
        """Drop the rows with more slack than `limit`; returns how many rows are left in all."""
        for variable, slack in enumerate(self.slack):
            rows = slack <= limit
            if rows.all():
                continue
            before = [(n, self.problem.links[n]) for n in self.problem.into[variable] + self.problem.out[variable]]
            self.problem.keep(variable, rows)
            self.slack[variable] = slack[rows]
            for number, old in before:
                new = self.problem.links[number]
                self.there[number] = self.there[number][np.searchsorted(old.needs.layouts, new.needs.layouts)]
                self.back[number] = self.back[number][np.searchsorted(old.made.layouts, new.made.layouts)]
        return sum(len(s) for s in self.slack)
