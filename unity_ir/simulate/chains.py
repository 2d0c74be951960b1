"""
Turn a reshard's moves (collectives, or steps on each device) into tasks on streams. Reshards have numbers; that the
result of a reshard is complete on a device class (devices that do the same at the same time) is an *arrival*.

A task is issued when the compute streams of its devices reach it in program order, as NCCL's stream waits for the
current one. It starts once its input has arrived and its ports are free.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_ir.simulate.streams import Step, Streams

Key = int
"""An arrival: the number of a reshard (or of its gradient's) times the number of device classes, plus the class."""

Task = tuple[int, tuple[int, ...], tuple[int, ...], tuple[Key, ...], tuple[Key, ...]]
"""Ticks, the streams it is issued after, those of them it occupies, the arrivals it waits for, and those it causes."""


def arrivals(numbers: Sequence[int], streams: Streams, of: int) -> tuple[Key, ...]:
    """
    Return the keys of the arrivals that a task on device class number `of` waits for before it reads the results of
    reshards: for each of `numbers`, the numbers of those reshards, the arrival on that class.
    """
    classes = streams.classes
    return tuple([n * classes + of for n in numbers])


def chain(
    streams: Streams,
    steps: Sequence[Step],
    number: int,
    sources: Sequence[int],
    overlap: bool,
    levels: tuple[int, ...] = (),
) -> list[tuple[str, Task]]:
    """
    Return the tasks of one reshard, each as (move's kind, task): per move, one for each group of device classes that
    exchange data. A class stands for devices that do the same (`Streams`); a task is (ticks, streams it is issued
    after, streams it occupies, keys of the arrivals it waits for, and of those it causes).

    `steps` are its moves, `number` is the number by which other tasks wait for its result, and `sources` are the
    numbers of the reshards whose results it reads. `levels` are the machine levels crossed by the collective that made
    its operand, () if none did: moves on the devices themselves run on that collective's streams. Without `overlap`,
    every collective occupies the compute streams, too.
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
    """
    Return the tasks of moves during which kernels wait, such as halo exchanges, each as (move's kind, task): they
    occupy the compute streams, too, and cause no arrivals.

    `steps` are the moves. The first waits for the results of the reshards with numbers `sources`.
    """
    found = chain(streams, steps, 0, sources, overlap=False)
    first = len(steps[0][3]) if steps else 0
    return [
        (kind, (ticks, after, held, waits if i < first else (), ()))
        for i, (kind, (ticks, after, held, waits, _)) in enumerate(found)
    ]
