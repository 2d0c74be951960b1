"""
Start the messages of a search from those of the search before of the same graph.

Searches of one graph follow each other at other prices of a byte, with other shares of weights' moves hidden, and with
more layouts tracked for shared moves. Any messages are a valid start (`search/exact/trw_s.py`), and those of a sum that
is little different are nearly where they end: most passes are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unity_ir.search.exact.factor_graph import FactorGraph
from unity_ir.search.exact.trw_s import Messages
from unity_ir.search.layouts.axes import Floats, Ints
from unity_ir.search.layouts.limits import limits


@dataclass(frozen=True, eq=False)
class Moved:
    """
    To which of some layouts the relay of a value, read by several users, has also brought it: each row of the relay is
    a pair of the layout in which users find the value, and one of these states.
    """

    tracked: tuple[int, ...] = ()
    """The layouts, as numbers in the value's `LayoutSpace`."""
    states: Ints = field(default_factory=lambda: np.zeros((1, 0), dtype=np.int64))
    """[state, tracked layout]: how the value is brought there; 0 if it is not."""

    def rows_before(self, rows: Ints, before: Moved) -> Ints:
        """
        Return, for some rows of a relay, that of the same layout and the same state in a search before, which may have
        tracked other layouts. Layouts that are not tracked now count as not brought there.
        """
        if self.tracked == before.tracked:
            return rows
        of = {layout: i for i, layout in enumerate(self.tracked)}
        state = np.zeros((len(self.states), len(before.tracked)), dtype=np.int64)
        for i, layout in enumerate(before.tracked):
            if layout in of:
                state[:, i] = self.states[:, of[layout]]
        numbers = {tuple(each): i for i, each in enumerate(before.states.tolist())}
        which = np.array([numbers.get(tuple(each), 0) for each in state.tolist()])
        return rows // len(self.states) * len(before.states) + which[rows % len(self.states)]


PLAIN = Moved()
"""No layout is tracked."""


@dataclass(frozen=True, eq=False)
class Known:
    """Messages of one search: for each edge, the layouts and the message at either end."""

    ends: tuple[tuple[int, int], ...]
    """The source and target of each edge, which tell whether another factor graph has the same edges."""
    moved: Sequence[Moved]
    """Per variable, what the relay's rows are; `PLAIN` for other variables."""
    made: list[Ints]
    needs: list[Ints]
    there: list[Floats]
    back: list[Floats]

    @property
    def size(self) -> int:
        """The number of all messages' entries."""
        return sum(map(len, self.there)) + sum(map(len, self.back))

    def start(self, problem: FactorGraph, moved: Sequence[Moved]) -> tuple[list[Floats], list[Floats]] | None:
        """
        Return messages (there, back) to start from in another factor graph of the same graph; None if its edges are
        others. `moved` is as in this object. Layouts without a message get the greatest: they were the dearest.
        """
        if self.ends != tuple((edge.source, edge.target) for edge in problem.edges):
            return None
        there: list[Floats] = []
        back: list[Floats] = []
        for number, edge in enumerate(problem.edges):
            made = moved[edge.source].rows_before(edge.made.layouts, self.moved[edge.source])
            there.append(_at(edge.needs.layouts, self.needs[number], self.there[number]))
            back.append(_at(made, self.made[number], self.back[number]))
        return there, back


def _at(wanted: Ints, layouts: Ints, message: Floats) -> Floats:
    """Return the message at some layouts, given it at the sorted `layouts`; the greatest where it is not known."""
    at = np.minimum(np.searchsorted(layouts, wanted), len(layouts) - 1)
    return np.where(layouts[at] == wanted, message[at], message.max())


@dataclass
class KnownMessages:
    """The messages of the last searches, by graph and unit of cost."""

    large: set[tuple[object, ...]] = field(default_factory=set[tuple[object, ...]])
    """Graphs, by the same keys, of which elimination of all rows was found to look at too many entries."""
    _known: dict[tuple[object, ...], Known] = field(default_factory=dict[tuple[object, ...], Known])

    def of(self, key: tuple[object, ...]) -> Known | None:
        """Return the messages kept last under `key`, if any."""
        return self._known.get(key)

    def keep(self, key: tuple[object, ...], messages: Known) -> None:
        """Keep the messages of a search under `key`; the oldest of others are dropped (`limits().known_messages`)."""
        self._known.pop(key, None)
        self._known[key] = messages
        while len(self._known) > 1 and sum(of.size for of in self._known.values()) > limits().known_messages:
            del self._known[next(iter(self._known))]


@dataclass(frozen=True)
class Start:
    """Where the messages of one search start, and where they are kept."""

    known: KnownMessages
    key: tuple[object, ...]
    """
    What the searches have in common that start from one another's messages: the kind of factor graph, the graph, and
    the unit of cost.
    """
    moved: Sequence[Moved]
    """Per variable of the factor graph, what the relay's rows are; `PLAIN` for operators."""
    of_shorter: Callable[[FactorGraph], Known | None] | None = None
    """Returns messages from those of a graph with fewer equal layers, which are preferred; None where there is none."""
    others: Sequence[tuple[object, ...]] = ()
    """Keys under which to look where no messages are kept under `key`."""
    kept: bool = True
    """Whether messages are kept for the next search."""

    def messages(self, problem: FactorGraph) -> Messages:
        """
        Return the messages for a factor graph. They start from those of a shorter graph (`search/exact/shorter.py`);
        without such, from those kept last; without these, from zero.
        """
        before = None if self.of_shorter is None else self.of_shorter(problem)
        for key in (self.key, *self.others):
            before = before or self.known.of(key)
        return Messages(problem, None if before is None else before.start(problem, self.moved))

    def now(self, messages: Messages) -> Known:
        """Return the messages as they are now. They are replaced in passes, never changed, so nothing is copied."""
        edges = messages.problem.edges
        return Known(
            tuple((edge.source, edge.target) for edge in edges),
            self.moved,
            [edge.made.layouts for edge in edges],
            [edge.needs.layouts for edge in edges],
            [*messages.there],
            [*messages.back],
        )

    def keep(self, messages: Known) -> None:
        """Keep messages for the next search of the graph, if any of this one are."""
        if self.kept:
            self.known.keep(self.key, messages)
