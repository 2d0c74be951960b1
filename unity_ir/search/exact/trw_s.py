"""
Compute a lower bound by sequential tree-reweighted message passing (TRW-S; Kolmogorov, 2006).

Messages reparametrise the sum: along each edge a function of the layout is taken from one side and given to the other,
which changes no choice's cost. The minima of the variables then add up to a lower bound. On a tree two passes make it
exact. The slack of a row, its cost above its variable's minimum, is how much worse than the bound any choice with this
row must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from unity_ir.budget import spend
from unity_ir.search.exact.factor_graph import FactorGraph, Port
from unity_ir.search.exact.two_way import GRAIN, ROUNDED
from unity_ir.search.layouts.axes import Floats
from unity_ir.search.layouts.limits import limits


class Messages:
    """
    The messages of TRW-S (Kolmogorov, 2006) on a factor graph, one per edge and direction, and their lower bound on the
    cost of every choice. Its variables' rows are what is chosen from: the ways to shard an operator, or the layouts of
    a value.

    `there` goes to the user [layout needed], `back` to the producer [layout made]. Passes drop rows of the factor graph
    in place.
    """

    def __init__(self, problem: FactorGraph, start: tuple[list[Floats], list[Floats]] | None = None):
        """Start from the messages (there, back) `start`; from zero if it is None. Any messages are a valid start."""
        self.problem = problem
        self.restarted = start is not None
        """Whether they started from given messages."""
        there, back = start or (
            [np.zeros(len(edge.needs.layouts)) for edge in problem.edges],
            [np.zeros(len(edge.made.layouts)) for edge in problem.edges],
        )
        self.there: list[Floats] = there
        self.back: list[Floats] = back
        self.slack: list[Floats] = [np.zeros(len(s)) for s in problem.seconds]
        """
        Per variable and row, a lower bound on what any choice with the row costs above the bound before the last pass.
        """
        self.bound = -np.inf
        self.last = -np.inf
        """The bound after the last pass: with rounding it may be a little below the one before."""

    @property
    def rows(self) -> int:
        """
        The number of rows left in the factor graph, of all variables together: those that passes and `prune` have not
        dropped.
        """
        return sum(map(len, self.problem.rows))

    def forward(self, known: float = np.inf) -> float:
        """
        Pass messages from the first variable to the last; return the lower bound after the pass.

        `known` is the cost of the incumbent, inf if there is none: rows that occur only in dearer choices are dropped
        for good.
        """
        bound, limit = 0.0, self._limit(known)
        for variable in range(len(self.problem.rows)):
            self._spend(self.problem.out[variable])
            left, share = self._gather(variable, limit)
            for number in self.problem.out[variable]:
                edge = self.problem.edges[number]
                least = edge.made.least(share)
                self.there[number] = edge.between.there(least - self.back[number])
                left = left - least[edge.made.at]
            bound += float(left.min())
        self._end(bound)
        return bound

    def backward(self, known: float = np.inf) -> float:
        """
        Pass messages from the last variable to the first; return the lower bound after the pass.

        `known` is the cost of the incumbent, inf if there is none: rows that occur only in dearer choices are dropped
        for good.
        """
        bound, limit = 0.0, self._limit(known)
        for variable in reversed(range(len(self.problem.rows))):
            self._spend(self.problem.into[variable])
            left, share = self._gather(variable, limit)
            for number in self.problem.into[variable]:
                edge = self.problem.edges[number]
                least = edge.needs.least(share)
                self.back[number] = edge.between.back(least - self.there[number])
                left = left - least[edge.needs.at]
            bound += float(left.min())
        self._end(bound)
        return bound

    def settle(self, passes: int, least: float) -> None:
        """
        Pass messages there and back, until that raises the bound by less than the part `least` of it, at most `passes`
        times; where a pass is long (`limits().once_sums`), until one way does. No row is dropped.
        """
        is_long = self.problem.steps() > limits().once_sums
        for _ in range(passes):
            start = self.bound
            for passed in (self.forward, self.backward):
                before = self.bound
                passed()
                if is_long and self.bound - before < least * abs(self.bound):
                    return
            if self.bound - start < least * abs(self.bound):
                return

    def _end(self, bound: float) -> None:
        """Record the bound after a pass, and free what its dropped rows alone needed."""
        self.last, self.bound = bound, max(self.bound, bound)
        self.problem.forget()

    def _spend(self, edges: Sequence[int]) -> None:
        """Charge the budget for messages along some edges."""
        ports = [(self.problem.edges[n].made.layouts, self.problem.edges[n].needs.layouts) for n in edges]
        sums = sum(len(made) * len(needs) for made, needs in ports)
        spend(limits().work_message * (1 + len(edges)) + sums // limits().sums_per_work)

    def _gather(self, variable: int, limit: float) -> tuple[Floats, Floats]:
        """Return each row's cost with all incoming messages, and its share per chain through the variable."""
        problem = self.problem
        total = problem.seconds[variable]
        for number in problem.into[variable]:
            total = total + self.there[number][problem.edges[number].needs.at]
        for number in problem.out[variable]:
            total = total + self.back[number][problem.edges[number].made.at]
        self.slack[variable] = total - total.min()
        rows = self.slack[variable] <= limit
        if not rows.all():
            self._keep({variable: rows})
            total = total[rows]
        chains = max(len(problem.into[variable]), len(problem.out[variable]), 1)
        return total, total / chains

    def _limit(self, known: float) -> float:
        """Return the slack above which a row of the next pass cannot beat `known`, with rounding allowed for."""
        edges = len(self.problem.edges)
        return (known - self.last) * (1 + 2 * edges * ROUNDED) + 2 * edges * GRAIN

    def prune(self, limit: float) -> int:
        """
        Drop, in place, every row whose `slack` exceeds `limit`, in the unit of the costs. Slack is counted from the
        lower bound as it was before the last pass: any choice with such a row costs more than that bound plus `limit`.
        Return the number of rows left, of all variables together.
        """
        masks = {variable: slack <= limit for variable, slack in enumerate(self.slack)}
        self._keep({variable: rows for variable, rows in masks.items() if not rows.all()})
        self.problem.forget()
        return sum(len(s) for s in self.slack)

    def _keep(self, rows: Mapping[int, npt.NDArray[np.bool_]]) -> None:
        for number, old in self.problem.keep(rows).items():
            new = self.problem.edges[number]
            self.there[number] = _among(self.there[number], old.needs, new.needs)
            self.back[number] = _among(self.back[number], old.made, new.made)
        for variable, some in rows.items():
            self.slack[variable] = self.slack[variable][some]


def _among(message: Floats, of: Port, left: Port) -> Floats:
    """Return the message [layout] at those layouts of a port that another port has left."""
    if len(left.layouts) == len(of.layouts):
        return message
    return message[np.searchsorted(of.layouts, left.layouts)]
