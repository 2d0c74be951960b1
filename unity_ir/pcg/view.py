"""
Machine views (Unity, section 3.2): on which devices the tasks of an operator run.

A view gives every axis of a task grid (index variables with degree above 1 in TDL order, then `copy`, then `sum`) a
list of `factor @ stride`: the axis' coordinate, in mixed radix with the first factor outermost, moves that many
devices. Unlike Unity's, an axis may so span nodes and GPUs. `repeat` lists the devices that do the same task again:
they hold the same pieces and the same gradients (Megatron's replicated operators; JAX's unvarying values).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

ViewAxis = tuple[tuple[int, int], ...]
"""`((factor, stride), ...)`, outermost first."""


@dataclass(frozen=True, slots=True)
class View:
    """
    A machine view: the devices that an operator's tasks run on, `#machine.view<start, [factor @ stride, ...], ...,
    repeat [...]>`. Each axis of the task grid has factors, which step `stride` devices at a time; devices along
    `repeat` do the same tasks again.
    """

    start: int
    """The number of the first device."""
    axes: tuple[ViewAxis, ...]
    """For each axis of the task grid, its factors, the outermost first."""
    repeat: ViewAxis = ()
    """Factors along which devices do the same tasks again."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """The size of each axis of the task grid: the product of its factors."""
        return tuple(prod(f for f, _ in axis) for axis in self.axes)

    def devices(self) -> list[int]:
        """
        Return the numbers of the devices that run tasks, in row-major order of the task grid. The devices of `repeat`,
        which do the same task, follow each other.
        """
        return [self.start + offset for offset in _offsets((*self.axes, self.repeat))]

    @property
    def last(self) -> int:
        """The highest device number in the view."""
        return self.start + sum((f - 1) * max(s, 0) for f, s in self._factors)

    @property
    def is_injective(self) -> bool:
        """Whether every task runs on a device of its own. Devices are listed only if strides overlap."""
        reach = 0
        for factor, stride in sorted(self._factors, key=lambda pair: pair[1]):
            if stride <= reach:
                break
            reach += (factor - 1) * stride
        else:
            return True
        if prod(f for f, _ in self._factors) > sum((f - 1) * abs(s) for f, s in self._factors) + 1:
            return False
        devices = self.devices()
        return len(set(devices)) == len(devices)

    @property
    def _factors(self) -> list[tuple[int, int]]:
        """The (factor, stride) pairs of all axes whose factor is above 1."""
        return [(f, s) for axis in (*self.axes, self.repeat) for f, s in axis if f > 1]

    def __str__(self) -> str:
        lists = [_axis_text(a) for a in self.axes]
        if self.repeat:
            lists.append(f"repeat {_axis_text(self.repeat)}")
        return f"#machine.view<{', '.join([str(self.start), *lists])}>"


def _axis_text(axis: ViewAxis) -> str:
    return f"[{', '.join(f'{f} @ {s}' for f, s in axis)}]"


@lru_cache(maxsize=4096)
def _offsets(axes: tuple[ViewAxis, ...]) -> tuple[int, ...]:
    flat = [pair for axis in axes for pair in axis]
    return tuple(
        sum(c * s for c, (_, s) in zip(coordinates, flat, strict=True))
        for coordinates in product(*(range(f) for f, _ in flat))
    )
