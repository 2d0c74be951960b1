"""Divide items, in order, into contiguous runs whose longest is the least."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np


def balanced(seconds: Sequence[float], count: int, sends: Sequence[float] = ()) -> list[int]:
    """
    Divide items, in order, into `count` contiguous, non-empty runs so that the longest run is as short as possible
    (exact, by dynamic programming). Return where each run ends, as the index behind its last item: given [1, 1, 2] and
    2, returns [2, 3].

    `seconds` [item] is what each item takes. `sends` [item], by default 0, is what sending an item's result takes: it
    is added to the run that ends with that item, except for the last run, which sends nothing. There must be at least
    `count` items.
    """
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    n = len(seconds)
    best = np.full((count + 1, n + 1), np.inf)
    last = np.zeros((count + 1, n + 1), dtype=int)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for end in range(k, n - (count - k) + 1):
            behind = sends[end - 1] if sends and k < count else 0.0
            longest = np.maximum(best[k - 1, :end], total[end] - total[:end] + behind)
            last[k, end] = int(longest.argmin())
            best[k, end] = longest[last[k, end]]
    ends = [n]
    for k in range(count, 1, -1):
        ends.append(int(last[k, ends[-1]]))
    return ends[::-1]


def least_longest(seconds: Sequence[float], count: int) -> float:
    """
    Divide items, in order, into at most `count` contiguous runs so that the longest run is as short as possible, and
    return the seconds of that longest run: given [1, 1, 2] and 2, returns 2. `seconds` [item] is what each item takes.
    The result may be too large by a relative error of 1e-6.
    """
    total = [0.0, *accumulate(seconds)]
    low, high = max(max(seconds), total[-1] / count), total[-1]
    while high - low > 1e-6 * high:
        cap, end = (low + high) / 2, 0
        for _ in range(count):
            end = bisect_right(total, total[end] + cap) - 1
            if end == len(seconds):
                break
        low, high = (low, cap) if end == len(seconds) else (cap, high)
    return high
