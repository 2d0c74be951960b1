"""
Order the update of weights whose optimizer state rests in the memory of the host (Ren et al., 2021, ZeRO-Offload; here
the device updates, as its memory is ten times as fast as the host's). Weights of which devices hold casts rest there,
too, and are part of the state.

State is copied in windows of about `WINDOW_BYTES`, each of which is a few weights or a part of one, through `SLOTS`
buffers on the device:

    from_host 0, from_host 1, update 0, to_host 0, from_host 2, update 1, to_host 1, from_host 3, ..

so that a window is on its way from the host while the one before it is updated and the one before that goes back. A
copy from the host waits until the window that had its buffer before is back; an update waits for its own copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unity_ir.pcg.types import ELEMENT_BYTES
from unity_ir.plan.instructions import Register, UpdateWeight
from unity_ir.plan.program import Program

WINDOW_BYTES = 256 * 2**20
"""
Bytes of state in a window. At 50 GB/s a copy of them takes 5 ms, in which the host launches a hundred kernels; the
device holds `SLOTS` times as many while it updates.
"""

SLOTS = 3
"""Windows on the device at once: one that arrives, one that is updated, and one that goes back."""

AHEAD = SLOTS - 1
"""Windows that are on their way from the host, or there, before the first of them is updated."""

GRAIN = 64
"""The number of elements at whose multiples a weight is divided, so that kernels load whole vectors."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """The elements from `begin` to `end` of a rank's piece of a weight, flattened, of which a window has the state."""

    weight: Register
    begin: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of the state of a window: `kind` is `from_host` or `to_host`."""

    kind: str
    number: int
    parts: tuple[StatePart, ...]


@dataclass(frozen=True, slots=True)
class WindowUpdate:
    """The update of the parts of weights whose state a window has."""

    number: int
    parts: tuple[StatePart, ...]


UpdateAction = UpdateWeight | StateCopy | WindowUpdate
"""A line of the update: updates a whole weight or, with state at the host, copies or updates a window."""


def update_lines(program: Program, window: int) -> tuple[UpdateAction, ...]:
    """
    Return the lines of a program's update, in order; of state at the host in windows of at most `window` bytes, in the
    order of the weights' names.
    """
    updates = {i.weight: i for i in program.body if isinstance(i, UpdateWeight)}
    if not program.state_at_host:
        return tuple(updates.values())
    names = {leaf.result: leaf.name for leaf in program.leaves("weight")}
    order = sorted(updates, key=lambda weight: names[weight])
    sizes = {weight: program.bytes[weight] // ELEMENT_BYTES[program.tensors[weight].dtype] for weight in order}
    each = {weight: state_bytes(program, StatePart(weight, 0, 1)) for weight in order}
    lines: list[UpdateAction] = []
    found = windows(order, sizes, each, window)
    for number in range(len(found) + AHEAD):
        if number < len(found):
            lines.append(StateCopy("from_host", number, found[number]))
        if (behind := number - AHEAD) >= 0:
            lines += [WindowUpdate(behind, found[behind]), StateCopy("to_host", behind, found[behind])]
    return tuple(lines)


def windows(
    order: Iterable[Register], sizes: Mapping[Register, int], each: Mapping[Register, int], most: int
) -> tuple[tuple[StatePart, ...], ...]:
    """
    Divide the state of weights into windows of at most `most` bytes, or of `GRAIN` elements if these have more. `sizes`
    has each weight's number of elements, and `each` the bytes of state per element. `host.windows` in
    `lowering.runtime` is the same for emitted programs.
    """
    found: list[tuple[StatePart, ...]] = []
    parts: list[StatePart] = []
    left = most
    for weight in order:
        begin = 0
        while begin < sizes[weight]:
            room = max(left // each[weight], 0 if parts else GRAIN)
            end = min(sizes[weight], begin + (room if sizes[weight] - begin <= room else room // GRAIN * GRAIN))
            if end == begin:
                found.append(tuple(parts))
                parts, left = [], most
                continue
            parts.append(StatePart(weight, begin, end))
            left -= (end - begin) * each[weight]
            begin = end
    return (*found, tuple(parts)) if parts else tuple(found)


def state_bytes(program: Program, part: StatePart) -> int:
    """Return the bytes of the optimizer's state of a part of a weight, and of that itself if it rests at the host."""
    assert program.optimizer is not None
    tensors = program.optimizer.states + (part.weight in program.at_host)
    return tensors * part.size * ELEMENT_BYTES[program.tensors[part.weight].dtype]
