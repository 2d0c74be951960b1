"""
Local search on simulated peak memory.

For limits at which the choices that hold least at the end of the forward have their peak elsewhere. The peak is no sum
over operators, so no elimination finds its minimum. From several choices, single rows are changed while the peak falls
or, at equal peak, the bytes held at the end of the forward; then again from the smallest result, with a few rows
changed at random (kicks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from unity_ir.budget import spend
from unity_ir.search.layouts.limits import limits
from unity_ir.search.memory.seconds_and_bytes import Choice, CostModel


@dataclass
class _Descent:
    model: CostModel
    need: Callable[[Choice], int]
    limit: float
    proposals: int
    known: dict[Choice, tuple[float, float]] = field(default_factory=dict[Choice, tuple[float, float]])

    def size(self, choice: Choice) -> tuple[float, float]:
        """
        Return the simulated peak, and the bytes held at the end of the forward; if those exceed the limit, the peak is
        infinite.
        """
        if choice not in self.known:
            spend(limits().work_peak * len(choice))
            held = self.model.costs(choice)[1]
            self.proposals -= held <= self.limit
            self.known[choice] = (self.need(choice) if held <= self.limit else np.inf), held
        return self.known[choice]

    def down(self, choice: Choice) -> Choice:
        """Return a local minimum below `choice`, or the first choice that fits."""
        size, changed = self.size(choice), True
        while changed:
            changed = False
            for v in range(len(choice)):
                for row in self.model.smallest_rows(v, choice):
                    if size[0] <= self.limit or self.proposals <= 0:
                        return choice
                    other = (*choice[:v], row, *choice[v + 1 :])
                    found = self.size(other)
                    if found < size:
                        choice, size, changed = other, found, True
                    if found[1] > self.limit:
                        break  # Those after it hold more.
        return choice


def descend_to_limit(
    model: CostModel, starts: Iterable[Choice], operators: int, need: Callable[[Choice], int], limit: float
) -> Choice | None:
    """
    Return a choice (a row for each variable of `model`) whose simulated peak is at most `limit` bytes, found by local
    search. Return None if none is found; if `operators`, the number of operators of the graph, exceeds
    `limits().peak_operators`, without a search.

    `starts` are the choices to lower the peak from; `need(choice)` returns the simulated peak bytes of a choice.
    """
    if operators > limits().peak_operators:
        return None
    # Peaks of few operators are simulated sooner.
    times = min(limits().peak_operators // max(operators, 1), limits().more_proposals)
    walk = _Descent(model, need, limit, times * limits().peak_proposals)
    ends: list[Choice] = []
    for start in dict.fromkeys(starts):
        for choice in (start, model.without_recompute(start)):
            if walk.proposals > 0:
                ends.append(walk.down(choice))
    random = Random(0)
    best = min(ends, key=walk.size, default=None)
    for _ in range(times * limits().kicks):
        if best is None or walk.size(best)[0] <= limit or walk.proposals <= 0:
            break
        best = min(best, walk.down(_kicked(model, best, random)), key=walk.size)
    return best if best is not None and walk.size(best)[0] <= limit else None


def _kicked(model: CostModel, choice: Choice, random: Random) -> Choice:
    """Return the choice with random rows for a few random variables."""
    rows = list(choice)
    for v in random.sample(range(len(rows)), min(limits().kick_rows, len(rows))):
        rows[v] = random.choice(np.flatnonzero(np.isfinite(model.bytes[v])).tolist())
    return tuple(rows)
