"""
Find which values of a layer to save for the backward, and which to recompute there, at a price per byte.

    min  sum over saved values of price * bytes  +  sum over recomputed operators of seconds

where what the backward reads is saved or recomputed, and so is what a recomputed operator reads. With x = 1 for an
operator whose results the backward has, saved or not, and y = 1 for one that is recomputed, that is linear,

    sum of price * bytes * x + (seconds - price * bytes) * y    with  y <= x  and  y <= x of each operand,

so a minimum cut finds it (project selection: Picard, 1976). Checkmate (Jain et al., 2020) chooses among all schedules
by integer programming; here each operator is computed twice at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite


@dataclass(frozen=True, slots=True)
class SavedValues:
    """
    The operators of a layer, in graph order, among which to choose what is saved: `seconds` to recompute each
    (infinite: never), `bytes` of its results, whether the backward reads these (`read`), and the operators of the layer
    that each reads, by index (`operands`). Values from outside of the layer are kept.
    """

    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    read: tuple[bool, ...]
    operands: tuple[tuple[int, ...], ...]

    def saved(self, again: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """
        Return (operators whose results are saved, operators that are recomputed), by index. An operator is in either
        only if its results are needed: the backward reads them, or an operator that is recomputed does. Those needed
        are recomputed if they are in `again`, else saved.
        """
        has = [*self.read]
        for i in reversed(range(len(has))):
            if has[i] and i in again:
                for j in self.operands[i]:
                    has[j] = True
        there = {i for i, is_there in enumerate(has) if is_there}
        return frozenset(there - again), frozenset(there & again)


@lru_cache(maxsize=4096)
def recomputed_at_price(layer: SavedValues, price: float) -> frozenset[int]:
    """
    Return the operators to recompute (indices in `layer`) at `price`, in seconds per byte that is saved: those of the
    minimum of seconds recomputed plus price * bytes saved. Memoised.
    """
    count = len(layer.read)
    source, sink = 2 * count, 2 * count + 1
    left: list[dict[int, float]] = [{} for _ in range(2 * count + 2)]
    for i in range(count):
        gain = price * layer.bytes[i] - layer.seconds[i]
        if isfinite(gain) and gain > 0:
            left[source][i] = gain
            for j in (i, *layer.operands[i]):
                left[i][count + j] = inf
        if not layer.read[i]:
            left[count + i][sink] = price * layer.bytes[i]
    while path := _path(left, source, sink):
        flow = min(left[a][b] for a, b in path)
        for a, b in path:
            left[a][b] -= flow
            left[b][a] = left[b].get(a, 0.0) + flow
    return layer.saved(frozenset(i for i in _reached(left, source) if i < count))[1]


def _reached(left: list[dict[int, float]], source: int) -> dict[int, int]:
    """Return the vertices that capacity is left to, each with the one before it."""
    before, queue = {source: source}, [source]
    for at in queue:
        for to, capacity in left[at].items():
            if capacity > 0 and to not in before:
                before[to] = at
                queue.append(to)
    return before


def _path(left: list[dict[int, float]], source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of a shortest path from source to sink with capacity left (Edmonds and Karp); [] without one."""
    before = _reached(left, source)
    path: list[tuple[int, int]] = []
    at = sink
    while at in before and at != source:
        path.append((before[at], at))
        at = before[at]
    return path
