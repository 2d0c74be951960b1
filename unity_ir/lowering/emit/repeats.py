"""Runs of alike parts in a list, so that what repeats, as the layers of a model, is written once."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

LEAST = 3
"""Parts of which a run is worth a loop."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` parts of `period` items each, from item `start` on; part i differs from the first in names only."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def runs(keys: Sequence[Hashable], alike: Callable[[Run], int] = lambda run: run.count) -> Iterator[Run]:
    """
    Runs of equal keys, in order, that do not overlap: for each place the one that leaves the fewest items.

    Given `a b c b c b c d`, yields `Run(1, 2, 3)`. `alike` says of how many parts of a run more than the keys is
    alike.
    """
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    start = 0
    while start < len(keys):
        found: list[Run] = []
        for other in places[keys[start]]:
            period = other - start
            if period > 0 and start + LEAST * period <= len(keys):
                run = Run(start, period, _repeated(keys, start, period))
                if run.count >= LEAST:
                    run = Run(start, period, min(run.count, alike(run)))
                if run.count >= LEAST:
                    found.append(run)
        if not found:
            start += 1
            continue
        best = max(found, key=lambda run: (run.period * (run.count - 1), -run.period))
        yield best
        start = best.end


def _repeated(keys: Sequence[Hashable], start: int, period: int) -> int:
    """How often what is in `period` items from `start` on is there, one after the other."""
    same = 0
    while start + same + period < len(keys) and keys[start + same] == keys[start + same + period]:
        same += 1
    return 1 + same // period


_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """A name without its numbers: equal for the names of alike things in alike layers."""
    return _NUMBER.sub("0", name)


def numbered(names: Sequence[str], variable: str) -> str | None:
    """
    The names, one for each part of a run, as a Python expression of the part's number `variable`; None if they differ
    otherwise than by a number that counts, or by none.

    Given `h.3.w`, `h.4.w`, `h.5.w` and `i`, returns `f'h.{i + 3}.w'`, of every second `f'h.{2 * i + 3}.w'`; given one
    name alone, its literal.
    """
    if len(set(names)) == 1:
        return repr(names[0])
    parts = [_NUMBER.split(name) for name in names]
    numbers = [_NUMBER.findall(name) for name in names]
    if any(p != parts[0] for p in parts) or any("{" in p or "}" in p for p in parts[0]):
        return None
    out = parts[0][0]
    for column, rest in zip(zip(*numbers, strict=True), parts[0][1:], strict=True):
        first, step = int(column[0]), int(column[1]) - int(column[0])
        if len(set(column)) == 1:
            out += column[0]
        elif step > 0 and column == tuple(str(first + step * i) for i in range(len(names))):
            times = variable if step == 1 else f"{step} * {variable}"
            out += "{%s}" % (f"{times} + {first}" if first else times)
        else:
            return None
        out += rest
    return f"f{out!r}"
