"""
A reshard's moves as tasks on streams.

A task is issued when the compute streams of its devices have come to it in program order, as NCCL's stream waits for
the current stream; it starts when also what it reads has arrived and its ports are free.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.simulate.streams import Step, Streams

Key = int
"""That something has arrived at a class: the number of a reshard (there, or back) times the classes, plus the class."""

Task = tuple[int, tuple[int, ...], tuple[int, ...], tuple[Key, ...], tuple[Key, ...]]
"""Ticks, the streams it comes after, those of them it holds, the arrivals it waits for, those it brings about."""


def arrivals(numbers: Sequence[int], streams: Streams, of: int) -> tuple[Key, ...]:
    """The arrivals of numbered reshards at one class."""
    return tuple(n * streams.classes + of for n in numbers)


def chain(
    streams: Streams,
    steps: Sequence[Step],
    number: int,
    sources: Sequence[int],
    overlap: bool,
    levels: tuple[int, ...] = (),
) -> list[tuple[str, Task]]:
    """
    The tasks of a reshard of this number, each with its move's kind.

    `sources` are the reshards it reads the arrivals of, and `levels` those that the collective crossed that made its
    operand, if one did: a local move is done on the streams that made its operand. Without `overlap` every collective
    holds the compute streams, too.
    """
    out: list[tuple[str, Task]] = []
    reads = sources
    for kind, ticks, crossed, groups in steps:
        if crossed:
            levels = crossed
        for group in groups:
            computes = tuple(streams.compute(k) for k in group)
            ports = tuple(streams.port(k, level) for k in group for level in levels)
            held = ports if ports and overlap else (*computes, *ports)
            waits = tuple(key for k in group for key in arrivals(reads, streams, k))
            sets = tuple(key for k in group for key in arrivals((number,), streams, k))
            out.append((kind, (ticks, tuple(dict.fromkeys((*computes, *ports))), held, waits, sets)))
        reads = (number,)
    return out


def stall(streams: Streams, steps: Sequence[Step], sources: Sequence[int]) -> list[tuple[str, Task]]:
    """The tasks of moves that are waited for at once, such as halo exchanges: they hold the compute streams."""
    found = chain(streams, steps, 0, sources, overlap=False)
    first = len(steps[0][3]) if steps else 0
    return [
        (kind, (ticks, after, held, waits if i < first else (), ()))
        for i, (kind, (ticks, after, held, waits, _)) in enumerate(found)
    ]
