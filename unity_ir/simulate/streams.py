"""
Define the streams that tasks are scheduled on, and the streams that a move occupies.

Programs are SPMD: devices that no operator distinguishes do the same at the same time, so one *class* of them is
simulated and stands for all, exactly. Devices differ along the mesh axes that some operator or value is pinned on.

Every class has a compute stream, and a port to each level of links. A move occupies the ports of all levels it crosses.
A program that copies between devices and their hosts has a stream for each way, as a GPU has copy engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from unity_ir.errors import UnityError
from unity_ir.machine.device import COPIES
from unity_ir.machine.model import Machine
from unity_ir.pcg.collectives import BETWEEN_DEVICES, FREE
from unity_ir.pcg.reshard import Move
from unity_ir.pcg.sharding import REPEAT, GridRole, Layout, Pins, is_pinned, pinned_at, pins_of

TICKS = 10**12
"""Ticks per second. Times are whole picoseconds, so that sums are exact."""

Classes = tuple[int, ...]

Step = tuple[str, int, tuple[int, ...], tuple[Classes, ...]]
"""A move: its kind, its ticks, the levels it crosses, and the device classes of each group that exchanges data."""


LONGEST = 10_000.0
"""Maximum seconds of a task, so that sums of hundreds of tasks fit 64 bits of ticks."""


def ticks(seconds: float) -> int:
    """
    Convert seconds to ticks (picoseconds): given 1e-9, returns 1000. Raises `UnityError` for more than `LONGEST`
    seconds.
    """
    if not seconds <= LONGEST:
        raise UnityError(
            f"simulate: a task takes {seconds:.3g} s; check the machine's figures: {LONGEST:.0f} are the most"
        )
    return round(seconds * TICKS)


@dataclass(frozen=True, eq=False)
class Streams:
    """
    The streams of a machine's devices, as numbers. Each device class has a compute stream, and a port (a stream) to the
    links of each machine level. `axes` are the mesh axes along which devices may differ: those with the same
    coordinates along them do the same at the same time, and are one class. With no `axes`, there is one class. With
    `to_hosts`, each class also has a stream of copies from the host, and one of copies to it.
    """

    machine: Machine
    axes: tuple[int, ...] = ()
    to_hosts: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of devices along each mesh axis in `axes`."""
        return tuple(self.machine.mesh.sizes[a] for a in self.axes)

    @cached_property
    def classes(self) -> int:
        """The number of device classes: one for each combination of coordinates along `axes`."""
        return prod(self.sizes)

    @cached_property
    def width(self) -> int:
        """The number of streams of each class: one for compute, a port per level, then those of copies to the host."""
        return 1 + len(self.machine.levels) + (len(COPIES) if self.to_hosts else 0)

    @cached_property
    def count(self) -> int:
        """The number of streams of all classes together."""
        return self.classes * self.width

    def compute(self, of: int) -> int:
        """Return the number of the compute stream of device class number `of`."""
        return of * self.width

    def port(self, of: int, level: int) -> int:
        """
        Return the number of the stream that is the port of device class number `of` to the links of machine level
        number `level`.
        """
        return of * self.width + 1 + level

    def copies(self, of: int, kind: str) -> int:
        """
        Return the number of the stream of device class number `of` for copies of a `kind`: `from_host` or `to_host`.
        """
        return of * self.width + 1 + len(self.machine.levels) + COPIES.index(kind)

    def name(self, stream: int) -> str:
        """
        Return the name of the stream with this number: `compute`, the name of its port's machine level, or the kind of
        its copies.
        """
        names = ("compute", *(level.name for level in self.machine.levels), *COPIES)
        return names[stream % self.width]

    def class_of(self, device: int) -> int:
        """
        Return the number of the device class that a device, given by number, belongs to: that of its coordinates along
        `axes`, in row-major order.
        """
        at = self.machine.mesh.coordinates(device)
        found = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            found = found * size + at[axis]
        return found

    @cached_property
    def _coordinates(self) -> tuple[tuple[int, ...], ...]:
        return tuple(product(*(range(size) for size in self.sizes)))

    def where(self, roles: Sequence[GridRole]) -> Classes:
        """
        Return the numbers of the device classes that take part in an operator, or hold a value, given the role of each
        mesh axis. These are the classes at the coordinates that `roles` pins axes to, or all if it pins none. Axes
        pinned in `roles` must be among `axes`.
        """
        pins = pins_of(roles)
        found = self._where.get(pins)
        if found is None:
            fixed = [(self.axes.index(axis), pin) for axis, pin in pins]
            found = tuple(k for k, at in enumerate(self._coordinates) if all(at[i] == pin for i, pin in fixed))
            self._where[pins] = found
        return found

    @cached_property
    def _where(self) -> dict[Pins, Classes]:
        return {}

    def step(self, move: Move, before: Layout, dtype: str) -> Step:
        """
        Return a move as the simulation needs it: (its collective's name, its picoseconds (ticks), the numbers of the
        machine levels that it crosses, the device classes of each group that exchanges data). A move on the devices
        themselves has levels () and groups of one class.

        `before` is the layout that the value, of element type `dtype`, has before the move.
        """
        pinned, end = pins_of(before), move.target if is_pinned(move.target) else None
        key = (move.kind, move.axes, move.elements, move.elements_after, move.border, end, pinned, dtype)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._stepped(move, pinned, dtype)
        return found

    @cached_property
    def _steps(self) -> dict[object, Step]:
        return {}

    def _stepped(self, move: Move, pinned: tuple[tuple[int, int], ...], dtype: str) -> Step:
        before = [REPEAT] * len(self.machine.mesh.sizes)
        for axis, coordinate in pinned:
            before[axis] = pinned_at(coordinate)
        taking = sorted({*self.where(before), *self.where(move.after(tuple(before), self.machine.mesh))})
        levels: tuple[int, ...] = ()
        groups = [(k,) for k in taking]
        if move.kind in BETWEEN_DEVICES:
            levels = tuple(sorted({self.machine.axis_levels[a] for a in move.axes}))
            found: dict[tuple[int, ...], list[int]] = {}
            for k in taking:
                apart = tuple(c for a, c in zip(self.axes, self._coordinates[k], strict=True) if a not in move.axes)
                found.setdefault(apart, []).append(k)
            groups = [tuple(group) for group in found.values()]
        return move.kind, ticks(self.machine.move_time(move, dtype)), levels, tuple(groups)

    def steps(self, moves: Iterable[Move], source: Layout, dtype: str) -> tuple[Step, ...]:
        """
        Return the moves of a reshard as the simulation needs them, in order, each as `step` returns it. Moves that only
        rename roles (COPY to REPEAT, say) are left out.

        `source` is the layout that the value, of element type `dtype`, has before the first move.
        """
        out: list[Step] = []
        at = source
        for move in moves:
            if move.kind not in FREE:
                out.append(self.step(move, at, dtype))
            at = move.after(at, self.machine.mesh)
        return tuple(out)


def pinned_axes(layouts: Iterable[Sequence[GridRole]]) -> tuple[int, ...]:
    """
    Return the mesh axes that some of `layouts` pin (hold the value at one coordinate only), in order: along these,
    devices have different things to do. Operators' assignments may be given, too.
    """
    return tuple(sorted({axis for roles in layouts for axis, _ in pins_of(roles)}))
