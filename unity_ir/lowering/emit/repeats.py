"""Find repeated parts of a list, such as the layers of a model, so that they are written once, as a loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

LEAST = 3
"""Fewest parts of a repeat; fewer are not worth a loop."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of repeated items in a list: `count` repetitions of `period` items each, from index `start` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The index after the last item of the last repetition."""
        return self.start + self.period * self.count


def repeats(keys: Sequence[Hashable], alike: Callable[[Repeat], int] = lambda run: run.count) -> Iterator[Repeat]:
    """
    Yield the parts of a list that repeat equal keys at least three times, in order, without overlap: at each index the
    one that saves the most items.

    Given `a b c b c b c d`, yields `Repeat(1, 2, 3)`: from index 1, 2 items, 3 times. `alike` is called with each
    repeat, and returns how many of its repetitions, from the first on, the caller can write as one loop (all by
    default). Only these are in the repeat that is yielded.
    """
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    start = 0
    while start < len(keys):
        found: list[Repeat] = []
        for other in places[keys[start]]:
            period = other - start
            if period > 0 and start + LEAST * period <= len(keys):
                run = Repeat(start, period, _repeated(keys, start, period))
                if run.count >= LEAST:
                    run = Repeat(start, period, min(run.count, alike(run)))
                if run.count >= LEAST:
                    found.append(run)
        if not found:
            start += 1
            continue
        best = max(found, key=lambda run: (run.period * (run.count - 1), -run.period))
        yield best
        start = best.end


def _repeated(keys: Sequence[Hashable], start: int, period: int) -> int:
    """Return how often the `period` items from `start` on occur one after the other."""
    same = 0
    while start + same + period < len(keys) and keys[start + same] == keys[start + same + period]:
        same += 1
    return 1 + same // period


_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """Return a name with every number in it replaced by 0, so that weights of repeated layers get equal names."""
    return _NUMBER.sub("0", name)


def numbered(names: Sequence[str], variable: str) -> str | None:
    """
    Return a Python expression, in terms of `variable`, the number of a repetition, for names of which each repetition
    has one.

    Given `h.3.w`, `h.4.w`, `h.5.w` and `i`, returns `f'h.{i + 3}.w'`; given every second one, `f'h.{2 * i + 3}.w'`;
    given equal names, a literal. Returns None if the names differ by more than arithmetic progressions of their
    numbers.
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
