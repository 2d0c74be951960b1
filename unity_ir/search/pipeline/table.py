"""
Tabulate what ranges of layers take as stages: seconds and bytes for each range, size of the part of the machine,
layouts at both ends, and option (such as more or less recompute).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unity_ir.errors import UnityError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a range of layers as a stage on a part of the machine."""

    forward: float
    """Seconds of one micro-batch."""
    backward: float
    """Seconds of one micro-batch, whole."""
    once: float = 0.0
    """Seconds once per step after the last backward (gradient sums, update)."""
    held: float = 0.0
    """Bytes on the fullest device of the part, whatever is live."""
    live: float = 0.0
    """Bytes there for each live micro-batch."""
    layout_in: int = 0
    """Layout of the range's input, a number that the caller gives out."""
    layout_out: int = 0
    """Layout of the range's result, a number that the caller gives out."""
    input_gradient: float | None = None
    """Seconds of the half of the backward that other stages wait for; None if it cannot be split."""

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch, forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageTable:
    """
    The options of all stages. Arrays are [option, first layer, layer behind the last, part, layout in, layout out]:
    seconds of a micro-batch and of its forward (inf where there is no option), seconds once, bytes held, and held per
    live micro-batch. `parts` are the sizes of parts in devices, ascending; `layouts` is how many there are; `options`
    is as given to `tabulate`.
    """

    layers: int
    parts: tuple[int, ...]
    layouts: int
    seconds: Floats
    forward: Floats
    once: Floats
    held: Floats
    live: Floats
    options: Callable[[int, int, int], Sequence[StageOption]]


def tabulate(
    layers: int,
    parts: Iterable[int],
    options: Callable[[int, int, int], Sequence[StageOption]],
    layouts: int = 1,
) -> StageTable:
    """
    Return the table of all stages that there may be. `options(first, last, devices)` is called once for each range of
    layers `first` .. `last` - 1 and size of a part; it returns the ways to run the range there, none if it cannot be a
    stage.

    `parts` are the sizes, in devices, that parts may have. `layouts` is how many layouts the input and the result of a
    range may have; options name theirs by numbers from 0 to `layouts` - 1. Raises `UnityError` for no layers, for sizes
    below 1, for options whose seconds or bytes are not numbers of at least 0, and for layouts with other numbers.
    """
    sizes = tuple(sorted(set(parts)))
    if layers < 1 or not sizes or sizes[0] < 1:
        raise UnityError(f"pipeline: {layers} layers on parts of {list(sizes)} devices; give at least 1 of each")
    places: list[tuple[int, ...]] = []
    numbers: list[tuple[float, ...]] = []
    for i, j, p in _ranges(layers, len(sizes)):
        alike: Counter[tuple[int, int]] = Counter()
        for o in options(i, j, sizes[p]):
            ends = (o.layout_in, o.layout_out)
            places.append((alike[ends], i, j, p, *ends))
            numbers.append((o.seconds, o.forward, o.once, o.held, o.live))
            alike[ends] += 1
    at = np.array(places, dtype=np.intp).reshape(-1, 6).T
    columns = np.array(numbers, dtype=np.float64).reshape(-1, 5).T
    if not (np.isfinite(columns) & (columns >= 0)).all():
        raise UnityError("pipeline: seconds and bytes of stages must be numbers of at least 0")
    if not ((at[4:] >= 0) & (at[4:] < layouts)).all():
        raise UnityError(f"pipeline: layouts of stages are numbered from 0 to {layouts - 1}; one has another number")
    shape = (int(at[0].max(initial=0)) + 1, layers, layers + 1, len(sizes), layouts, layouts)

    def spread(column: Floats, missing: float) -> Floats:
        array = np.full(shape, missing, dtype=np.float64)
        array[tuple(at)] = column
        return array

    seconds, forward, once, held, live = columns
    return StageTable(
        layers,
        sizes,
        layouts,
        spread(seconds, np.inf),
        spread(forward, np.inf),
        spread(once, 0),
        spread(held, 0),
        spread(live, 0),
        options,
    )


def _ranges(layers: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first layer, layer behind the last, number of a part) of all stages there may be."""
    return ((i, j, p) for i in range(layers) for j in range(i + 1, layers + 1) for p in range(parts))
