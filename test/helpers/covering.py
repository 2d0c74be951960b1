"""Fewer cases than all, in which everything that may be wrong of a few choices together still occurs."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def covering(cases: Sequence[Case], together: Iterable[tuple[int, ...]] = ()) -> list[Case]:
    """
    Some of `cases`, all of as many choices, in their order: each pair of choices, by their places, that any case has,
    one of these has, too, and the same is true of the choices at the places `together`.

    Each time that case is taken which has the most of what is still missing, of several the first: always the same.
    """
    places = [*combinations(range(len(cases[0])), 2), *together]
    left = {(at, tuple(case[i] for i in at)) for case in cases for at in places}

    def missing(case: Case) -> int:
        return sum((at, tuple(case[i] for i in at)) in left for at in places)

    # How much a case adds only falls: what it added before tells which are worth counting again.
    queue = [(-len(places), number) for number in range(len(cases))]
    taken: list[int] = []
    while left:
        _, number = heapq.heappop(queue)
        added = missing(cases[number])
        if queue and (-added, number) > queue[0]:
            heapq.heappush(queue, (-added, number))
            continue
        left -= {(at, tuple(cases[number][i] for i in at)) for at in places}
        taken.append(number)
    return [cases[number] for number in sorted(taken)]
